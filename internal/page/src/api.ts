// All that the page knows of the API: the shapes of answers, and how each is asked for.
// Members that an older or a newer server lacks are optional here, and absent on the page.

import { empty, type Columns } from './chart/columns';
import type { RankSave } from './chart/phases';
import { get, segment } from './http';
import * as requests from './requests';
import { route } from './route.svelte';

/** moment is the sequence that the page shows the store as of; 0: now. */
export function moment(): number {
  return Number(route.query.as_of) || 0;
}

/** ask adds the moment to a request. */
async function ask<T>([path, query]: requests.Request, signal: AbortSignal): Promise<T> {
  return (await get<T>(path, { ...query, as_of: moment() }, signal)).data;
}

/** all asks for every page of a list: the rows are in the member that the list is named by. */
async function all<T>([path, query]: requests.Request, name: string, signal: AbortSignal): Promise<T[]> {
  const rows: T[] = [];
  let page = '';
  do {
    const a = await ask<any>([path, { ...query, limit: 1000, page: page || undefined }], signal);
    rows.push(...a[name]);
    page = a.next ?? '';
  } while (page);
  return rows;
}

// ---- the store

export interface StoreInfo {
  id: string;
  location: string;
  last: number; // sequence of the newest event
  version: string;
  user: string;
  role: string;
  readOnly: boolean;
}

export async function getStore(signal: AbortSignal): Promise<StoreInfo> {
  const { data: s } = await get<any>(...requests.store(), signal);
  return {
    id: s.store, location: s.location, last: s.sequence ?? 0, version: s.version ?? '', user: s.user ?? '', role: s.role ?? '',
    readOnly: !!s.read_only,
  };
}

export interface Risk {
  kind: string;
  run?: string;
  text: string;
  hint?: string;
  command?: string;
}

export async function getAtRisk(signal: AbortSignal): Promise<Risk[]> {
  return (await ask<{ at_risk: Risk[] }>(requests.atRisk(), signal)).at_risk;
}

// ---- runs

export interface Job {
  job: string;
  run: string;
  host: string;
  pid: number;
  state: string;
  exit_code?: number;
  reason?: string;
  started_at?: string;
  ended_at?: string;
  seconds?: number;
  nproc: number;
  nnodes: number;
  attempts: number;
  restarts: number;
  command: string[];
  dir?: string;
  logs?: string;
  unhealthy_devices?: string[];
  goodput?: number;
}

export interface KilledNow {
  resume?: string;
  steps_lost?: number;
  seconds_lost: number;
  text: string;
}

export interface RunSummary {
  run: string;
  state: string;
  job?: Job;
  trials: number;
  trial?: string;
  status?: string;
  attempt: number;
  world_size: number;
  iterations: number;
  step?: number;
  reported_at?: string;
  metrics?: Record<string, unknown>;
  safe?: { checkpoint: string; step: number; sequence: number; committed_at: string };
  risks: Risk[];
  created_at: string;
  problem?: string;
  killed_now?: KilledNow;
  goodput?: number;
}

export interface RunDetail extends RunSummary {
  config: Record<string, unknown>;
  parent?: string;
}

export interface Page<T> {
  rows: T[];
  next: string; // empty: there is none
}

export async function getRuns(page: string, signal: AbortSignal): Promise<Page<RunSummary>> {
  const a = await ask<{ runs: RunSummary[]; next?: string }>(requests.runs(page), signal);
  return { rows: a.runs, next: a.next ?? '' };
}

export function getRun(run: string, signal: AbortSignal): Promise<RunDetail> {
  return ask<RunDetail>(requests.run(run), signal);
}

export interface Trial {
  run: string;
  name: string;
  status: string;
  message?: string;
  attempt: number;
  world_size: number;
  head: string;
  iterations: number;
  last_metrics?: Record<string, unknown>;
  config?: Record<string, unknown>;
  parent?: { run: string; trial: string; checkpoint: string };
}

export function getTrials(run: string, signal: AbortSignal): Promise<Trial[]> {
  return all(requests.trials(run), 'trials', signal);
}

export interface Attempt {
  attempt: number;
  job?: string;
  world_size: number;
  resume?: string;
  started_seq: number;
  started_at: string;
  training_at?: string;
  stopped_at?: string;
  reason?: string;
  committed?: string;
}

export function getAttempts(run: string, trial: string, signal: AbortSignal): Promise<Attempt[]> {
  return all([`runs/${segment(run)}/attempts`, { trial }], 'attempts', signal);
}

export interface Worker {
  rank: number;
  node: number;
  devices?: string[];
  state: string;
  code: number;
  unseen?: boolean;
  signal?: string;
  message?: string;
  traceback?: string;
}

export function getWorkers(run: string, trial: string, attempt: number, signal: AbortSignal): Promise<Worker[]> {
  return all([`runs/${segment(run)}/workers`, { trial, attempt }], 'workers', signal);
}

/** Relative is a trial in a tree of forks. */
export interface Relative {
  run: string;
  trial: string;
  depth: number;
  parent?: string;
  status?: string; // absent: the store does not have it
  head?: string;
  iterations: number;
}

export function getLineage(run: string, trial: string, signal: AbortSignal): Promise<{ trials: Relative[]; omitted: number }> {
  return ask([`runs/${segment(run)}/lineage`, { trial }], signal);
}

/** LogLine is a line of the output of a worker. */
export interface LogLine {
  attempt: number;
  rank: number;
  stream: 'out' | 'err';
  time: string;
  text: string;
}

export function getLogs(run: string, q: requests.LogsQuery, signal: AbortSignal): Promise<{ job: string; lines: LogLine[]; earlier: boolean }> {
  return ask(requests.logs(run, q), signal);
}

// ---- metrics

export interface Series {
  name: string;
  line: Columns;
  hidden: Columns[]; // a part for each attempt that a resume superseded
  text: unknown; // the last value, if it is no number
}

export interface Metrics {
  names: string[];
  width: number; // iterations that a point stands for
  iterations: number;
  series: Series[];
}

interface Column {
  x: number[];
  step: number[];
  attempt?: number[];
  min: (number | null)[];
  max: (number | null)[];
  last: (number | null)[];
  nonfinite: number[];
}

function columns(c: Column | undefined, attempt: number): Columns {
  if (!c) return empty();
  return {
    x: c.x, step: c.step, attempt: c.attempt ?? c.x.map(() => attempt), min: c.min, max: c.max, last: c.last,
    nonfinite: c.nonfinite,
  };
}

export async function getMetrics(q: requests.MetricsQuery, signal: AbortSignal): Promise<Metrics> {
  return metricsOf(await ask<any>(requests.metrics(q), signal));
}

/** getChart asks for the metric of a run's screen. */
export async function getChart(run: string, trial: string, metric: string, q: requests.ChartQuery, signal: AbortSignal): Promise<Metrics> {
  return metricsOf(await ask<any>(requests.chart(run, trial, metric, q), signal));
}

function metricsOf(a: any): Metrics {
  const [line, ...hidden] = a.lines as {
    attempt: number; metrics: Record<string, Column>; texts: Record<string, { last: unknown[] }>;
  }[];
  return {
    names: a.names,
    width: a.width,
    iterations: a.iterations,
    series: (a.names as string[]).map((name) => ({
      name,
      line: columns(line?.metrics[name], line?.attempt ?? 0),
      hidden: hidden.filter((h) => h.metrics[name]).map((h) => columns(h.metrics[name], h.attempt)),
      text: line?.texts?.[name]?.last.at(-1),
    })),
  };
}

// ---- checkpoints

/** CheckpointRow is a checkpoint in a list. */
export interface CheckpointRow {
  id: string;
  run: string;
  trial: string;
  name: string;
  step: number;
  attempt: number;
  world_size: number;
  state: string;
  superseded?: boolean;
  bytes: number;
  bytes_written?: number;
  bytes_reused?: number;
  sequence?: number; // of checkpoint.committed
  committed_at?: string;
  begun_at?: string;
  ended_at?: string;
  sealed?: number;
  parent?: string;
  reason?: string;
  pinned?: boolean;
  tags?: string[];
}

/** written returns the bytes that a save wrote; undefined if they are unknown, as of a receipt. */
export function written(c: CheckpointRow): number | undefined {
  return (c.bytes_written ?? 0) + (c.bytes_reused ?? 0) > 0 ? c.bytes_written : undefined;
}

export async function getCheckpoints(run: string, q: requests.CheckpointsQuery, signal: AbortSignal): Promise<Page<CheckpointRow>> {
  return checkpointsOf(await ask(requests.checkpoints(run, q), signal));
}

/** getSaves asks for the newest checkpoints of a run, in every state. */
export async function getSaves(run: string, signal: AbortSignal): Promise<Page<CheckpointRow>> {
  return checkpointsOf(await ask(requests.saves(run), signal));
}

function checkpointsOf(a: { checkpoints: CheckpointRow[]; next?: string }): Page<CheckpointRow> {
  return { rows: a.checkpoints, next: a.next ?? '' };
}

/** Checkpoint is the row of one checkpoint, in any state. */
export interface Checkpoint extends CheckpointRow {
  sealed: number;
  writes: number;
  manifest: string;
  participants?: number[];
  begun_seq: number;
  committed_seq?: number;
  deleted_seq?: number;
  ranks?: number[]; // that caused an abort
  pin_reason?: string;
  attachments?: { name: string; digest: string; size: number }[];
  begun_stored?: string;
  staged_stored?: string;
  ended_stored?: string;
  manifest_s?: number;
}

export interface CheckpointDetail {
  checkpoint: Checkpoint;
  path: string;
  bytes_shared?: number;
  bytes_exclusive?: number;
  tensor_count: number;
  value_count: number;
  cost?: { save_requests: number; save_usd: number; load_requests: number; load_usd: number; month_usd: number };
  problem?: string;
}

export function getCheckpoint(run: string, id: string, trial: string, signal: AbortSignal): Promise<CheckpointDetail> {
  return ask(requests.checkpoint(run, id, '', { trial }), signal);
}

/** Save is how a checkpoint was saved. */
export interface Save {
  checkpoint: Checkpoint;
  ranks: RankSave[];
}

export async function getSave(run: string, id: string, trial: string, signal: AbortSignal): Promise<Save> {
  const a = await ask<{ checkpoint: Checkpoint; writes: any[] }>(requests.checkpoint(run, id, '/save', { trial }), signal);
  return {
    checkpoint: a.checkpoint,
    ranks: a.writes.map((w) => ({
      rank: w.rank,
      node: w.node ?? null,
      seconds: { wait: w.waited_s, copy: w.copied_s, queue: w.queued_s, digest: w.digest_s, write: w.write_s, sync: w.sync_s },
      bytesWritten: w.completed_seq ? (w.bytes_written ?? 0) : null,
      bytesReused: w.completed_seq ? (w.bytes_reused ?? 0) : null,
      sealed: !!w.sealed_seq,
      completed: !!w.completed_seq,
      error: w.error ?? '',
    })),
  };
}

export interface Tensor {
  fqn: string;
  dtype: string;
  shape: number[];
  bytes: number;
  chunks: { rank: number; offsets: number[]; sizes: number[] }[];
}

export interface Value {
  fqn: string;
  rank: number;
  bytes: number;
  per_rank: boolean;
}

export function getTensors(run: string, id: string, trial: string, signal: AbortSignal): Promise<{ tensors: Tensor[]; values: Value[] }> {
  return ask(requests.checkpoint(run, id, '/tensors', { trial }), signal);
}

export interface SavedFile {
  rank: number;
  name: string;
  size: number;
  from?: { run: string; trial: string; checkpoint: string };
}

export function getFiles(run: string, id: string, trial: string, signal: AbortSignal): Promise<{ path: string; files: SavedFile[] }> {
  return ask(requests.checkpoint(run, id, '/files', { trial }), signal);
}

export interface Reshard {
  reshard: {
    bytes: number;
    read: number;
    ranks: { rank: number; bytes: number; read: number; reads: number; missing: number; lacks: string[]; files: { rank: number; bytes: number; read: number }[] }[];
  };
  missing: { fqn: string; ranks: number[] }[];
  unread: { fqn: string; ranks: number[] }[];
}

export function getReshard(run: string, id: string, trial: string, ranks: number, signal: AbortSignal): Promise<Reshard> {
  return ask(requests.checkpoint(run, id, '/reshard', { trial, ranks }), signal);
}

// ---- events

/** LogEvent is an event of the log, a CloudEvent 1.0. */
export interface LogEvent {
  sequence: number;
  stored: string;
  id: string;
  type: string;
  source: string;
  time: string;
  subject: string;
  ckptactor?: string;
  data: any;
}

/** Place is what a subject tells: ckpt.RUN.TRIAL.ACTOR.FAMILY.KIND. */
export interface EventPlace {
  run: string;
  trial: string;
  actor: string;
  kind: string;
}

export function placeOf(subject: string): EventPlace {
  const [, run = '', trial = '', actor = '', family = '', kind = ''] = subject.split('.');
  return { run: plain(run), trial: plain(trial), actor, kind: `${family}.${kind}` };
}

/** plain is the inverse of the encoding of names in subjects; "_" stands for none. */
function plain(token: string): string {
  if (token === '_') return '';
  try {
    return decodeURIComponent(token);
  } catch {
    return token;
  }
}

export interface EventsQuery {
  run: string;
  types: string[];
  before?: number;
  page?: string;
  limit: number;
}

export async function getEvents(q: EventsQuery, signal: AbortSignal): Promise<Page<LogEvent>> {
  const a = await ask<{ events: LogEvent[]; next?: string }>(
    ['events', { run: q.run, type: q.types, before: q.page ? 0 : (q.before ?? 0), page: q.page, limit: q.limit }],
    signal,
  );
  return { rows: a.events, next: a.next ?? '' };
}

/** Timeline has the counts of events by family in columns of width events, from the event from on. */
export interface Timeline {
  sequence: number;
  width: number;
  from: number; // above 1: the server has not counted all of the log yet
  families: Record<string, number[]>;
}

export function getTimeline(columns: number, signal: AbortSignal): Promise<Timeline> {
  return ask(['timeline', { columns }], signal);
}

export function getEvent(sequence: number, signal: AbortSignal): Promise<LogEvent> {
  return ask([`events/${sequence}`, {}], signal);
}

// ---- health

export interface Health {
  disk?: { free: number; size: number }; // absent for a bucket
  cursors: { name: string; sequence: number; lag: number; moved_at: string }[];
  problem?: string;
}

export async function getHealth(signal: AbortSignal): Promise<Health> {
  return ask<Health>(['health', {}], signal);
}
