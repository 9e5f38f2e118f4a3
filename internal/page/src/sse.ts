// Server-sent events, decoded from a stream of text. EventSource cannot send a header, so
// the page reads the stream with fetch.

export interface Message {
  id: string;
  event: string; // "message" unless the server names it
  data: string;
}

/** Decoder collects the lines of a stream. It accepts all line ends, and chunks cut anywhere. */
export class Decoder {
  #rest = '';
  #id = '';
  #event = '';
  #data: string[] = [];

  /** push takes the next text and returns the messages that it completes. */
  push(text: string): Message[] {
    const out: Message[] = [];
    this.#rest += text;
    for (;;) {
      const m = /\r\n|\n|\r(?!$)/.exec(this.#rest);
      if (!m) return out;
      const line = this.#rest.slice(0, m.index);
      this.#rest = this.#rest.slice(m.index + m[0].length);
      if (line === '') {
        if (this.#data.length > 0 || this.#event !== '') {
          out.push({ id: this.#id, event: this.#event || 'message', data: this.#data.join('\n') });
        }
        this.#event = '';
        this.#data = [];
        continue;
      }
      if (line.startsWith(':')) continue;
      const colon = line.indexOf(':');
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
      if (field === 'id' && !value.includes('\0')) this.#id = value;
      else if (field === 'event') this.#event = value;
      else if (field === 'data') this.#data.push(value);
    }
  }
}

/** backoff returns the milliseconds before the n-th attempt to connect again, from 1. */
export function backoff(n: number, random: number): number {
  return Math.min(10_000, 250 * 2 ** (n - 1)) * (0.5 + random / 2);
}
