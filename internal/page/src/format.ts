// Numbers, sizes, times and durations as text. All functions are pure; none throws.

const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

/** bytes formats a size in bytes, as the commands do: 1.5 GiB. */
export function bytes(n: number | null | undefined): string {
  if (n == null || !Number.isFinite(n)) return '–';
  let unit = 0;
  while (Math.abs(n) >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit++;
  }
  return unit === 0 ? `${n} B` : `${n.toFixed(1)} ${units[unit]}`;
}

/** count formats a whole number with thin spaces between thousands. */
export function count(n: number | null | undefined): string {
  if (n == null) return '–';
  return String(n).replace(/\B(?=(\d{3})+(?!\d))/g, '\u202f');
}

/** plural returns "1 rank", "8 ranks". */
export function plural(n: number, one: string, many = one + 's'): string {
  return `${count(n)} ${n === 1 ? one : many}`;
}

/** metric formats a metric's value in at most 5 significant digits; other values as they are. */
export function metric(v: unknown): string {
  if (typeof v === 'number') {
    if (v === 0) return '0';
    const size = Math.abs(v);
    if (size >= 1e6 || size < 1e-4) return v.toExponential(3);
    return String(Number(v.toPrecision(5)));
  }
  if (v == null) return '–';
  return clip(typeof v === 'string' ? v : JSON.stringify(v), 80);
}

/** duration formats seconds: 0.31 s, 4.1 s, 1 min 50 s, 3 h 05 min, 2 d 4 h. */
export function duration(s: number | null | undefined): string {
  if (s == null || !Number.isFinite(s)) return '–';
  if (s < 0) return '-' + duration(-s);
  if (s < 0.0995) return `${Math.round(s * 1000)} ms`;
  if (s < 1) return `${s.toFixed(2)} s`;
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 59.5) return `${Math.round(s)} s`;
  const total = Math.round(s);
  const two = (n: number) => String(n).padStart(2, '0');
  if (total < 3600) return `${Math.floor(total / 60)} min ${two(total % 60)} s`;
  const minutes = Math.round(total / 60);
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
  const hours = Math.round(minutes / 60);
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** brief is a duration with one unit, for "4 min ago". */
export function brief(s: number): string {
  if (s < 1) return 'now';
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}

/** known reports whether a time of the API is set: Go's zero time is not. */
export function known(time: string | null | undefined): time is string {
  return !!time && !time.startsWith('0001-');
}

/** since returns the seconds from a time of the API until now, or null. */
export function since(time: string | null | undefined, now: number): number | null {
  if (!known(time)) return null;
  const at = Date.parse(time);
  return Number.isNaN(at) ? null : Math.max(0, (now - at) / 1000);
}

/** ago formats a time as "4 min ago". */
export function ago(time: string | null | undefined, now: number): string {
  const s = since(time, now);
  if (s == null) return '–';
  return s < 1 ? 'now' : `${brief(s)} ago`;
}

/** between returns the seconds between two times, or null. Equal times are those of a receipt, which has one time only. */
export function between(from: string | undefined, to: string | undefined): number | null {
  if (!known(from) || !known(to) || from === to) return null;
  return (Date.parse(to) - Date.parse(from)) / 1000;
}

/** clock formats the time of day with milliseconds, in local time. */
export function clock(time: string | null | undefined): string {
  if (!known(time)) return '–';
  const d = new Date(time);
  const two = (n: number) => String(n).padStart(2, '0');
  return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}.${String(d.getMilliseconds()).padStart(3, '0')}`;
}

/** when formats a date and a time of day, in local time. */
export function when(time: string | null | undefined): string {
  if (!known(time)) return '–';
  const d = new Date(time);
  const two = (n: number) => String(n).padStart(2, '0');
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
}

/** clip cuts a text to at most this many characters. */
export function clip(text: string, most: number): string {
  const all = [...text.slice(0, 2 * most + 2)];
  return all.length <= most ? text : all.slice(0, most - 1).join('') + '…';
}

/** shown makes invisible and direction-changing characters of a name visible, as ⟨U+202E⟩. */
export function shown(text: string): string {
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, (c) =>
    `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, '0')}⟩`);
}

/** block is a text of several lines, with invisible characters made visible. */
export function block(text: string): string {
  return text.split('\n').map((l) => l.split('\t').map(shown).join('\t')).join('\n');
}

/** printed is a line of output as a terminal leaves it: without colors, the last state of a line that was redrawn; at most 2,000 characters. */
export function printed(text: string): string {
  const plain = text.replace(/\u001b(\[[0-9;?]*[ -/]*[@-~]|\][^\u0007\u001b]*(\u0007|\u001b\\))/g, '');
  return block(clip(plain.split('\r').filter(Boolean).at(-1) ?? '', 2000));
}

/** name is a name from the store as it is shown in a cell: visible and at most so long. */
export function name(text: string | null | undefined, most = 60): string {
  return clip(shown(text ?? ''), most);
}

/** ranges formats ranks as "0–3, 7". */
export function ranges(ranks: number[]): string {
  const sorted = [...ranks].sort((a, b) => a - b);
  const out: string[] = [];
  for (let i = 0; i < sorted.length; i++) {
    const first = sorted[i];
    while (i + 1 < sorted.length && sorted[i + 1] === sorted[i] + 1) i++;
    out.push(sorted[i] > first ? `${first}–${sorted[i]}` : `${first}`);
  }
  return out.join(', ');
}

/** sh quotes a word for a POSIX shell. */
export function sh(word: string): string {
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}

/** command joins words to a command line. Words that are empty or false are left out. */
export function command(...words: (string | false | null | undefined)[]): string {
  return words.filter((w): w is string => !!w).map(sh).join(' ');
}
