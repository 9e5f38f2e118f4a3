// The live state of the page: the event stream, and what it changed.
//
// One tab of a browser has the stream of a store: the holder of a lock. It passes what arrives
// to the other tabs by a channel. When it closes, or the server refuses its token, another tab
// gets the lock and continues after the last sequence it has seen. Browsers have locks on
// loopback and over TLS only; elsewhere each tab has its own stream.
//
// A screen does not keep rows from the stream: an event makes it ask again. The rows are thus always those of the server's fold.

import { placeOf, type LogEvent } from './api';
import { authorization, base, followed, oldestAnswer, problem, ApiError, serverNow, whenRefused } from './http';
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
let again = $state(0); // grows when everything must be asked again
let opened = $state(0); // streams after the first one, of this tab or of the tab with the lock
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
  /** again grows when everything must be asked again: the page may have missed events of any kind. */
  get again() {
    return again;
  },
  /** opened grows when the stream begins again: perhaps another server answers. */
  get opened() {
    return opened;
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
  again++;
  perRun = everywhere();
}

/** Part is what this tab does in the stream of a store. */
interface Part {
  store: string;
  channel: BroadcastChannel | null;
  stop: AbortController;
}

let part: Part | null = null;
let clock: ReturnType<typeof setInterval> | undefined;

function tell(m: Shared) {
  if (leads) part?.channel?.postMessage(m);
}

function enter(s: State, why = '') {
  if (s === 'lost' && state !== 'lost') lostSince = Date.now();
  state = s;
  reason = why;
  tell({ what: 'state', state, since: lostSince, sequence, reason });
}

/** start begins to follow the log of a store after a sequence, which an answer had. It is called for each such answer. */
export function start(store: string, after: number) {
  if (part?.store === store) return;
  const first = clock === undefined;
  leave();
  sequence = first ? Math.min(after, oldestAnswer()) : after;
  if (!first) reset(); // it has another token, or another store is at this address now
  followed(() => sequence, reset);
  state = 'connecting';
  clock ??= setInterval(() => {
    now = serverNow();
  }, 5000);
  // Two stores can have one address after the other, each with its own token: their tabs have nothing in common.
  const name = `ckptstore ${base.href} ${store}`;
  const stop = new AbortController();
  const channel = typeof BroadcastChannel === 'undefined' ? null : new BroadcastChannel(name);
  part = { store, channel, stop };
  const lead = async () => {
    if (stop.signal.aborted) return;
    leads = true;
    await follow(stop.signal); // until the tab is closed, or its token is refused
  };
  channel?.addEventListener('message', (e: MessageEvent<Shared>) => heard(e.data));
  channel?.postMessage({ what: 'hello' } satisfies Shared);
  if (navigator.locks && channel) navigator.locks.request(name, { signal: stop.signal }, lead).catch(() => {}); // it left before it led
  else void lead();
}

/** leave ends this tab's part. If it led, another tab leads. */
function leave() {
  part?.stop.abort();
  part?.channel?.close();
  part = null;
  leads = false;
}

/** refuse ends this tab's part until it has another token. The other tabs may have one. */
function refuse(why: string) {
  if (!part) return;
  leave();
  state = 'refused';
  reason = why;
}

whenRefused(refuse);

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
      if (m.state === 'live' && state === 'lost') {
        opened++;
        reset();
      }
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

async function follow(stop: AbortSignal): Promise<void> {
  for (let failures = 0; !stop.aborted; ) {
    try {
      await stream(stop);
    } catch (e) {
      if (stop.aborted) return;
      if (e instanceof ApiError && (e.status === 401 || e.status === 403)) return refuse(e.message);
      enter('lost', e instanceof ApiError && e.status > 0 ? e.message : 'the owner of the store is gone');
      failures = e instanceof Ended ? 1 : failures + 1;
    }
    await new Promise<void>((done) => {
      const timer = setTimeout(done, backoff(failures, Math.random()));
      stop.addEventListener('abort', () => (clearTimeout(timer), done()), { once: true });
    });
  }
}

/** Ended is the end of a stream that had begun. */
class Ended extends Error {}

/** silence is the longest time without a byte: the server sends a comment every 15 s. */
const silence = 40_000;

/** stream reads one stream to its end, and then throws. */
async function stream(left: AbortSignal): Promise<never> {
  const stop = new AbortController();
  let watch = setTimeout(() => stop.abort(), silence);
  let began = false;
  try {
    const url = new URL('stream', base);
    if (sequence > 0) url.searchParams.set('after', String(sequence));
    const headers = { ...authorization(), Accept: 'text/event-stream' };
    const r = await fetch(url, { headers, signal: AbortSignal.any([stop.signal, left]), credentials: 'omit', cache: 'no-store' });
    if (r.status === 404) {
      // The log ends before what this page has seen: it is another one, or was rolled back.
      sequence = 0;
      reset();
    }
    if (!r.ok || !r.body) throw await problem(r);
    began = true;
    if (state === 'lost') {
      opened++;
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
