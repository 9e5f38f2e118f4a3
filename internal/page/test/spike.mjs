// Judges the chart of a run with many iterations: one value of a million is a spike, and the next
// one is NaN. Pixels of the canvas must show both, at every zoom and in both themes.
//
//	PAGE_BIN, CHROMIUM    as in serve.mjs
//	arguments             directory of the store, iteration of the spike, whose value is 1000
import assert from 'node:assert/strict';

import { browser as launch, end, serve } from './serve.mjs';

const [store, at] = process.argv.slice(2);
const spike = Number(at);
const server = await serve(store, 0, 600_000);
const browser = await launch();

/** look counts the pixels near colors of the theme, in the columns around a part of the plot. */
const look = ([part, margin, deadline]) => new Promise((done) => {
  const css = getComputedStyle(document.documentElement);
  const color = (name) => css.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map((n) => parseInt(n, 16));
  const begin = performance.now();
  const frame = () => {
    const canvas = document.querySelector('.chart canvas');
    const line = [color('--chart-line'), color('--chart-band')];
    const bad = [color('--bad')];
    const found = { high: 0, elsewhere: 0, marks: 0, marksElsewhere: 0 };
    if (canvas?.width) {
      const [left, right, bottom] = [64, 12, 28].map((n) => n * devicePixelRatio); // the axes
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      const plot = canvas.width - left - right;
      for (let y = 0; y < canvas.height - bottom; y++) {
        for (let x = left; x < canvas.width - right; x++) {
          const i = 4 * (y * canvas.width + x);
          if (data[i + 3] < 100) continue;
          const near = (all) => all.some(([r, g, b]) => Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 40);
          const close = Math.abs((x - left) / plot - part) < margin;
          if (y < canvas.height / 3 && near(line)) found[close ? 'high' : 'elsewhere']++;
          if (y > canvas.height / 2 && near(bad)) found[close ? 'marks' : 'marksElsewhere']++;
        }
      }
    }
    if (found.high > 5 && found.marks > 5) requestAnimationFrame(() => done(found));
    else if (performance.now() - begin > deadline) done(found);
    else requestAnimationFrame(frame);
  };
  frame();
});

let n = 0;
try {
  const headers = { Authorization: `Bearer ${server.token}` };
  const { runs } = await (await fetch(`${server.origin}/api/v1/runs?limit=1`, { headers })).json();
  const [{ run, iterations }] = runs;
  for (const colorScheme of ['light', 'dark']) {
    const page = await browser.newPage({ viewport: { width: 1280, height: 900 }, colorScheme });
    await page.goto(`${server.origin}/#/?token=${server.token}`);
    const zooms = [[1, iterations]];
    for (let half = 400_000; half >= 4; half = Math.floor(half / 7)) {
      zooms.push([Math.max(1, spike - half), Math.min(iterations, spike + half)], [Math.max(1, spike - 2 * half), Math.min(iterations, spike + Math.ceil(half / 3) + 1)]);
    }
    for (const [from, until] of zooms) {
      await page.goto(`${server.origin}/#/runs/${encodeURIComponent(run)}?metric=loss&from=${from}&until=${until}`);
      await page.waitForFunction(() => /greatest 1000 /.test(document.querySelector('.readout')?.textContent ?? '') && document.querySelector('.readout .bad'), null, { timeout: 30_000 });
      const part = (spike - from) / (until - from);
      const found = await page.evaluate(look, [part, 0.02 + 2 / (until - from), 10_000]);
      const where = `${colorScheme}, iterations ${from} to ${until}: ${JSON.stringify(found)}`;
      assert.ok(found.high > 5 && found.marks > 5, `the spike or the NaN is not drawn: ${where}`);
      assert.ok(found.elsewhere === 0 && found.marksElsewhere === 0, `something is drawn elsewhere: ${where}`);
      n++;
    }
    await page.close();
  }
  console.log(`${run}, ${iterations} iterations: the spike at ${spike} and the NaN after it are drawn at ${n} zooms, light and dark`);
} finally {
  await browser.close();
  await end(server.process, 'SIGTERM');
}
