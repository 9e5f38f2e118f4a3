// The live state of the page: the event stream, and what it changed.
//
// One tab of a browser has the stream: the holder of a lock. It passes what arrives to the
// other tabs by a channel. When it closes, another tab gets the lock and continues after the
// last sequence it has seen. Browsers have locks on loopback and over TLS only; elsewhere
// each tab has its own stream.
//
// A screen does not keep rows from the stream: an event makes it ask again. The rows are thus always those of the server's fold.

import { placeOf, type LogEvent } from './api';
import { authorization, base, problem, ApiError, serverNow } from './http';
import { backoff, Decoder } from './sse';

type State = 'connecting' | 'live' | 'lost' | 'refused';

/** Shared is what the tab with the stream sends to the others. */
type Shared =
  | { what: 'event'; sequence: number; run: string }
  | { what: 'state'; state: State; since: number; sequence: number; reason: string }
  | { what: 'reset' }
  | { what: 'hello' };

let state = $state<State>('connecting');
let lostSince = $state(0);
let reason = $state('');
let sequence = $state(0);
let all = $state(0); // grows with each event, and when everything must be asked again
let perRun = $state.raw<Record<string, number>>({});
let now = $state(serverNow());
let leads = false;

export const live = {
  get state() {
    return state;
  },
  get lostSince() {
    return lostSince;
  },
  get reason() {
    return reason;
  },
  /** sequence of the newest event that the page has seen. */
  get sequence() {
    return sequence;
  },
  /** changed grows with each event. */
  get changed() {
    return all;
  },
  /** of grows with each event of a run. */
  of(run: string) {
    return perRun[run] ?? perRun[''] ?? 0;
  },
  /** now is the server's time, every five seconds and with each event. */
  get now() {
    return now;
  },
};

function note(at: number, run: string) {
  sequence = Math.max(sequence, at);
  all++;
  perRun = run ? { ...perRun, [run]: (perRun[run] ?? perRun[''] ?? 0) + 1 } : everywhere();
  now = serverNow();
}

/** everywhere counts a change of all runs. */
function everywhere(): Record<string, number> {
  const out: Record<string, number> = { '': (perRun[''] ?? 0) + 1 };
  for (const [k, v] of Object.entries(perRun)) if (k) out[k] = v + 1;
  return out;
}

function reset() {
  all++;
  perRun = everywhere();
}

const channel = typeof BroadcastChannel === 'undefined' ? null : new BroadcastChannel('ckptstore ' + base.href);

function tell(m: Shared) {
  if (leads) channel?.postMessage(m);
}

function enter(s: State, why = '') {
  if (s === 'lost' && state !== 'lost') lostSince = Date.now();
  state = s;
  reason = why;
  tell({ what: 'state', state, since: lostSince, sequence, reason });
}

/** start begins to follow the log after a sequence, which the page's first answer had. */
export function start(after: number) {
  sequence = Math.max(sequence, after);
  setInterval(() => {
    now = serverNow();
  }, 5000);
  channel?.addEventListener('message', (e: MessageEvent<Shared>) => heard(e.data));
  channel?.postMessage({ what: 'hello' } satisfies Shared);
  if (navigator.locks && channel) {
    void navigator.locks.request('ckptstore ' + base.href, async () => {
      leads = true;
      await follow(); // until the tab is closed
    });
    return;
  }
  leads = true;
  void follow();
}

function heard(m: Shared) {
  if (leads) {
    if (m.what === 'hello') tell({ what: 'state', state, since: lostSince, sequence, reason });
    return;
  }
  switch (m.what) {
    case 'event':
      note(m.sequence, m.run);
      break;
    case 'state':
      if (m.state === 'live' && state !== 'live') reset();
      if (m.sequence > sequence) {
        sequence = m.sequence;
        reset();
      }
      state = m.state;
      lostSince = m.since;
      reason = m.reason;
      break;
    case 'reset':
      reset();
  }
}

async function follow(): Promise<never> {
  for (let failures = 0; ; ) {
    const connected = await stream().catch((e: unknown) => {
      if (e instanceof ApiError && (e.status === 401 || e.status === 403)) enter('refused', e.message);
      else enter('lost', e instanceof ApiError && e.status > 0 ? e.message : 'the owner of the store is gone');
      return e instanceof Ended;
    });
    failures = connected ? 1 : failures + 1;
    await new Promise((done) => setTimeout(done, backoff(failures, Math.random())));
  }
}

/** Ended is the end of a stream that had begun. */
class Ended extends Error {}

/** silence is the longest time without a byte: the server sends a comment every 15 s. */
const silence = 40_000;

/** stream reads one stream to its end, and then throws. */
async function stream(): Promise<never> {
  const stop = new AbortController();
  let watch = setTimeout(() => stop.abort(), silence);
  let began = false;
  try {
    const url = new URL('stream', base);
    if (sequence > 0) url.searchParams.set('after', String(sequence));
    const headers = { ...authorization(), Accept: 'text/event-stream' };
    const r = await fetch(url, { headers, signal: stop.signal, credentials: 'omit', cache: 'no-store' });
    if (r.status === 404) {
      // The log ends before what this page has seen: it is another one, or was rolled back.
      sequence = 0;
      reset();
    }
    if (!r.ok || !r.body) throw await problem(r);
    began = true;
    if (state === 'lost' || state === 'refused') {
      reset();
      tell({ what: 'reset' });
    }
    enter('live');
    const reader = r.body.pipeThrough(new TextDecoderStream()).getReader();
    const decoder = new Decoder();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Ended();
      clearTimeout(watch);
      watch = setTimeout(() => stop.abort(), silence);
      for (const m of decoder.push(value)) take(m.id, m.event, m.data);
    }
  } catch (e) {
    throw began ? new Ended() : e;
  } finally {
    clearTimeout(watch);
    stop.abort();
  }
}

function take(id: string, event: string, data: string) {
  if (event === 'caught-up') return;
  if (event === 'lagged') {
    sequence = Math.max(sequence, Number(id) || 0);
    reset();
    tell({ what: 'reset' });
    return;
  }
  try {
    const e = JSON.parse(data) as LogEvent;
    const at = Number(e.sequence) || Number(id);
    if (!(at > sequence)) return; // the server sent it before
    const { run } = placeOf(e.subject);
    note(at, run);
    tell({ what: 'event', sequence: at, run });
  } catch {
    // Not JSON: nothing to show. The next answer has the state.
  }
}
