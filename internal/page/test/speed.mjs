// Measures a cold load of the page: a new browser profile, the processor slowed down.
//
//	PAGE_BIN, CHROMIUM    as in serve.mjs
//	arguments             directory of the store, runs (default 5), factor of the processor (default 4)
//
// Times are from the navigation to the frame that shows: the sentence, the chart with its values.
// Bytes are those of the API's answers with their headers, as they were sent; a screen with more than
// its share fails.
import assert from 'node:assert/strict';
import { loadavg } from 'node:os';

import { browser as launch, end, quantile, serve } from './serve.mjs';

const most = { store: 40 << 10, run: 60 << 10 }; // bytes
const [store, runs = '5', slow = '4'] = process.argv.slice(2);
const server = await serve(store, 0, 600_000);
const browser = await launch();

/** mark notes in the page when what a view shows first has been drawn. */
function mark(wanted) {
  globalThis.seen = {};
  const look = () => {
    for (const [name, [selector, text]] of Object.entries(wanted)) {
      const e = globalThis.seen[name] == null && document.querySelector(selector);
      if (!e || (text && !e.textContent.includes(text))) continue;
      globalThis.seen[name] = -1; // it is in the next frame
      requestAnimationFrame(() => {
        const after = new MessageChannel();
        after.port1.onmessage = () => (globalThis.seen[name] = performance.now());
        after.port2.postMessage(0);
      });
    }
  };
  new MutationObserver(look).observe(document, { childList: true, subtree: true, characterData: true });
}

async function load(view, wanted) {
  const context = await browser.newContext();
  const page = await context.newPage();
  await page.addInitScript(mark, wanted);
  const cdp = await context.newCDPSession(page);
  await cdp.send('Network.enable');
  await cdp.send('Emulation.setCPUThrottlingRate', { rate: Number(slow) });
  const answers = new Map();
  cdp.on('Network.responseReceived', (e) => e.response.url.includes('/api/v1/') && !e.response.url.includes('/stream') && answers.set(e.requestId, { url: e.response.url, bytes: 0 }));
  cdp.on('Network.loadingFinished', (e) => answers.has(e.requestId) && (answers.get(e.requestId).bytes = e.encodedDataLength));
  await page.waitForTimeout(1500); // the browser's own windows load, too
  await page.goto(`${server.origin}/#${view}?token=${server.token}`);
  await page.waitForFunction((n) => Object.values(globalThis.seen).filter((t) => t > 0).length === n, Object.keys(wanted).length, { timeout: 60_000 });
  await page.waitForLoadState('networkidle', { timeout: 10_000 }).catch(() => {}); // the stream stays
  const seen = await page.evaluate(() => globalThis.seen);
  if (process.env.PAGE_TRACE) {
    const all = await page.evaluate(() => performance.getEntriesByType('resource').map((r) => [Math.round(r.startTime), Math.round(r.responseEnd), r.transferSize, r.name.split('/').slice(3).join('/')]));
    for (const r of all) console.log('   ', ...r);
    const m = await cdp.send('Performance.enable').then(() => cdp.send('Performance.getMetrics'));
    console.log('   ', m.metrics.filter((x) => /Duration|Heap/.test(x.name)).map((x) => `${x.name} ${x.value.toFixed(3)}`).join(', '));
  }
  await context.close();
  const all = [...answers.values()];
  return { ...seen, answers: all.length, bytes: all.reduce((sum, a) => sum + a.bytes, 0) };
}

try {
  const headers = { Authorization: `Bearer ${server.token}` };
  const first = (await (await fetch(`${server.origin}/api/v1/runs?limit=1`, { headers })).json()).runs[0];
  const views = {
    store: ['/', { sentence: ['.sentence', 'training'], rows: ['tbody a[data-row]', ''], chart: ['svg.spark', ''] }],
    run: [`/runs/${encodeURIComponent(first.run)}`, { sentence: ['.sentence', 'Safe at'], chart: ['.chart canvas', ''], rows: ['tbody a[data-row]', ''] }],
    checkpoint: [`/runs/${encodeURIComponent(first.run)}/c/${encodeURIComponent(first.safe.checkpoint)}`, { sentence: ['.sentence', ''] }],
    events: ['/events', { rows: ['tbody a[data-row]', ''] }],
  };
  for (const [name, [view, wanted]] of Object.entries(views)) {
    const all = [];
    for (let i = 0; i < Number(runs); i++) all.push(await load(view, wanted));
    const median = (key) => Math.round(quantile(all.map((a) => a[key]), 0.5));
    const text = Object.keys(wanted).map((k) => `${k} ${median(k)} ms (${all.map((a) => Math.round(a[k])).join(' ')})`);
    console.log(`${name}: ${text.join(', ')}; ${median('answers')} answers, ${median('bytes')} bytes; load ${loadavg()[0].toFixed(1)}`);
    assert.ok(!(median('bytes') > most[name]), `${name}: more than ${most[name]} bytes`);
  }
} finally {
  await browser.close();
  await end(server.process, 'SIGTERM');
}
