// The requests of the first screens: what is asked for, as a path of the API and a query. They
// are here, and not where their answers are decoded, because first.ts sends some of them before
// the code of the screens is there. All functions are pure.

import { segment, type Query } from './http';

/** Request is a path and a query, without the moment. */
export type Request = [path: string, query: Query];

/** perPage is how many rows a page of a list has. */
export const perPage = 60;

export const store = (): Request => ['store', {}];
export const atRisk = (): Request => ['at-risk', {}];
export const runs = (page: string): Request => ['runs', { limit: perPage, page }];
export const run = (name: string): Request => [`runs/${segment(name)}`, {}];
export const trials = (name: string): Request => [`runs/${segment(name)}/trials`, { limit: 1000 }];

export interface CheckpointsQuery {
  all: boolean;
  limit: number;
  page?: string;
  brief?: boolean; // without digests and sequences
}

export const checkpoints = (name: string, q: CheckpointsQuery): Request => [`runs/${segment(name)}/checkpoints`, { ...q }];

/** saves are the newest checkpoints of a run, in every state. */
export const saves = (name: string): Request => checkpoints(name, { all: true, limit: perPage });

/** checkpoint is a part of a checkpoint: "" is the checkpoint itself. */
export const checkpoint = (name: string, id: string, part: '' | '/save' | '/tensors' | '/files' | '/reshard', query: Query): Request => [
  `runs/${segment(name)}/checkpoints/${encodeURIComponent(id)}${part}`, query,
];

export interface MetricsQuery {
  run: string;
  trial: string;
  names: string[];
  from?: number | null;
  until?: number | null;
  points: number;
  hidden: boolean;
}

export const metrics = (q: MetricsQuery): Request => [
  `runs/${segment(q.run)}/metrics`,
  { trial: q.trial, metric: q.names, from: q.from ?? 0, until: q.until ?? 0, points: q.points, all: q.hidden },
];

/** points is how many points a chart asks for, and one in a cell. */
export const points = 800;
export const fewPoints = 24;

/** fewSaves is how many saves a cell shows. */
export const fewSaves = 10;

/** mostLines is how many lines of output are shown. */
export const mostLines = 500;

export interface LogsQuery {
  job: string; // empty: the newest
  trial: string; // of a search; empty: none
  attempt: number; // 0: all
  rank: number; // -1: all
  stream: '' | 'out' | 'err';
  contains: string;
  lines: number;
}

export const logs = (run: string, q: LogsQuery): Request => [`runs/${segment(run)}/logs`, { ...q, rank: String(q.rank) }];

/** ChartQuery is the state of a run's chart, as in the address. */
export interface ChartQuery {
  metric?: string;
  from?: string;
  until?: string;
}

/** chart is the metric of a run's screen: that of the address, else the main one of the trial. */
export const chart = (name: string, trial: string, metric: string, q: ChartQuery): Request =>
  metrics({ run: name, trial, names: [metric], from: Number(q.from) || null, until: Number(q.until) || null, points, hidden: true });

/** mainMetric chooses the metric that stands for a run: a loss if there is one, else the first number. */
export function mainMetric(last: Record<string, unknown> | undefined): string {
  const all = Object.entries(last ?? {});
  const numbers = all.filter(([, v]) => typeof v === 'number' || v === 'NaN' || v === 'Infinity' || v === '-Infinity').map(([k]) => k).sort();
  return numbers.find((k) => k === 'loss') ?? numbers.find((k) => k.toLowerCase().includes('loss')) ?? numbers[0] ?? all.map(([k]) => k).sort()[0] ?? '';
}

/** trialOf chooses the trial that a run's screen shows. */
export function trialOf<T extends { name: string }>(all: T[], wanted: string | undefined): T | undefined {
  return all.find((t) => t.name === wanted) ?? all.find((t) => t.name === 'main') ?? all[0];
}
