// Takes the pictures of docs/howto/ui.md from the store of `trainer demo`.
//
//	PAGE_BIN, CHROMIUM    as in browse.mjs
//	PAGE_PICTURES         directory for the pictures
import { execFileSync, spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { chromium } from 'playwright-core';

const pictures = [
  ['page-store', '/', 1000, 300, 'light', ['tr:nth-child(2) svg.spark', 'tr:nth-child(2) svg.saves']],
  ['page-run', '/runs/killed', 1000, 630, 'light', ['.chart canvas', '.lane-kept', 'section svg.saves']],
  ['page-save', '/runs/reference/c/step-240.a1', 1000, 420, 'dark', ['.bar-row']],
];

const dir = mkdtempSync(path.join(tmpdir(), 'demo-'));
const bin = (name) => path.join(process.env.PAGE_BIN, name);
execFileSync(bin('trainer'), ['demo', '--dir', path.join(dir, 'demo'), '--json'], { stdio: 'ignore', timeout: 120_000 });
const server = spawn(bin('ckptstore'), ['ui', '--store', path.join(dir, 'demo', 'store'), '--http', '127.0.0.1:0', '--output', 'jsonl'], {
  stdio: ['ignore', 'pipe', 'inherit'],
});
try {
  const link = await new Promise((done, fail) => {
    let out = '';
    server.stdout.on('data', (d) => {
      out += d;
      const m = /"link": ?"([^"]+)"/.exec(out);
      if (m) done(m[1]);
    });
    server.on('exit', (code) => fail(new Error(`ckptstore ui ended with ${code}`)));
  });
  const [base, token] = link.split('#/?token=');
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu'] });
  for (const [name, view, width, height, colorScheme, parts] of pictures) {
    const page = await browser.newPage({ viewport: { width, height }, colorScheme });
    await page.goto(`${base}#${view}?token=${token}`);
    for (const part of [...parts, '.top .right:has-text("live at")']) await page.waitForSelector(part, { timeout: 60_000 });
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
    await page.screenshot({ path: path.join(process.env.PAGE_PICTURES, `${name}.png`) });
    await page.close();
  }
  await browser.close();
} finally {
  server.kill('SIGTERM');
  rmSync(dir, { recursive: true, force: true });
}
