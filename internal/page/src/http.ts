// Requests to the API: the token, errors as problem details, and the clock of the server.
//
// The token comes in the fragment when the page is first opened, #token=…, and goes to
// sessionStorage. It is then removed from the address bar and sent as a header. There are
// no cookies: over HTTP they ignore ports.

/** base is the address of the API, relative to the page: it survives the prefix of a proxy. */
export const base = new URL('api/v1/', location.href.split('#')[0]);

const key = 'ckptstore.token';
let token = '';

/** takeToken moves a token from the fragment, #token=… or #/…?token=…, to the storage of this tab. */
export function takeToken() {
  const m = /(^#|[&?])token=([^&]*)(&|$)/.exec(location.hash);
  try {
    if (m) sessionStorage.setItem(key, decodeURIComponent(m[2]));
    token = sessionStorage.getItem(key) ?? '';
  } catch {
    if (m) token = m[2]; // no storage: as long as the page is open
  }
  if (!m) return;
  const rest = location.hash.replace(m[0], m[3] ? m[1] : '');
  history.replaceState(null, '', rest.length > 1 ? rest : '#/');
}

/** setToken is for the form that is shown when the server refuses the page. */
export function setToken(t: string) {
  token = t;
  try {
    sessionStorage.setItem(key, t);
  } catch {
    // As above.
  }
}

export function authorization(): Record<string, string> {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

/** ApiError is an answer that is not 2xx, or no answer: then status is 0. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly hint = '',
  ) {
    super(message);
  }
}

let offset = 0; // of the server's clock, in ms

/** serverNow returns the server's time, as known from its last answer. */
export function serverNow(): number {
  return Date.now() + offset;
}

/** problem reads the error of an answer: problem details, or its text. */
export async function problem(r: Response): Promise<ApiError> {
  const text = await r.text().catch(() => '');
  try {
    const p = JSON.parse(text);
    const message = p.detail || p.error || p.title || r.statusText;
    return new ApiError(r.status, String(message), p.hint ? String(p.hint) : '');
  } catch {
    return new ApiError(r.status, text.slice(0, 300) || r.statusText || `status ${r.status}`);
  }
}

/** Answer is a decoded answer, and the sequence of the log that it shows. */
export interface Answer<T> {
  data: T;
  sequence: number;
}

/** get asks the API. Members of the query that are empty are left out; a list is repeated. */
export async function get<T>(
  path: string,
  query: Record<string, string | number | boolean | string[] | undefined>,
  signal: AbortSignal,
): Promise<Answer<T>> {
  const url = new URL(path, base);
  for (const [k, v] of Object.entries(query)) {
    if (v == null || v === '' || v === false || v === 0) continue;
    for (const one of Array.isArray(v) ? v : [v]) url.searchParams.append(k, String(one));
  }
  const deadline = AbortSignal.timeout(30_000);
  let r: Response;
  try {
    r = await fetch(url, { headers: authorization(), signal: AbortSignal.any([signal, deadline]), credentials: 'omit' });
  } catch (e) {
    if (signal.aborted) throw e;
    throw new ApiError(0, deadline.aborted ? 'no answer within 30 s' : 'the server does not answer');
  }
  if (!r.ok) throw await problem(r);
  const date = Date.parse(r.headers.get('Date') ?? '');
  // The header has whole seconds: a difference below 2 s is not a difference of clocks.
  if (!Number.isNaN(date)) offset = Math.abs(date - Date.now()) < 2000 ? 0 : date - Date.now();
  return { data: await r.json(), sequence: Number(r.headers.get('Ckpt-Sequence') ?? 0) };
}
