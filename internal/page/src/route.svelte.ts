// The route of the page: its fragment, as state.

import { format, parse, type Route } from './fragment';
import { takeToken } from './http';

let current = $state.raw<Route>(parse(location.hash));
let tokens = $state(0);

addEventListener('hashchange', () => {
  if (takeToken()) tokens++;
  current = parse(location.hash);
});

export const route = {
  get parts() {
    return current.parts;
  },
  get query() {
    return current.query;
  },
  /** tokens grows when the address had a token: the link of `ckptstore ui` was opened in this tab. */
  get tokens() {
    return tokens;
  },
};

/** link returns the fragment of a view. It keeps the moment that the page shows. */
export function link(parts: string[], query: Record<string, string | number | undefined> = {}): string {
  const kept: Record<string, string> = {};
  if (current.query.as_of) kept.as_of = current.query.as_of;
  for (const [k, v] of Object.entries(query)) kept[k] = v == null ? '' : String(v);
  return format({ parts, query: kept });
}

/** go opens a view. */
export function go(fragment: string) {
  location.hash = fragment;
}

/** set changes members of the query in place, without a new entry of the history. */
export function set(change: Record<string, string | number | undefined>) {
  const query = { ...current.query };
  for (const [k, v] of Object.entries(change)) query[k] = v == null ? '' : String(v);
  history.replaceState(history.state, '', format({ parts: current.parts, query }));
  current = parse(location.hash);
}
