// A resource is an answer of the API that a screen shows. It asks again when its key
// changes, and at once when the log changed. While the log changes on and on, it asks once in a
// pause; after silence a few times more, since a save is several events, of which the last one
// matters. It never asks twice at a time.

import { untrack } from 'svelte';

import { ApiError } from './http';
import { live } from './live.svelte';

const burst = 4; // requests after silence
const gap = 120; // between two of them, in milliseconds

export class Resource<T> {
  data = $state.raw<T | undefined>();
  error = $state.raw<ApiError | undefined>();
  #key = '';
  #running: AbortController | null = null;
  #again = false;
  #asked = 0; // when it asked last, in ms
  #left = burst; // requests that need not wait for a pause, as of when it asked last
  #timer: ReturnType<typeof setTimeout> | undefined;

  /**
   * key identifies the request, null for none. changed grows when the answer may have
   * changed; it also asks again when the page may have missed an event. With keep, the old answer stays until that of a new key arrives. It must be
   * called while a component is created. pause is in milliseconds.
   */
  constructor(
    key: () => string | null,
    private load: (signal: AbortSignal) => Promise<T>,
    changed: () => number = () => 0,
    keep = false,
    private pause = 500,
  ) {
    $effect(() => {
      const k = key();
      changed();
      void live.again;
      if (k === null) return;
      if (k === this.#key) {
        this.#later();
        return;
      }
      this.#key = k;
      if (!keep) this.data = undefined;
      this.error = undefined;
      this.#running?.abort();
      this.#running = null;
      clearTimeout(this.#timer);
      this.#timer = undefined;
      untrack(() => void this.#ask());
    });
    $effect(() => () => {
      this.#running?.abort();
      clearTimeout(this.#timer);
    });
  }

  /** #later asks again when the pause is over, or after the request that is under way. */
  #later() {
    if (this.#running) {
      this.#again = true;
      return;
    }
    this.#timer ??= setTimeout(() => this.#due(), Math.max(0, this.#asked + (this.#left >= 1 ? Math.min(gap, this.pause) : this.pause) - Date.now()));
  }

  #due() {
    this.#timer = undefined;
    void this.#ask();
  }

  async #ask() {
    const run = new AbortController();
    this.#running = run;
    this.#again = false;
    const asked = Date.now();
    this.#left = Math.max(0, Math.min(burst, this.#left + (asked - this.#asked) / this.pause) - 1);
    this.#asked = asked;
    try {
      const data = await this.load(run.signal);
      if (run.signal.aborted) return;
      this.data = data;
      this.error = undefined;
    } catch (e) {
      if (run.signal.aborted) return;
      this.error = e instanceof ApiError ? e : new ApiError(0, String(e));
      if (this.error.again > 0) this.#timer ??= setTimeout(() => this.#due(), this.error.again * 1000);
    }
    this.#running = null;
    if (this.#again) this.#later();
  }
}
