// The route is the fragment: a path, and a query with all state of the view. Run names are
// thus not in the access logs of proxies.
//
//	#/                                   the store
//	#/runs/RUN?metric=&from=&until=…     a run
//	#/runs/RUN/c/ID?tab=…                a checkpoint
//	#/events?run=&type=&before=&seq=     the timeline
//	#/health                             health
//
// Each part of a path is percent-encoded. as_of is a member of every query.

import { takeToken } from './http';

takeToken(); // before the fragment is read

export interface Route {
  parts: string[];
  query: Record<string, string>;
}

/** parse reads a fragment. A part that is not valid percent-encoding is taken as it is. */
export function parse(hash: string): Route {
  const text = hash.replace(/^#/, '');
  const cut = text.indexOf('?');
  const path = cut < 0 ? text : text.slice(0, cut);
  const parts = path.split('/').filter((p) => p !== '').map((p) => {
    try {
      return decodeURIComponent(p);
    } catch {
      return p;
    }
  });
  return { parts, query: cut < 0 ? {} : Object.fromEntries(new URLSearchParams(text.slice(cut + 1))) };
}

/** format is the inverse of parse. Empty members of the query are left out. */
export function format(r: Route): string {
  const q = new URLSearchParams();
  for (const [k, v] of Object.entries(r.query)) if (v !== '') q.set(k, v);
  const query = q.toString();
  return '#/' + r.parts.map(encodeURIComponent).join('/') + (query ? '?' + query : '');
}

let current = $state.raw<Route>(parse(location.hash));

addEventListener('hashchange', () => {
  current = parse(location.hash);
});

export const route = {
  get parts() {
    return current.parts;
  },
  get query() {
    return current.query;
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
