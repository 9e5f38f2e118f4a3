// Tests of the pure parts of the page, as Vite compiles them.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { runnerImport } from 'vite';

async function load(path) {
  const { module } = await runnerImport(new URL(path, import.meta.url).pathname, { configFile: false, logLevel: 'error' });
  return module;
}

const format = await load('../src/format.ts');
const columns = await load('../src/chart/columns.ts');
const phases = await load('../src/chart/phases.ts');
const sse = await load('../src/sse.ts');

test('numbers', () => {
  assert.equal(format.bytes(1536), '1.5 KiB');
  assert.equal(format.bytes(null), '–');
  assert.equal(format.count(1234567), '1\u202f234\u202f567');
  assert.equal(format.metric(0.123456789), '0.12346');
  assert.equal(format.metric(1.5e9), '1.500e+9');
  assert.equal(format.metric('NaN'), 'NaN');
  assert.equal(format.plural(1, 'rank'), '1 rank');
});

test('durations', () => {
  for (const [s, want] of [
    [0.004, '4 ms'], [0.31, '0.31 s'], [4.1, '4.1 s'], [9.97, '10 s'], [59.6, '1 min 00 s'], [110, '1 min 50 s'],
    [3599.7, '1 h 00 min'], [11100, '3 h 05 min'], [86400 * 2 + 3600 * 4, '2 d 4 h'], [NaN, '–'],
  ]) assert.equal(format.duration(s), want, `${s}`);
});

test('a time that is not known', () => {
  assert.equal(format.between('2026-01-01T00:00:00.5Z', '2026-01-01T00:00:02Z'), 1.5);
  assert.equal(format.between('2026-01-01T00:00:00Z', '2026-01-01T00:00:00Z'), null);
  assert.equal(format.between('0001-01-01T00:00:00Z', '2026-01-01T00:00:00Z'), null);
  assert.equal(format.ago(undefined, 0), '–');
  assert.equal(format.ago('2026-01-01T00:00:00Z', Date.parse('2026-01-01T00:04:59Z')), '4 min ago');
  assert.equal(format.ago('2026-01-01T00:00:10Z', Date.parse('2026-01-01T00:00:00Z')), 'now'); // clocks that differ
});

test('hostile names', () => {
  assert.equal(format.name('<img src=x onerror=alert(1)>'), '<img src=x onerror=alert(1)>');
  assert.equal(format.name('a\u202eb\u0000'), 'a⟨U+202E⟩b⟨U+0000⟩');
  assert.equal([...format.name('x'.repeat(10_000), 60)].length, 60);
  assert.equal([...format.clip('😀'.repeat(100), 10)].length, 10);
  assert.equal(format.block('a\n\tb\u2066'), 'a\n\tb⟨U+2066⟩');
  assert.equal(format.printed('\u001b[1;31mred\u001b[0m\ttab\u202e'), 'red\ttab⟨U+202E⟩');
  assert.equal(format.printed(' 10 %\r 50 %\r100 %\r'), '100 %');
  assert.equal(format.printed('\u001b]8;;http://x\u0007link\u001b]8;;\u0007 \u0007'), 'link ⟨U+0007⟩');
  assert.equal(format.printed(''), '');
  assert.equal([...format.printed('x'.repeat(10_000))].length, 2000);
  assert.equal(format.sh("it's $(rm)"), `'it'\\''s $(rm)'`);
  assert.equal(format.command('ckptstore', 'ls', 'a b', false, '--all'), "ckptstore ls 'a b' --all");
});

test('a spike stays within the bounds, whatever the other values', () => {
  const x = Array.from({ length: 800 }, (_, i) => i * 100);
  const c = { x, step: x, attempt: x.map(() => 1), min: x.map(() => 1), max: x.map((_, i) => (i === 777 ? 1e6 : 2)), last: x.map(() => 1.5), nonfinite: x.map(() => 0) };
  const [lo, hi] = columns.range(columns.bounds([c], 0, 80_000, false), false);
  assert.ok(lo < 1 && hi > 1e6);
  assert.deepEqual(columns.bounds([c], 0, 1000, false), [1, 2]);
  const e = columns.ends(c);
  assert.equal(e.max.value, 1e6);
  assert.equal(e.max.x, 77_700);
});

test('a smoothed line lies within its values, at every zoom', () => {
  const of = (x, last) => ({ ...columns.empty(), x, last });
  const each = Array.from({ length: 1000 }, (_, i) => i + 1);
  const wave = each.map((x) => Math.sin(x / 9) + (x === 500 ? 100 : 0));
  const a = columns.smoothed(of(each, wave), 100);
  assert.ok(a.every((v, i) => v >= Math.min(...wave.slice(0, i + 1)) && v <= Math.max(...wave.slice(0, i + 1))));
  // An average of the textbook, value by value.
  let mean = wave[0];
  for (let i = 1; i < 1000; i++) mean += (2 / 101) * (wave[i] - mean);
  assert.ok(Math.abs(a[999] - mean) < 1e-9);
  // Steps of 10 iterations: the same average of a line that changes as slowly.
  const step = (x) => (x <= 500 ? 1 : 3);
  const fine = columns.smoothed(of(each, each.map(step)), 50);
  const tens = each.filter((x) => x % 10 === 0);
  const coarse = columns.smoothed(of(tens, tens.map(step)), 50);
  coarse.forEach((v, i) => assert.ok(Math.abs(v - fine[tens[i] - 1]) < 1e-9));
  assert.deepEqual(columns.smoothed(of([1, 2, 3], [null, 4, null]), 10), [null, 4, null]);
  assert.deepEqual(columns.smoothed(columns.empty(), 10), []);
});

test('bounds of no numbers', () => {
  assert.equal(columns.bounds([columns.empty()], 0, 10, false), null);
  assert.deepEqual(columns.range(null, false), [0, 1]);
  const c = { ...columns.empty(), x: [1], min: [-1], max: [-1], last: [-1] };
  assert.equal(columns.bounds([c], 0, 10, true), null);
});

test('lanes', () => {
  const line = { x: [1, 2, 3, 4], step: [1, 2, 3, 4], attempt: [1, 1, 2, 2], min: [], max: [], last: [], nonfinite: [] };
  const hidden = { x: [3, 4], step: [3, 4], attempt: [1, 1], min: [], max: [], last: [], nonfinite: [] };
  assert.deepEqual(columns.lanes(line, [hidden]), [
    { attempt: 1, kept: [1, 2], superseded: [3, 4] },
    { attempt: 2, kept: [3, 4], superseded: null },
  ]);
  assert.equal(columns.place(line, 3, 2), 3);
  assert.equal(columns.place(line, 99, 2), 4);
  assert.equal(columns.place(line, 3, 7), 3);
});

test('waterfall', () => {
  const rank = (r, write, error = '') => ({ rank: r, node: 0, seconds: { copy: 1, write }, bytesWritten: 1, bytesReused: 0, sealed: true, completed: true, error });
  const few = phases.choose([rank(0, 1), rank(1, 5), rank(2, 2)], String);
  assert.deepEqual(few.rows.map((r) => r.rank), [1, 2, 0]);
  assert.equal(few.note, '');
  const many = phases.choose(Array.from({ length: 100 }, (_, i) => rank(i, i)), String);
  assert.equal(many.rows.length, 32);
  assert.match(many.note, /32 slowest of 100 ranks.*other 68/);
  const worst = phases.slowest([rank(0, 1), rank(1, 5), rank(2, 1)]);
  assert.equal(worst.rank.rank, 1);
  assert.equal(worst.phase, 'write');
  assert.equal(worst.over, 4);
  assert.equal(phases.slowest([rank(0, 1)]), null);
  assert.equal(phases.slowest([rank(0, 5), rank(1, 5.1), rank(2, 5)]), null); // noise blames no rank
});

test('server-sent events, cut at every byte', () => {
  const text = ': hello\r\n\r\nid: 7\ndata: {"a":1}\n\nevent: caught-up\rdata: x\ndata: y\n\nid: 8\n';
  const want = [
    { id: '7', event: 'message', data: '{"a":1}' },
    { id: '7', event: 'caught-up', data: 'x\ny' },
  ];
  for (let cut = 0; cut <= text.length; cut++) {
    const d = new sse.Decoder();
    assert.deepEqual([...d.push(text.slice(0, cut)), ...d.push(text.slice(cut))], want, `cut at ${cut}`);
  }
});

test('the pause before a new connection grows to ten seconds', () => {
  assert.equal(sse.backoff(1, 1), 250);
  assert.equal(sse.backoff(1, 0), 125);
  assert.equal(sse.backoff(20, 1), 10_000);
});
