// The phases of a rank's save, in their order. All functions are pure.

/** phases are what a rank's save consists of, with their names in sentences. */
export const phases = [
  { key: 'wait', text: 'wait for a slot' },
  { key: 'copy', text: 'copy into shared memory' },
  { key: 'queue', text: 'wait for its turn to be written' },
  { key: 'digest', text: 'digest' },
  { key: 'write', text: 'write' },
  { key: 'sync', text: 'sync' },
] as const;

export type Phase = (typeof phases)[number]['key'];

/** RankSave is one rank's part of a save. Phases that were not measured are absent. */
export interface RankSave {
  rank: number;
  node: number | null;
  seconds: Partial<Record<Phase, number>>;
  bytesWritten: number | null;
  bytesReused: number | null;
  sealed: boolean;
  completed: boolean;
  error: string;
}

/** measured reports whether any phase of the rank is known. */
export function measured(r: RankSave): boolean {
  return phases.some((p) => r.seconds[p.key] != null);
}

/** total returns the seconds of all phases that are known. */
export function total(r: RankSave): number {
  return phases.reduce((sum, p) => sum + (r.seconds[p.key] ?? 0), 0);
}

/** mostRows is how many ranks a waterfall draws. */
export const mostRows = 32;

/** Chosen are the ranks that a waterfall draws, and a sentence about the others. */
export interface Chosen {
  rows: RankSave[];
  note: string;
}

/** choose returns all ranks up to 64, else the 32 slowest, the slowest first. */
export function choose(ranks: RankSave[], seconds: (s: number) => string): Chosen {
  const sorted = [...ranks].sort((a, b) => Number(!!b.error) - Number(!!a.error) || total(b) - total(a) || a.rank - b.rank);
  if (sorted.length <= 64) return { rows: sorted, note: '' };
  const rest = sorted.slice(mostRows).map(total).sort((a, b) => a - b);
  const q = (p: number) => rest[Math.min(rest.length - 1, Math.floor(p * rest.length))];
  return {
    rows: sorted.slice(0, mostRows),
    note: `The ${mostRows} slowest of ${sorted.length} ranks. The other ${rest.length} took ${seconds(rest[0])} to ${seconds(rest[rest.length - 1])}, the median ${seconds(q(0.5))}.`,
  };
}

/** slowest names the phase in which the slowest rank lost most, if it took a fifth longer than the median rank. */
export function slowest(ranks: RankSave[]): { rank: RankSave; phase: Phase; over: number } | null {
  const some = ranks.filter(measured);
  if (some.length < 2) return null;
  const sorted = [...some].sort((a, b) => total(b) - total(a) || a.rank - b.rank);
  const worst = sorted[0];
  if (total(worst) < 1.2 * total(sorted[Math.ceil((sorted.length - 1) / 2)])) return null;
  let best: { rank: RankSave; phase: Phase; over: number } | null = null;
  for (const p of phases) {
    const values = some.map((r) => r.seconds[p.key] ?? 0).sort((a, b) => a - b);
    const over = (worst.seconds[p.key] ?? 0) - values[Math.floor((values.length - 1) / 2)];
    if (over > (best?.over ?? 0)) best = { rank: worst, phase: p.key, over };
  }
  return best;
}
