// Programs of this module as the tests and measurements of the page start them.
//
//	PAGE_BIN      directory of ckptstore and trainer
//	CHROMIUM      the browser (chromium)
import { execFileSync, spawn } from 'node:child_process';
import { closeSync, openSync, writeSync } from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';

export const here = path.dirname(fileURLToPath(import.meta.url));
export const bin = process.env.PAGE_BIN;
export const python = { ...process.env, PAGE_PYTHON: path.join(here, '../../../python/src') };

/** run runs a program to its end and returns its output. */
export function run(program, args, options = {}) {
  return execFileSync(path.join(bin, program), args, {
    encoding: 'utf8', timeout: 120_000, maxBuffer: 64 << 20, stdio: ['ignore', 'pipe', 'pipe'], ...options,
  });
}

/** serve starts `ckptstore ui` at a port, 0 for any, and waits for its link for so many milliseconds. */
export async function serve(store, port = 0, patience = 30_000) {
  const child = spawn(path.join(bin, 'ckptstore'), ['ui', '--store', store, '--http', `127.0.0.1:${port}`, '--output', 'jsonl'], {
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let out = '';
  let err = '';
  child.stderr.on('data', (d) => (err += d));
  const link = await new Promise((done, fail) => {
    const timer = setTimeout(() => {
      child.kill('SIGKILL');
      fail(new Error(`ckptstore ui printed no link in ${patience / 1000} s: ${out}${err}`));
    }, patience);
    child.stdout.on('data', (d) => {
      out += d;
      const m = /"link": ?"([^"]+)"/.exec(out);
      if (!m) return;
      clearTimeout(timer);
      done(m[1]);
    });
    child.on('exit', (code) => {
      clearTimeout(timer);
      fail(new Error(`ckptstore ui ended with ${code}: ${err}`));
    });
  });
  const url = new URL(link);
  return { process: child, link, port: Number(url.port), origin: url.origin, token: /token=([0-9a-f]+)/.exec(url.hash)[1] };
}

/** pace starts a run that reports and saves on order. close ends it. */
export function pace(store, name, dir) {
  const pipe = path.join(dir, `${name}.pipe`);
  execFileSync('mkfifo', [pipe]);
  const orders = openSync(pipe, 'r+'); // a pipe opened for both waits for no reader
  const child = spawn(path.join(bin, 'trainer'), ['run', '-q', '--store', store, '--name', name, '--nproc', '1', '--', 'python3', path.join(here, 'paced.py'), pipe], {
    env: python, stdio: ['ignore', 'ignore', 'pipe'],
  });
  let err = '';
  child.stderr.on('data', (d) => (err += d));
  const ended = new Promise((done) => child.once('exit', done));
  return {
    report: (value) => writeSync(orders, `report ${value}\n`),
    save: () => writeSync(orders, 'save\n'),
    async close() {
      writeSync(orders, 'end\n');
      const timer = setTimeout(() => child.kill('SIGTERM'), 30_000);
      const code = await ended;
      clearTimeout(timer);
      closeSync(orders);
      if (code !== 0) throw new Error(`the run ${name} ended with ${code}: ${err}`);
    },
  };
}

/** end kills a process and waits for its end. */
export async function end(child, signal) {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const gone = new Promise((done) => child.once('exit', done));
  child.kill(signal);
  await gone;
}

/** browser starts Chromium. */
export function browser(...args) {
  return chromium.launch({ executablePath: process.env.CHROMIUM || '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu', ...args] });
}

/** quantile returns the value below which a part of numbers lies. */
export function quantile(numbers, part) {
  const sorted = [...numbers].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.ceil(part * sorted.length) - 1)];
}
