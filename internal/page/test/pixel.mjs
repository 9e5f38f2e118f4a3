// Measures the time from an event in the log to the changed picture of a page that is open.
//
//	PAGE_BIN, CHROMIUM    as in serve.mjs
//	arguments             how many events of each kind (default 50)
//
// A run of one rank reports, and saves. Each time is from the server's clock at which the event was
// stored (and from the order to the rank) to the frame in which the chart's pixels, or the text of
// the sentence, differ. There is more than a second between two of them: while the log changes on
// and on, a page asks twice a second.
import assert from 'node:assert/strict';
import { mkdtempSync, rmSync } from 'node:fs';
import { loadavg, tmpdir } from 'node:os';
import path from 'node:path';

import { browser as launch, end, pace, quantile, run, serve } from './serve.mjs';

const count = Number(process.argv[2] ?? 50);
const bound = 5000; // in ms: beyond it the page does not follow the log
const dir = mkdtempSync(path.join(tmpdir(), 'pixel-'));
const store = path.join(dir, 'store');
run('ckptstore', ['init', '--store', store]);
const server = await serve(store);
const browser = await launch();
try {
  const work = pace(store, 'paced', dir);
  for (let i = 1; i <= 10; i++) work.report(i);
  work.save();
  const page = await browser.newPage();
  await page.goto(`${server.origin}/#/runs/paced?token=${server.token}`);
  await page.waitForSelector('.chart canvas');
  await page.waitForSelector('.sentence a:has-text("step-11.a1")');
  await page.waitForSelector('.top .right:has-text("live at")');

  /** shows waits for a frame whose chart, or text, is another one, and returns its time. */
  const shows = (kind) =>
    page.evaluate(([kind, bound]) => {
      const look = () => {
        if (kind === 'save') return document.querySelector('.sentence').textContent.match(/Safe at \S+/)?.[0];
        const c = document.querySelector('.chart canvas');
        const d = c.getContext('2d').getImageData(c.width * 0.06, 0, c.width * 0.94, c.height * 0.88).data;
        let sum = 0;
        for (let i = 0; i < d.length; i += 4) sum = (sum * 31 + d[i] + d[i + 3]) | 0;
        return sum;
      };
      const before = look();
      const since = performance.now();
      return new Promise((done, fail) => {
        const frame = () => {
          if (look() !== before) requestAnimationFrame(() => done(performance.timeOrigin + performance.now())); // it is drawn now
          else if (performance.now() - since > bound + 2000) fail(new Error(`nothing changed in ${bound + 2000} ms`));
          else requestAnimationFrame(frame);
        };
        requestAnimationFrame(frame);
      });
    }, [kind, bound]);

  const times = { report: [], save: [] };
  for (let i = 0; i < count; i++) {
    for (const kind of ['report', 'save']) {
      await page.waitForTimeout(1300 + 400 * Math.random());
      const frame = shows(kind);
      await page.evaluate(() => new Promise((done) => requestAnimationFrame(done))); // it looks now
      const told = performance.timeOrigin + performance.now();
      if (kind === 'report') work.report(10 + (i % 2 ? 5 : -5) * Math.random());
      else work.save();
      times[kind].push({ told, shown: await frame });
    }
  }
  await work.close();
  const events = run('ckptstore', ['events', 'paced', '--store', store, '--json']).trim().split('\n').map(JSON.parse);
  const of = { report: 'report.metrics', save: 'checkpoint.committed' };
  for (const [kind, all] of Object.entries(times)) {
    const stored = events.filter((e) => e.subject.endsWith('.' + of[kind])).slice(-all.length).map((e) => Date.parse(e.stored));
    assert.equal(stored.length, all.length);
    const append = all.map((t, i) => t.shown - stored[i]);
    const order = all.map((t) => t.shown - t.told);
    const text = (n) => ['p50', 'p95', 'max'].map((q, i) => `${q} ${quantile(n, [0.5, 0.95, 1][i]).toFixed(0)}`).join(', ');
    console.log(`${kind}: from the append to the frame ${text(append)} ms; from the order to the rank ${text(order)} ms; ${all.length} events, load ${loadavg()[0].toFixed(1)}`);
    assert.ok(quantile(append, 1) < bound, `an event needed ${quantile(append, 1)} ms`);
  }
} finally {
  await browser.close();
  await end(server.process, 'SIGTERM');
  rmSync(dir, { recursive: true, force: true });
}
