// Shows the page of a real store in Chromium, and judges it. The store is that of
// `trainer demo`, with a run of worker.py, whose names and values are hostile.
//
//	PAGE_BIN, CHROMIUM    as in serve.mjs
//	PAGE_WORK             directory for the store
//	PAGE_SHOTS            directory for screenshots, or empty
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdirSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import path from 'node:path';
import { after, before, test } from 'node:test';
import { bin, browser as launch, end, here, pace, python, run, serve as start } from './serve.mjs';

const work = process.env.PAGE_WORK;
const shots = process.env.PAGE_SHOTS;
const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

const demo = path.join(work, 'demo');
const store = path.join(demo, 'store');
const hostile = '<img src=x onerror=alert(1)>';
const spike = 77;
const deadline = 20_000; // for what the page must do, on a busy machine

let browser;
let server; // as of serve.mjs
let port = 0;

/** serve starts the server, at its earlier port if it had one. */
async function serve() {
  const started = await start(store, port);
  port = started.port;
  return started;
}

/** open opens a view in a browser of its own, and records what must not happen. With wait, it opens nothing yet. */
async function open(view, { theme = 'light', width = 1280, height = 900, scale = 1, token = true, wait = false } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: theme, deviceScaleFactor: scale });
  const page = await context.newPage();
  const bad = [];
  page.on('console', (m) => {
    if (m.text().includes('willReadFrequently')) return; // the tests read the canvas
    if (['error', 'warning'].includes(m.type())) bad.push(`console: ${m.text()}`);
  });
  page.on('pageerror', (e) => bad.push(`error: ${e.stack}`));
  page.on('dialog', async (d) => {
    bad.push(`dialog: ${d.message()}`);
    await d.dismiss();
  });
  page.on('request', (r) => {
    if (new URL(r.url()).origin !== server.origin) bad.push(`request to another origin: ${r.url()}`);
  });
  await page.addInitScript(() => {
    globalThis.violations = [];
    addEventListener('securitypolicyviolation', (e) => globalThis.violations.push(`${e.violatedDirective} ${e.blockedURI} ${e.sample}`));
  });
  const mark = view.includes('?') ? '&' : '?';
  if (!wait) await page.goto(`${server.origin}/#${view}${token ? `${mark}token=${server.token}` : ''}`);
  return {
    page, bad,
    async close() {
      const violations = await page.evaluate(() => globalThis.violations);
      await context.close();
      assert.deepEqual([...bad, ...violations.map((v) => `policy: ${v}`)], []);
    },
  };
}

const enc = encodeURIComponent;

/** last returns the sequence of the log's newest event. */
const last = () => JSON.parse(run('ckptstore', ['events', '--store', store, '--from', 'last', '--json']).trim().split('\n').at(-1)).sequence;

/** follows waits until the page is live and has seen an event. */
const follows = (page, sequence = 0) =>
  page.waitForFunction((n) => Number(/live at (\d+)/.exec(document.querySelector('.top .right')?.textContent ?? '')?.[1] ?? -1) >= n, sequence, { timeout: deadline });

/** titled waits until a view has replaced the one before it: the address changes earlier. */
const titled = (page, title) => page.waitForFunction((t) => document.querySelector('h1')?.textContent === t, title, { timeout: deadline });

const screens = {
  store: { view: '/', title: 'Store', ready: 'table a[data-row]' },
  run: { view: `/runs/killed?metric=loss`, title: 'killed', ready: '.chart canvas' },
  hostile: { view: `/runs/${enc(hostile)}?metric=loss&tab=workers&attempt=1`, title: hostile, ready: '.chart canvas' },
  output: { view: `/runs/${enc(hostile)}?tab=output&stream=err`, title: hostile, ready: 'pre.output' },
  lineage: { view: '/runs/forked?tab=lineage', title: 'forked', ready: 'tbody tr:nth-child(2)' },
  checkpoint: { view: '/runs/killed/c/step-320.a4', title: 'step-320.a4', ready: 'th:has-text("model.layer1.weight")' },
  aborted: { view: '/runs/killed/c/step-120.a1', title: 'step-120.a1', ready: '.sentence' },
  reshard: { view: '/runs/killed/c/step-320.a4?tab=reshard&ranks=3', title: 'step-320.a4', ready: 'td:has-text("%")' },
  events: { view: '/events', title: 'Timeline', ready: 'table a[data-row]' },
  event: { view: `/events?run=${enc(hostile)}&seq=1000`, title: 'Timeline', ready: 'pre' },
  health: { view: '/health', title: 'Health', ready: '.sentence b' },
};

before(async () => {
  run('trainer', ['demo', '--dir', demo, '--json']);
  run('trainer', [
    'run', '-q', '--store', store, '--name', hostile, '--nproc', '2', '--max-restarts', '1', '--set', 'note=<script>alert(2)</script>',
    '--', 'python3', path.join(here, 'worker.py'), '1', '400', String(spike),
  ], { env: python });
  run('ckptstore', ['fork', 'killed@step-120.a2', 'forked', '--store', store]);
  server = await serve();
  browser = await launch();
  if (shots) mkdirSync(shots, { recursive: true });
});

after(async () => {
  await browser?.close();
  if (server) await end(server.process, 'SIGTERM');
});

for (const [name, screen] of Object.entries(screens)) {
  test(`${name}: no error, no violation, axe, light, dark, phone, 200 %`, async () => {
    const { page, close } = await open(screen.view);
    await page.waitForSelector(screen.ready, { timeout: deadline });
    await follows(page);
    assert.ok(!page.url().includes('token='), `the token is in the address: ${page.url()}`);
    await page.evaluate(axe);
    for (const [kind, theme, width, height] of [
      ['light', 'light', 1280, 900], ['dark', 'dark', 1280, 900], ['phone', 'dark', 390, 800], ['phone-light', 'light', 390, 800], ['zoom', 'light', 640, 450],
    ]) {
      await page.emulateMedia({ colorScheme: theme });
      await page.setViewportSize({ width, height });
      await page.waitForFunction((t) => document.documentElement.dataset.theme === t, theme, { timeout: deadline });
      await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))); // layout is observed
      if (kind === 'light' || kind === 'dark' || kind === 'phone') {
        const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ['violations'] }));
        assert.deepEqual(violations.map((v) => `${kind}: ${v.id}: ${v.nodes.map((n) => n.html).slice(0, 3).join(' ')}`), []);
      }
      const wider = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(wider <= 0, `${kind}: the page is ${wider} px wider than the window`);
      if (shots) await page.screenshot({ path: path.join(shots, `${name}-${kind}.png`), fullPage: name !== 'events' });
    }
    await close();
  });
}

/** colors counts pixels of the chart's canvas in a rectangle, by nearness to a color of the theme. The page shows the text of a chart before the code
 *  that draws it has been loaded, and draws in a later frame: it counts until there are enough, or until the deadline. */
async function colors(page, variable, { x, y, w, h }, enough = 0) {
  await page.waitForSelector('.chart canvas', { timeout: deadline });
  return page.evaluate(async ([variable, x, y, w, h, enough, deadline]) => {
    const want = getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
    const [r, g, b] = want.match(/[0-9a-f]{2}/gi).map((n) => parseInt(n, 16));
    for (const end = performance.now() + deadline; ; ) {
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      const canvas = document.querySelector('.chart canvas');
      let n = 0;
      if (canvas && canvas.width > 0) {
        const data = canvas.getContext('2d').getImageData(x * canvas.width, y * canvas.height, w * canvas.width, h * canvas.height).data;
        for (let i = 0; i < data.length; i += 4) {
          if (data[i + 3] > 100 && Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 60) n++;
        }
      }
      if (n >= enough || performance.now() > end) return n;
    }
  }, [variable, x, y, w, h, enough, deadline]);
}

for (const theme of ['light', 'dark']) {
  for (const [zoom, query, top] of [['whole', '', true], ['zoomed', '&from=60&until=100', true], ['elsewhere', '&from=200&until=300', false]]) {
    test(`a spike reaches the top of the chart: ${theme}, ${zoom}`, async () => {
      const { page, close } = await open(`/runs/${enc(hostile)}?metric=loss${query}`, { theme });
      await page.waitForSelector('.chart canvas', { timeout: deadline });
      const high = { x: 0.06, y: 0.05, w: 0.92, h: 0.3 };
      if (top) {
        await page.waitForFunction(() => document.querySelector('.readout')?.textContent.includes('greatest 1000'), null, { timeout: deadline });
        assert.ok((await colors(page, '--chart-line', high, 6)) > 5, 'no pixel of the line in the upper third');
        assert.ok((await colors(page, '--bad', { x: 0.06, y: 0.7, w: 0.92, h: 0.25 }, 11)) > 10, 'no mark of the values that are NaN');
      } else {
        await page.waitForFunction(() => /greatest 0\./.test(document.querySelector('.readout')?.textContent ?? ''), null, { timeout: deadline });
        assert.ok((await colors(page, '--chart-line', { x: 0.06, y: 0, w: 0.92, h: 1 }, 100)) >= 100, 'no line');
        assert.equal(await colors(page, '--bad', { x: 0.06, y: 0.7, w: 0.92, h: 0.25 }), 0, 'a mark where no value is NaN');
      }
      await close();
    });
  }
}

test('a spike within a point of many iterations is drawn by its greatest value', async () => {
  const { page, close } = await open(`/runs/${enc(hostile)}?metric=loss`);
  // The same answer in 20 points, so that the spike is not the last value of its point.
  await page.route('**/metrics?*', (route) => route.continue({ url: route.request().url().replace('points=800', 'points=20') }));
  await page.reload();
  await page.waitForFunction(() => /each point is 2\d/.test(document.querySelector('.readout')?.textContent ?? ''), null, { timeout: deadline });
  assert.ok((await colors(page, '--chart-band', { x: 0.06, y: 0.05, w: 0.92, h: 0.3 }, 6)) > 5, 'no stroke in the upper third');
  await page.unrouteAll({ behavior: 'ignoreErrors' });
  await close();
});

test('a smoothed chart keeps the spike and the marks', async () => {
  const { page, close } = await open(`/runs/${enc(hostile)}?metric=loss`);
  await page.waitForSelector('.chart canvas', { timeout: deadline });
  await page.locator('label:has-text("average") select').selectOption('100');
  await page.waitForFunction(() => location.hash.includes('ema=100'), null, { timeout: deadline });
  await page.waitForSelector('.key-line:has-text("average over 100 iterations")', { timeout: deadline });
  const whole = { x: 0.06, y: 0, w: 0.92, h: 1 };
  assert.ok((await colors(page, '--chart-smooth', whole, 100)) >= 100, 'no line of the average');
  assert.ok((await colors(page, '--chart-line', { x: 0.06, y: 0.05, w: 0.92, h: 0.3 }, 6)) > 5, 'no pixel of the values in the upper third');
  assert.ok((await colors(page, '--bad', { x: 0.06, y: 0.7, w: 0.92, h: 0.25 }, 11)) > 10, 'no mark of the values that are NaN');
  await page.waitForFunction(() => /greatest 1000/.test(document.querySelector('.readout')?.textContent ?? ''), null, { timeout: deadline });
  assert.equal(await page.locator('details td').count(), 0);
  await page.click('summary:has-text("Table of values")');
  await page.waitForSelector('details td', { timeout: deadline });
  if (shots) await page.screenshot({ path: path.join(shots, 'smoothed-light.png') });
  await close();
});

test('each rank of a save has a bar, with the durations of the log', async () => {
  const { page, close } = await open('/runs/reference/c/step-240.a1');
  const save = await page.evaluate(async (token) => {
    const r = await fetch('api/v1/runs/reference/checkpoints/step-240.a1/save', { headers: { Authorization: `Bearer ${token}` } });
    return r.json();
  }, server.token);
  assert.equal(save.writes.length, 4);
  if (save.writes.every((w) => w.copied_s == null)) { // a log of an older version
    await page.waitForSelector('text=the log has no durations of this save', { timeout: deadline });
    assert.equal(await page.locator('.bar-row').count(), 0);
  } else {
    await page.waitForSelector('.bar-row', { timeout: deadline });
    assert.equal(await page.locator('.bar-row').count(), 4);
    const total = (w) => ['waited_s', 'copied_s', 'queued_s', 'digest_s', 'write_s', 'sync_s'].reduce((sum, k) => sum + (w[k] ?? 0), 0);
    const slowest = save.writes.reduce((a, b) => (total(b) > total(a) ? b : a));
    assert.match(await page.locator('.bar-row').first().innerText(), new RegExp(`^r${slowest.rank}(?![0-9])`));
    assert.ok((await page.locator('.bar-row .phase').count()) >= 4);
  }
  await close();
});

test('hostile names are text', async () => {
  const { page, close } = await open('/');
  await page.waitForSelector(`text=${hostile}`, { timeout: deadline });
  assert.equal(await page.locator('img').count(), 0);
  await page.goto(`${server.origin}/#/runs/${enc(hostile)}?tab=workers&attempt=1`);
  await page.waitForSelector('summary:has-text("traceback")', { timeout: deadline });
  await page.click('summary:has-text("traceback")');
  const trace = await page.locator('pre').textContent();
  assert.ok(trace.includes(hostile) && trace.includes('⟨U+202E⟩') && trace.length > 10_000);
  assert.ok(!(await page.locator('body').innerText()).includes('\u202e'), 'a character that turns the text is shown as it is');
  await page.goto(`${server.origin}/#/runs/${enc(hostile)}?tab=output`);
  await page.waitForSelector('pre.output:has-text("RuntimeError: <img src=x onerror=alert(1)> ⟨U+202E⟩")', { timeout: deadline });
  await page.goto(`${server.origin}/#/runs/${enc(hostile)}?tab=config`);
  await page.waitForSelector('pre:has-text("<script>alert(2)</script>")', { timeout: deadline });
  await page.goto(`${server.origin}/#/runs/${enc(hostile)}/c/step-400.a2`);
  await page.waitForSelector(`th:has-text("${hostile}")`, { timeout: deadline });
  assert.equal(await page.locator('img').count(), 0);
  assert.equal(await page.locator('script:not([src])').count(), 0);
  await close();
});

test('the output tab shows the lines of a stream and a rank', async () => {
  const { page, close } = await open(`/runs/${enc(hostile)}?tab=output`);
  const only = (has, lacks) => page.waitForFunction(([has, lacks]) => {
    const all = [...document.querySelectorAll('pre.output .at')].map((e) => `${e.textContent} `);
    return all.length > 0 && all.every((at) => at.includes(has) && (lacks === '' || !at.includes(lacks)));
  }, [has, lacks], { timeout: deadline });
  for (const at of ['r0', 'r1', 'r1 err']) await page.waitForSelector(`pre.output .at:has-text("${at}")`, { timeout: deadline });
  const stream = page.locator('label:has(option[value=err]) select');
  await stream.selectOption('err');
  await only(' err ', '');
  await stream.selectOption('out');
  await only(' r', ' err ');
  await page.waitForSelector('pre.output .at:has-text("r0")', { timeout: deadline });
  await page.fill('input[name=rank]', '1');
  await page.keyboard.press('Enter');
  await only(' r1 ', ' err ');
  await close();
});

test('the policy blocks markup and scripts that a hole would let in', async () => {
  const { page } = await open('/');
  await page.waitForSelector('table a[data-row]', { timeout: deadline });
  const thrown = await page.evaluate(() => {
    try {
      document.querySelector('main').innerHTML = '<img src=x onerror=alert(3)>';
      return 'not blocked';
    } catch (e) {
      return e.name;
    }
  });
  assert.equal(thrown, 'TypeError');
  assert.ok((await page.evaluate(() => globalThis.violations)).some((v) => v.startsWith('require-trusted-types-for')));
  await page.context().close();
});

test('by keyboard alone', async () => {
  const { page, close } = await open('/');
  await page.waitForSelector('table a[data-row]', { timeout: deadline });
  const keys = page.keyboard;
  await keys.press('j');
  await keys.press('j');
  await keys.press('j');
  assert.equal(await page.evaluate(() => document.activeElement.textContent), 'killed');
  await keys.press('Enter');
  await titled(page, 'killed');
  await page.waitForSelector('table a[data-row]', { timeout: deadline });
  await keys.press('j');
  await keys.press('Enter');
  await titled(page, 'step-320.a4');
  await page.waitForSelector('[data-previous]:has-text("older")', { timeout: deadline });
  await keys.press('[');
  await titled(page, 'step-280.a3');
  await page.waitForSelector('[data-next]', { timeout: deadline });
  await page.waitForSelector('[data-filter]', { timeout: deadline });
  await keys.press('/');
  await keys.type('layer2');
  await page.waitForFunction(() => location.hash.includes('q=layer2'), null, { timeout: deadline });
  await page.waitForFunction(() => !document.body.innerText.includes('model.layer1'), null, { timeout: deadline });
  await keys.press('Escape');
  await page.waitForFunction(() => document.activeElement?.tagName !== 'INPUT', null, { timeout: deadline });
  await keys.press('g');
  await keys.press('t');
  await titled(page, 'Timeline');
  await page.waitForSelector('table a[data-row]', { timeout: deadline });
  await keys.press('j');
  await keys.press('Enter');
  await page.waitForSelector('pre', { timeout: deadline });
  await keys.press('g');
  await keys.press('h');
  await titled(page, 'Health');
  await keys.press('?');
  await page.waitForSelector('dialog[open]', { timeout: deadline });
  await keys.press('Escape');
  await page.waitForSelector('dialog[open]', { state: 'detached', timeout: deadline });
  // Every control can be reached, and shows that it has the focus.
  await keys.press('g');
  await keys.press('r');
  await titled(page, 'Store');
  await page.waitForSelector('table a[data-row]', { timeout: deadline });
  const reached = new Set();
  for (let i = 0; i < 40; i++) {
    await keys.press('Tab');
    const at = await page.evaluate(() => {
      const e = document.activeElement;
      if (e === document.body) return null; // between the last and the first one
      return [e.tagName + (e.getAttribute('href') ?? e.getAttribute('name') ?? e.textContent), getComputedStyle(e).outlineStyle];
    });
    if (!at) continue;
    reached.add(at[0]);
    assert.notEqual(at[1], 'none', `${at[0]} does not show its focus`);
  }
  const want = await page.locator('a[href], button, input').count();
  assert.ok(reached.size >= want - 2, `${reached.size} of ${want} controls reached`);
  await close();
});

test('the theme is chosen, and stays', async () => {
  const { page, close } = await open('/');
  await page.waitForSelector('table a[data-row]', { timeout: deadline });
  const shown = (theme) => page.waitForFunction((t) => document.documentElement.dataset.theme === t, theme, { timeout: deadline });
  await shown('light');
  await page.click('button:has-text("system")');
  await page.click('button:has-text("light")');
  await shown('dark');
  await page.reload();
  await page.waitForSelector('table a[data-row]', { timeout: deadline });
  await shown('dark');
  await close();
});

test('the commands of the views run', async () => {
  const { page, close } = await open('/');
  const lines = new Set();
  for (const { view, title, ready } of Object.values(screens)) {
    await page.goto(`${server.origin}/#${view}`);
    await titled(page, title);
    await page.waitForSelector(ready, { timeout: deadline });
    await page.waitForSelector('.command code', { timeout: deadline });
    for (const line of await page.locator('.command code').allTextContents()) lines.add(line);
  }
  await close();
  assert.ok(lines.size >= 6, [...lines].join('\n'));
  for (const line of lines) {
    const text = line.replace(/^ckptstore/, '"$PAGE_BIN"/ckptstore --store "$PAGE_STORE"');
    try {
      execFileSync('sh', ['-c', text], { env: { ...process.env, PAGE_STORE: store }, timeout: 60_000, stdio: ['ignore', 'pipe', 'pipe'], maxBuffer: 64 << 20 });
    } catch (e) {
      assert.fail(`${line}: ${e.stderr}`);
    }
  }
});

test('as of an event, the page shows the store of then', async () => {
  const commits = run('ckptstore', ['events', 'killed', '--store', store, '--type', 'checkpoint.committed', '--json']).trim().split('\n').map(JSON.parse);
  const first = commits[0];
  const { page, close } = await open(`/runs/killed?as_of=${first.sequence}`);
  await page.waitForSelector(`.bar-note:has-text("As of event ${first.sequence}")`, { timeout: deadline });
  await page.waitForSelector(`.sentence a:has-text("${first.data.checkpoint}")`, { timeout: deadline });
  assert.equal(await page.locator('a:has-text("step-320.a4")').count(), 0);
  await page.keyboard.press('.');
  await page.waitForSelector('.sentence a:has-text("step-320.a4")', { timeout: deadline });
  await close();
});

test('the slider drags the moment', async () => {
  const commits = run('ckptstore', ['events', 'killed', '--store', store, '--type', 'checkpoint.committed', '--json']).trim().split('\n').map(JSON.parse);
  const [first, second] = commits;
  const { page, close } = await open(`/runs/killed?as_of=${first.sequence}`);
  await page.waitForSelector(`.sentence a:has-text("${first.data.checkpoint}")`, { timeout: deadline });
  const slider = page.locator('.bar-note input[type=range]');
  assert.equal(await slider.inputValue(), String(first.sequence));
  await slider.fill(String(second.sequence));
  await page.waitForFunction((n) => location.hash.includes(`as_of=${n}`), second.sequence, { timeout: deadline });
  await page.waitForSelector(`.sentence a:has-text("${second.data.checkpoint}")`, { timeout: deadline });
  // By the keyboard, an event at a time.
  await slider.press('ArrowLeft');
  await page.waitForSelector(`.bar-note:has-text("As of event ${second.sequence - 1}:")`, { timeout: deadline });
  await page.waitForSelector(`.sentence a:has-text("${first.data.checkpoint}")`, { timeout: deadline });
  await close();
});

test('a past that is being prepared appears when it is', async () => {
  const commits = run('ckptstore', ['events', 'killed', '--store', store, '--type', 'checkpoint.committed', '--json']).trim().split('\n').map(JSON.parse);
  const { page } = await open('/', { wait: true }); // a refused answer is an error of the console
  let refusals = 0;
  await page.route('**/api/v1/runs/killed/trials?*', (route) => {
    if (refusals++ >= 2) return route.continue();
    return route.fulfill({ status: 503, headers: { 'Retry-After': '1' }, contentType: 'application/problem+json', body: JSON.stringify({ detail: 'the past of the log is being prepared: 7 of 9 events' }) });
  });
  await page.goto(`${server.origin}/#/runs/killed?as_of=${commits[0].sequence}&token=${server.token}`);
  await page.waitForSelector('.problem:has-text("The run is not ready: the past of the log is being prepared: 7 of 9 events")', { timeout: deadline });
  await page.waitForSelector(`.sentence a:has-text("${commits[0].data.checkpoint}")`, { timeout: deadline });
  await page.waitForSelector('.problem', { state: 'detached', timeout: deadline });
  assert.ok(refusals >= 3, `${refusals} requests`);
  await page.context().close();
});

test('the timeline counts all events of the log', async () => {
  const now = last();
  const { page, close } = await open(`/events?as_of=${now}`);
  const count = {};
  for (const line of run('ckptstore', ['events', '--store', store, '--until-seq', String(now), '--json']).trim().split('\n')) {
    const family = JSON.parse(line).type.split('.')[1];
    count[family] = (count[family] ?? 0) + 1;
  }
  await page.waitForSelector('.family rect', { timeout: deadline });
  const shown = await page.locator('.family').evaluateAll((all) => Object.fromEntries(all.map((f) => [f.children[0].textContent, Number(f.children[2].textContent.replace(/\D/g, ''))])));
  assert.deepEqual(shown, count);
  // A click on the first column leads to its last events: it has a hundred.
  await page.locator('.family svg').first().click({ position: { x: 2, y: 7 } });
  await page.waitForSelector('tbody th a:text-is("100")', { timeout: deadline });
  await close();
});

test('a run that was forked names its checkpoint, and the other one its fork', async () => {
  const { page, close } = await open('/runs/forked?tab=lineage');
  await page.waitForSelector('tr:has-text("killed") ~ tr:has-text("forked"):has-text("step-120.a2")', { timeout: deadline });
  await page.click('.sentence a:has-text("killed@step-120.a2")');
  await titled(page, 'step-120.a2');
  await page.goto(`${server.origin}/#/runs/killed?tab=lineage`);
  await page.click('tbody a:has-text("forked")');
  await titled(page, 'forked');
  await close();
});

test('what happens appears without a reload', async () => {
  const { page, close } = await open('/');
  await follows(page);
  run('trainer', ['run', '-q', '--store', store, '--name', 'later', '--nproc', '2', '--', path.join(bin, 'trainer'), 'demo-worker', '--steps', '20', '--save-every', '10']);
  await page.waitForSelector('table a:has-text("later")', { timeout: deadline });
  await page.waitForSelector('tr:has-text("later") a:has-text("step-20.a1")', { timeout: deadline });
  await close();
});

test('an answer that is older than the stream is asked for again', async () => {
  // The list of runs is read, then the log grows, then the store answers, and the page follows the
  // log after that. The list arrives last: no later event tells that it lacks a run.
  const { page, close } = await open('/', { wait: true });
  let asked = 0;
  let read, grow, arrive;
  const reads = new Promise((done) => (read = done));
  const grows = new Promise((done) => (grow = done));
  const live = new Promise((done) => (arrive = done));
  await page.route('**/api/v1/runs?*', async (route) => {
    if (++asked > 1) return route.continue();
    const response = await route.fetch();
    read();
    await live;
    await route.fulfill({ response });
  });
  await page.route('**/api/v1/store', async (route) => {
    await grows;
    await route.continue();
  });
  await page.goto(`${server.origin}/#/?token=${server.token}`);
  await reads;
  run('trainer', ['run', '-q', '--store', store, '--name', 'overtaking', '--nproc', '1', '--', path.join(bin, 'trainer'), 'demo-worker', '--steps', '4', '--save-every', '2']);
  const grown = last();
  grow();
  await follows(page, grown);
  assert.equal(await page.locator('table a:has-text("overtaking")').count(), 0);
  arrive();
  await page.waitForSelector('tr:has-text("overtaking") a:has-text("step-4.a1")', { timeout: deadline });
  await page.unrouteAll({ behavior: 'ignoreErrors' });
  await close();
});

test('one stream for all tabs of a browser', async () => {
  const context = await browser.newContext();
  let streams = 0;
  context.on('request', (r) => {
    if (r.url().includes('/stream')) streams++;
  });
  const tabs = [];
  for (let i = 0; i < 7; i++) {
    const page = await context.newPage();
    await page.goto(`${server.origin}/#/?token=${server.token}`);
    await follows(page);
    tabs.push(page);
  }
  assert.equal(streams, 1, `${streams} streams for 7 tabs`);
  // The tab with the stream is closed: another one continues, and all see the next event.
  await tabs[0].close();
  run('ckptstore', ['tag', 'killed@step-280.a3', 'seen', '--store', store]);
  const seen = last();
  for (const page of tabs.slice(1)) await follows(page, seen);
  assert.equal(streams, 2);
  await context.close();
});

test('seven tabs get each event once and in order, although the owner is killed and a tab stalls', async () => {
  const kills = Number(process.env.PAGE_KILLS ?? 4); // 20 with a stall of 60,000 ms is the whole test
  const stall = Number(process.env.PAGE_STALL ?? 5000);
  const context = await browser.newContext();
  // What a tab sends to the others, and what it receives.
  await context.addInitScript(() => {
    globalThis.seen = [];
    const note = (m) => m.what === 'event' && globalThis.seen.push(m.sequence);
    const { postMessage, addEventListener } = BroadcastChannel.prototype;
    BroadcastChannel.prototype.postMessage = function (m) {
      note(m);
      return postMessage.call(this, m);
    };
    BroadcastChannel.prototype.addEventListener = function (type, f) {
      return addEventListener.call(this, type, (e) => (note(e.data), f(e)));
    };
  });
  const tabs = [];
  for (let i = 0; i < 7; i++) {
    const page = await context.newPage();
    await page.goto(`${server.origin}/#/runs/killed?token=${server.token}`);
    await follows(page);
    tabs.push(page);
  }
  const begin = last();
  for (const page of tabs) await follows(page, begin);
  const slow = tabs[6];
  const stalled = slow.evaluate((ms) => {
    for (const end = performance.now() + ms; performance.now() < end; );
  }, stall);
  const check = async (page, end) => {
    const seen = (await page.evaluate(() => globalThis.seen)).filter((n) => n > begin && n <= end);
    assert.deepEqual(seen, Array.from({ length: end - begin }, (_, i) => begin + 1 + i), 'events of a tab');
  };
  for (let i = 0; i < kills; i++) {
    await end(server.process, 'SIGKILL');
    for (let j = 0; j < 3; j++) run('ckptstore', ['tag', 'killed@step-240.a2', `kill-${i}-${j}`, '--store', store]);
    server = await serve();
    run('ckptstore', ['tag', 'killed@step-280.a3', `alive-${i}`, '--store', store]);
    const now = last();
    for (const page of tabs.filter((p) => p !== slow)) await follows(page, now);
    if (i === kills >> 1) { // the tab with the stream is closed
      await check(tabs[0], now);
      await tabs.shift().close();
    }
  }
  await stalled;
  const until = last();
  assert.ok(until - begin >= 4 * kills, `${until - begin} events`);
  for (const page of tabs) {
    await follows(page, until);
    await check(page, until);
  }
  await context.close();
});

test('a tab whose token is refused leaves the stream to the others', async () => {
  const context = await browser.newContext();
  const [old, good] = [await context.newPage(), await context.newPage()];
  for (const page of [old, good]) {
    await page.goto(`${server.origin}/#/?token=${server.token}`);
    await follows(page);
  }
  // The first tab leads. It gets the link of an earlier server, and then the owner is killed.
  await old.evaluate(() => (location.hash = '#/?token=00'));
  await old.waitForSelector('h1:has-text("This page needs a token")', { timeout: deadline });
  assert.ok(!old.url().includes('token='), old.url());
  await end(server.process, 'SIGKILL');
  run('ckptstore', ['tag', 'killed@step-240.a2', 'two-tabs', '--store', store]);
  const first = last();
  server = await serve();
  await follows(good, first);
  // With a token again, it takes part again.
  await old.fill('input[type=password]', server.token);
  await old.click('button:has-text("open")');
  await old.waitForSelector('table a:has-text("killed")', { timeout: deadline });
  run('ckptstore', ['tag', 'killed@step-280.a3', 'three', '--store', store]);
  const second = last();
  for (const page of [old, good]) await follows(page, second);
  await context.close();
});

test('the first screen asks for nothing twice', async () => {
  const now = last();
  for (const view of ['/', '/runs/killed', `/runs/killed?metric=loss&from=10&until=50&as_of=${now}`, '/runs/killed/c/step-320.a4', '/runs/killed?all=0']) {
    const context = await browser.newContext();
    const page = await context.newPage();
    const asked = [];
    page.on('request', (r) => r.url().includes('/api/v1/') && asked.push(r.url().split('/api/v1/')[1]));
    await page.goto(`${server.origin}/#${view}${view.includes('?') ? '&' : '?'}token=${server.token}`);
    await page.waitForSelector(view === '/' ? 'svg.spark' : view.includes('/c/') ? 'th:has-text("model.layer1.weight")' : '.chart canvas', { timeout: deadline });
    const twice = asked.filter((url, i) => asked.indexOf(url) !== i);
    assert.deepEqual(twice, [], `${view}: ${asked.join('\n')}`);
    await context.close();
  }
});

const dotted = ['.', '..', '%2F', 'a/b', '-', '?x=1#y'];

test('runs whose names a path cannot hold', async () => {
  for (const name of dotted) {
    run('trainer', ['run', '-q', '--store', store, `--name=${name}`, '--nproc', '1', '--', path.join(bin, 'trainer'), 'demo-worker', '--steps', '4', '--save-every', '2']);
  }
  const { page, close } = await open('/');
  for (const name of dotted) {
    await page.goto(`${server.origin}/#/`);
    await page.locator('tbody th a').getByText(name, { exact: true }).click();
    await titled(page, name);
    await page.waitForSelector('.sentence a:has-text("step-4.a1")', { timeout: deadline });
    await page.waitForSelector('.chart canvas', { timeout: deadline });
    await page.click('.sentence a:has-text("step-4.a1")');
    await page.waitForSelector('.bar-row', { timeout: deadline });
    await page.click('[data-previous]');
    await page.waitForSelector('h1:has-text("step-2.a1")', { timeout: deadline });
    await page.click('.crumbs a:last-of-type');
    await titled(page, name);
    await page.goto(`${server.origin}/#/events?run=${enc(name)}`);
    await page.waitForFunction((n) => document.querySelector('table tbody td:nth-of-type(3)')?.textContent === n, name, { timeout: deadline });
  }
  await close();
});

test('a minute with a run: no task is long, and no memory is kept', async () => {
  const work = pace(store, 'paced', process.env.PAGE_WORK);
  for (let i = 1; i <= 20; i++) work.report(i);
  work.save();
  const { page, close } = await open('/runs/paced');
  await page.waitForSelector('.chart canvas', { timeout: deadline });
  await page.waitForSelector('.sentence a:has-text("step-21.a1")', { timeout: deadline });
  const cdp = await page.context().newCDPSession(page);
  const used = async () => {
    for (let i = 0; i < 3; i++) await cdp.send('HeapProfiler.collectGarbage');
    return (await cdp.send('Runtime.getHeapUsage')).usedSize;
  };
  const tracer = await browser.newBrowserCDPSession();
  const tasks = [];
  let mark;
  tracer.on('Tracing.dataCollected', ({ value }) => {
    for (const e of value) {
      if (e.name === 'the minute') mark ??= e;
      if (e.name.endsWith('RunTask') && e.tdur > 1000) tasks.push(e);
    }
  });
  const before = await used();
  await tracer.send('Tracing.start', { transferMode: 'ReportEvents', traceConfig: { includedCategories: ['toplevel', 'blink.user_timing'], excludedCategories: ['*'] } });
  await page.evaluate(() => {
    performance.mark('the minute');
    globalThis.long = [];
    new PerformanceObserver((list) => globalThis.long.push(...list.getEntries().map((e) => e.duration))).observe({ type: 'longtask' });
  });
  // 20 reports and 0.4 saves a second.
  for (let i = 0, begin = Date.now(); i < 1200; i++) {
    work.report(1 + Math.sin(i / 20) + (i % 97 === 0 ? 5 : 0));
    if (i % 50 === 0) work.save();
    await new Promise((done) => setTimeout(done, Math.max(0, begin + 50 * (i + 1) - Date.now())));
  }
  await page.waitForFunction(() => /at step 1.24\d/.test(document.querySelector('.sentence')?.textContent ?? ''), null, { timeout: deadline });
  const complete = new Promise((done) => tracer.once('Tracing.tracingComplete', done));
  await tracer.send('Tracing.end');
  await complete;
  const long = await page.evaluate(() => globalThis.long);
  const grown = (await used()) - before;
  // Time of the processor: a task also takes long because others have the processor.
  const own = tasks.filter((e) => e.pid === mark.pid && e.tid === mark.tid).map((e) => e.tdur / 1000);
  console.log(`# a minute: the longest task ${Math.max(0, ...own).toFixed(0)} ms of the processor, ${Math.max(0, ...long).toFixed(0)} ms by the clock; ${long.length} above 50 ms; heap ${(before / 1e6).toFixed(2)} MB, grown by ${(grown / 1e6).toFixed(2)} MB`);
  assert.deepEqual(own.filter((ms) => ms > 100), [], 'tasks that kept the page busy, in ms');
  assert.ok(grown <= 5e6, `the heap has grown by ${grown} bytes`);
  await work.close();
  await close();
});

test('the server is killed and started again', async () => {
  const { page } = await open('/');
  await follows(page);
  await page.waitForSelector('table a:has-text("killed")', { timeout: deadline });
  await end(server.process, 'SIGKILL');
  await page.waitForSelector('.bar-note:has-text("Owner gone, reconnecting")', { timeout: deadline });
  assert.ok(await page.locator('table a:has-text("killed")').count(), 'the rows are gone');
  run('ckptstore', ['tag', 'killed@step-240.a2', 'while-gone', '--store', store]);
  const seen = last();
  server = await serve();
  await follows(page, seen);
  await page.waitForSelector('.bar-note', { state: 'detached', timeout: deadline });
  await page.context().close();
});

test('without a token there is a form, and nothing of the store', async () => {
  const { page } = await open('/', { token: false });
  await page.waitForSelector('h1:has-text("This page needs a token")', { timeout: deadline });
  assert.ok(!(await page.locator('body').innerText()).includes('killed'));
  await page.fill('input[type=password]', 'wrong');
  await page.click('button:has-text("open")');
  await page.waitForSelector('input[type=password]', { timeout: deadline });
  await page.fill('input[type=password]', server.token);
  await page.click('button:has-text("open")');
  await page.waitForSelector('table a:has-text("killed")', { timeout: deadline });
  assert.equal((await page.context().cookies()).length, 0);
  await page.context().close();
});
