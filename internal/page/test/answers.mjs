// Measures the answers of the API that the page asks for, on a store that exists, and a drag of
// the moment in the page.
//
//	PAGE_BIN, CHROMIUM    as in serve.mjs
//	arguments             directory of the store, answers of each kind (default 300)
//
// A request and its answer, whole, over one connection that stays open; compressed as browsers ask.
// A drag is the time from a move of the slider to the frame that shows the run as of that event.
import { request, Agent } from 'node:http';
import { loadavg } from 'node:os';
import { gunzipSync } from 'node:zlib';

import { browser as launch, end, quantile, serve } from './serve.mjs';

const [store, times = '300'] = process.argv.slice(2);
const n = Number(times);
const server = await serve(store, 0, 600_000);
const agent = new Agent({ keepAlive: true, maxSockets: 1 });

/** ask returns an answer, its bytes on the wire, and how long it took. */
function ask(path) {
  const begin = performance.now();
  return new Promise((done, fail) => {
    const r = request(`${server.origin}/api/v1/${path}`, { agent, headers: { Authorization: `Bearer ${server.token}`, 'Accept-Encoding': 'gzip' } }, (a) => {
      const parts = [];
      a.on('data', (d) => parts.push(d));
      a.on('error', fail);
      a.on('end', () => {
        const ms = performance.now() - begin;
        const raw = Buffer.concat(parts);
        const text = a.headers['content-encoding'] === 'gzip' ? gunzipSync(raw).toString() : raw.toString();
        if (a.statusCode !== 200) fail(Object.assign(new Error(`${path}: ${a.statusCode} ${text.slice(0, 300)}`), { status: a.statusCode }));
        else done({ ms, bytes: raw.length, body: JSON.parse(text) });
      });
    });
    r.on('error', fail);
    r.end();
  });
}

let seed = 1;
/** random returns a whole number below a limit, the same ones in each run of this program. */
const random = (limit) => (seed = (seed * 1103515245 + 12345) % 2147483648) % limit;

async function series(name, path) {
  const all = [];
  for (let i = 0; i < n; i++) all.push(await ask(path(i)));
  const ms = all.map((a) => a.ms);
  const size = Math.max(...all.map((a) => a.bytes));
  console.log(`${name}: p50 ${quantile(ms, 0.5).toFixed(1)}, p95 ${quantile(ms, 0.95).toFixed(1)}, p99 ${quantile(ms, 0.99).toFixed(1)}, max ${Math.max(...ms).toFixed(1)} ms; at most ${size} bytes; ${n} answers, load ${loadavg()[0].toFixed(1)}`);
}

const enc = encodeURIComponent;
try {
  const { body: about } = await ask('store');
  const { body: list } = await ask('runs?limit=1000');
  const runs = list.runs.filter((r) => r.safe).sort((a, b) => b.iterations - a.iterations);
  const run = runs[0];
  const metric = Object.keys(run.metrics)[0];
  console.log(`${about.sequence} events, ${list.runs.length} runs; ${run.run} has ${run.iterations} iterations`);
  const begin = performance.now();
  for (let tries = 1; ; tries++) { // the server prepares the past in the background, once in the life of a store
    try {
      const { ms } = await ask(`runs/${enc(run.run)}?as_of=${about.sequence - 1}`);
      console.log(`an answer as of the end: ${((performance.now() - begin) / 1000).toFixed(1)} s after the start of the server, at try ${tries}, which took ${ms.toFixed(0)} ms`);
      break;
    } catch (e) {
      if (e.status !== 503 || performance.now() - begin > 1_800_000) throw e;
      if (tries % 30 === 1) console.log(`  ${e.message}`);
      await new Promise((done) => setTimeout(done, 2000));
    }
  }
  await series('metric, whole line', () => `runs/${enc(run.run)}/metrics?metric=${enc(metric)}&points=800&all=true`);
  await series('metric, random part', () => {
    const from = 1 + random(run.iterations - 1);
    return `runs/${enc(run.run)}/metrics?metric=${enc(metric)}&points=800&all=true&from=${from}&until=${from + random(run.iterations - from + 1)}`;
  });
  const { body: page } = await ask(`runs/${enc(run.run)}/checkpoints?all=true&limit=1000`);
  const ids = page.checkpoints.filter((c) => c.state === 'committed').map((c) => c.id);
  await series('checkpoints, a page of 60', () => `runs/${enc(run.run)}/checkpoints?all=true&limit=60`);
  await series('checkpoint', () => `runs/${enc(run.run)}/checkpoints/${enc(ids[random(ids.length)])}`);
  await series('save', () => `runs/${enc(run.run)}/checkpoints/${enc(ids[random(ids.length)])}/save`);
  const oldest = page.checkpoints.at(-1).sequence;
  const then = () => oldest + random(about.sequence - oldest);
  await series('run as of a random event', () => `runs/${enc(run.run)}?as_of=${then()}`);
  await series('metric as of a random event', () => `runs/${enc(run.run)}/metrics?metric=${enc(metric)}&points=800&all=true&as_of=${then()}`);
  await series('checkpoints as of a random event, a page of 60', () => `runs/${enc(run.run)}/checkpoints?all=true&limit=60&as_of=${then()}`);

  // The drag: from left to right, with the pauses of a hand.
  const browser = await launch();
  const tab = await browser.newPage();
  const first = oldest;
  await tab.goto(`${server.origin}/#/runs/${enc(run.run)}?as_of=${first}&token=${server.token}`);
  await tab.waitForSelector('.bar-note input[type=range]');
  await tab.waitForSelector('.sentence b');
  const drags = [];
  for (let i = 1; i <= 60; i++) {
    const to = first + Math.floor(((about.sequence - first) * i) / 60);
    drags.push(await tab.evaluate(async ([to, path]) => {
      const slider = document.querySelector('.bar-note input[type=range]');
      const begin = performance.now();
      slider.value = to;
      slider.dispatchEvent(new Event('input', { bubbles: true }));
      const wanted = (e) => e.name.includes(path) && e.name.includes(`as_of=${to}`) && e.responseEnd > 0;
      await new Promise((done, fail) => {
        const watch = new PerformanceObserver(() => {
          if (performance.getEntriesByType('resource').some(wanted)) (watch.disconnect(), done());
        });
        watch.observe({ type: 'resource', buffered: true });
        setTimeout(() => fail(new Error(`no answer as of ${to}`)), 30_000);
      });
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      performance.clearResourceTimings();
      return performance.now() - begin;
    }, [to, `/runs/${enc(run.run)}?`]));
    await tab.waitForTimeout(30);
  }
  await browser.close();
  console.log(`drag: p50 ${quantile(drags, 0.5).toFixed(0)}, p95 ${quantile(drags, 0.95).toFixed(0)}, max ${Math.max(...drags).toFixed(0)} ms; ${drags.length} moves, load ${loadavg()[0].toFixed(1)}`);
} finally {
  agent.destroy();
  await end(server.process, 'SIGTERM');
}
