// Requests to the API: the token, errors as problem details, and the clock of the server.
//
// The token comes in the fragment when the page is first opened, #token=…, and goes to
// sessionStorage. It is then removed from the address bar and sent as a header. There are
// no cookies: over HTTP they ignore ports.

/** base is the address of the API, relative to the page: it survives the prefix of a proxy. */
export const base = new URL('api/v1/', location.href.split('#')[0]);

const key = 'ckptstore.token';
let token = '';

/** takeToken moves a token from the fragment, #token=… or #/…?token=…, to the storage of this tab. It reports whether there was one. */
export function takeToken(): boolean {
  const m = /(^#|[&?])token=([^&]*)(&|$)/.exec(location.hash);
  try {
    if (m) sessionStorage.setItem(key, decodeURIComponent(m[2]));
    token = sessionStorage.getItem(key) ?? '';
  } catch {
    if (m) token = m[2]; // no storage: as long as the page is open
  }
  if (!m) return false;
  const rest = location.hash.replace(m[0], m[3] ? m[1] : '');
  history.replaceState(null, '', rest.length > 1 ? rest : '#/');
  begun.clear();
  return true;
}

/** setToken is for the form that is shown when the server refuses the page. */
export function setToken(t: string) {
  token = t;
  begun.clear();
  try {
    sessionStorage.setItem(key, t);
  } catch {
    // As above.
  }
}

export function authorization(): Record<string, string> {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

/** ApiError is an answer that is not 2xx, or no answer: then status is 0. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly hint = '',
    readonly again = 0, // seconds after which the server wants to be asked again; 0: not
  ) {
    super(message);
  }
}

let oldest = Infinity;

/** oldestAnswer returns the least sequence that an answer about now was read at. */
export function oldestAnswer(): number {
  return oldest;
}

let newest: (() => number) | undefined;
let behind: () => void = () => {};

/**
 * followed tells that the page follows the log; seen returns the newest event that it has seen. then
 * is called when an answer arrives that was asked for before the page followed the log, or
 * before a screen wanted it, and lacks such an event: no later event makes a screen ask again.
 */
export function followed(seen: () => number, then: () => void) {
  newest = seen;
  behind = then;
}

let offset = 0; // of the server's clock, in ms

/** serverNow returns the server's time, as known from its last answer. */
export function serverNow(): number {
  return Date.now() + offset;
}

/** problem reads the error of an answer: problem details, or its text. */
export async function problem(r: Response): Promise<ApiError> {
  const text = await r.text().catch(() => '');
  const again = Math.max(0, Math.min(60, Number(r.headers.get('Retry-After') ?? 0) || 0));
  try {
    const p = JSON.parse(text);
    const message = p.detail || p.error || p.title || r.statusText;
    return new ApiError(r.status, String(message), p.hint ? String(p.hint) : '', again);
  } catch {
    return new ApiError(r.status, text.slice(0, 300) || r.statusText || `status ${r.status}`);
  }
}

/** Answer is a decoded answer, and the sequence of the log that it shows. */
export interface Answer<T> {
  data: T;
  sequence: number;
}

export type Query = Record<string, string | number | boolean | string[] | undefined>;

/**
 * segment encodes a name as one segment of a path. Browsers remove the segments "." and "..",
 * however they are encoded: a run with such a name is a parameter of the request.
 */
export function segment(name: string): string {
  return name === '.' ? '@' : name === '..' ? '@@' : encodeURIComponent(name); // which never gives an @
}

/** address is where a path of the API is. Members of the query that are empty are left out; a list is repeated. */
export function address(path: string, query: Query): URL {
  const dots = /^runs\/(@@?)(?=\/|$)/.exec(path);
  const url = new URL(dots ? path.replace(dots[1], '-') : path, base);
  if (dots) url.searchParams.set('run', dots[1].replaceAll('@', '.'));
  for (const [k, v] of Object.entries(query)) {
    if (v == null || v === '' || v === false || v === 0) continue;
    for (const one of Array.isArray(v) ? v : [v]) url.searchParams.append(k, String(one));
  }
  return url;
}

/** patience bounds an answer, in milliseconds. */
const patience = 30_000;

/** fresh is for how long an answer that was asked for ahead is used, in milliseconds. */
const fresh = 10_000;

const begun = new Map<string, { answer: Promise<Response>; at: number }>();

const asked = new Set<string>(); // what screens asked for since the page was opened

/** ahead sends a request before a screen needs it, if none has asked yet. The first get of the same takes its answer. */
export function ahead(path: string, query: Query): Promise<Response> | undefined {
  const url = address(path, query);
  if (asked.has(url.href)) return undefined;
  const answer = fetch(url, { headers: authorization(), signal: AbortSignal.timeout(patience), credentials: 'omit' });
  answer.catch(() => {}); // get sees the error
  begun.set(url.href, { answer, at: performance.now() });
  return answer;
}

/** taken returns the answer to a request that was sent ahead, once. */
function taken(url: URL): Promise<Response> | undefined {
  if (performance.now() < fresh) asked.add(url.href);
  const early = begun.get(url.href);
  begun.delete(url.href);
  return early && performance.now() - early.at < fresh ? early.answer : undefined;
}

let refused: (reason: string) => void = () => {};

/** whenRefused sets what happens when an answer is that the token is not valid. */
export function whenRefused(then: (reason: string) => void) {
  refused = then;
}

/** get asks the API. */
export async function get<T>(path: string, query: Query, signal: AbortSignal): Promise<Answer<T>> {
  const url = address(path, query);
  const deadline = AbortSignal.timeout(patience);
  const used = token;
  const ready = taken(url);
  const early = ready != null || newest == null;
  let r: Response;
  try {
    r = await (ready ?? fetch(url, { headers: authorization(), signal: AbortSignal.any([signal, deadline]), credentials: 'omit' }));
  } catch (e) {
    if (signal.aborted) throw e;
    throw new ApiError(0, deadline.aborted ? 'no answer within 30 s' : 'the server does not answer');
  }
  if (!r.ok) {
    const e = await problem(r);
    if (e.status === 401 && used === token) refused(e.message);
    throw e;
  }
  const date = Date.parse(r.headers.get('Date') ?? '');
  // The header has whole seconds: a difference below 2 s is not a difference of clocks.
  if (!Number.isNaN(date)) offset = Math.abs(date - Date.now()) < 2000 ? 0 : date - Date.now();
  const sequence = Number(r.headers.get('Ckpt-Sequence') ?? 0);
  if (sequence > 0 && !query.as_of && !query.page) {
    oldest = Math.min(oldest, sequence);
    if (early && newest != null && sequence < newest()) behind();
  }
  return { data: await r.json(), sequence };
}
