// The fragment of the address: a path, and a query with all state of the view. Run names are
// thus not in the access logs of proxies. All functions are pure.
//
//	#/                                   the store
//	#/runs/RUN?metric=&from=&until=…     a run
//	#/runs/RUN/c/ID?tab=…                a checkpoint
//	#/events?run=&type=&before=&seq=     the timeline
//	#/health                             health
//
// Each part of a path is percent-encoded. as_of is a member of every query.

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
