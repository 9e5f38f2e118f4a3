// Columns of a metric, and what a chart derives from them. All functions are pure.

/** Columns are a metric in parts of the x axis. A part stands for one report or several. */
export interface Columns {
  x: number[]; // ascending
  step: number[]; // of the last report of the part
  attempt: number[]; // of the last report of the part
  min: (number | null)[];
  max: (number | null)[];
  last: (number | null)[]; // null where the last value is no finite number
  nonfinite: number[]; // counts of values that are NaN or infinite
}

export function empty(): Columns {
  return { x: [], step: [], attempt: [], min: [], max: [], last: [], nonfinite: [] };
}

/** at returns the index of the last part with x at or below a value, or -1. */
export function at(x: number[], value: number): number {
  let lo = 0;
  let hi = x.length;
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (x[mid] <= value) lo = mid + 1;
    else hi = mid;
  }
  return lo - 1;
}

/** bounds returns the least and the greatest value of parts within [from, to]; null if there is none. */
export function bounds(all: Columns[], from: number, to: number, positive: boolean): [number, number] | null {
  let lo = Infinity;
  let hi = -Infinity;
  for (const c of all) {
    for (let i = 0; i < c.x.length; i++) {
      if (c.x[i] < from || c.x[i] > to) continue;
      const min = c.min[i];
      const max = c.max[i];
      if (min != null && (!positive || min > 0)) lo = Math.min(lo, min);
      if (max != null && (!positive || max > 0)) {
        hi = Math.max(hi, max);
        lo = Math.min(lo, positive && (min == null || min <= 0) ? max : lo);
      }
    }
  }
  return lo <= hi ? [lo, hi] : null;
}

/**
 * smoothed is the exponential moving average of the last values, over so many iterations. A part
 * of the x axis weighs as much as its iterations, so that the average does not depend on the
 * zoom. It lies within the values before it, and is null where a value is not finite.
 */
export function smoothed(c: Columns, iterations: number): (number | null)[] {
  const keep = 1 - 2 / (iterations + 1);
  let mean: number | null = null;
  let before = 0; // x of the value before
  return c.last.map((v, i) => {
    if (v == null) return null;
    mean = mean == null ? v : v + (mean - v) * keep ** (c.x[i] - before);
    before = c.x[i];
    return mean;
  });
}

/** range pads bounds, so that the extremes are inside of the plot. */
export function range(b: [number, number] | null, log: boolean): [number, number] {
  if (!b) return log ? [1, 10] : [0, 1];
  const [lo, hi] = b;
  if (log) {
    const pad = Math.max(1.05, (hi / lo) ** 0.04);
    return [lo / pad, hi * pad];
  }
  const pad = hi > lo ? (hi - lo) * 0.05 : Math.abs(hi) * 0.05 || 1;
  return [lo - pad, hi + pad];
}

/** place maps a step of an attempt to x: by the parts of that attempt if there are any, else by all. */
export function place(c: Columns, step: number, attempt?: number): number | null {
  let best: number | null = null;
  let bestStep = -Infinity;
  let first: number | null = null;
  let firstStep = Infinity;
  for (let i = 0; i < c.x.length; i++) {
    if (attempt != null && c.attempt[i] !== attempt) continue;
    const s = c.step[i];
    if (s <= step && s >= bestStep) {
      best = c.x[i];
      bestStep = s;
    }
    if (s > step && s < firstStep) {
      first = c.x[i];
      firstStep = s;
    }
  }
  if (best == null && first == null && attempt != null) return place(c, step);
  return best ?? first;
}

/** Lane is one attempt: the parts of the x axis in which it is in the line, or superseded. */
export interface Lane {
  attempt: number;
  kept: [number, number] | null;
  superseded: [number, number] | null;
}

/** lanes derives the attempts from the columns of the line and of superseded attempts. */
export function lanes(line: Columns, hidden: Columns[]): Lane[] {
  const found = new Map<number, Lane>();
  const grow = (attempt: number, which: 'kept' | 'superseded', x: number) => {
    let lane = found.get(attempt);
    if (!lane) found.set(attempt, (lane = { attempt, kept: null, superseded: null }));
    const r = lane[which];
    lane[which] = r ? [Math.min(r[0], x), Math.max(r[1], x)] : [x, x];
  };
  line.x.forEach((x, i) => grow(line.attempt[i], 'kept', x));
  for (const h of hidden) h.x.forEach((x, i) => grow(h.attempt[i], 'superseded', x));
  return [...found.values()].sort((a, b) => a.attempt - b.attempt);
}

/** Ends are the last, least and greatest finite value, with their x and step. */
export interface Ends {
  last: { value: number; step: number } | null;
  min: { value: number; step: number; x: number } | null;
  max: { value: number; step: number; x: number } | null;
  nonfinite: number;
}

export function ends(c: Columns): Ends {
  const out: Ends = { last: null, min: null, max: null, nonfinite: 0 };
  for (let i = 0; i < c.x.length; i++) {
    const { min, max, last } = { min: c.min[i], max: c.max[i], last: c.last[i] };
    if (last != null) out.last = { value: last, step: c.step[i] };
    if (min != null && (!out.min || min < out.min.value)) out.min = { value: min, step: c.step[i], x: c.x[i] };
    if (max != null && (!out.max || max > out.max.value)) out.max = { value: max, step: c.step[i], x: c.x[i] };
    out.nonfinite += c.nonfinite[i] ?? 0;
  }
  return out;
}
