package projections

import (
	"cmp"
	"errors"
	"slices"
)

// errEnough ends a scan early.
var errEnough = errors.New("enough rows")

// CheckpointsPage returns at most limit of the checkpoints that [Checkpoints] returns: those
// that began before a sequence, or the newest with before 0. It reads no more rows than it
// needs of each trial, and hidden ones on the way.
func CheckpointsPage(r Reader, run string, everything bool, before uint64, limit int) ([]Checkpoint, error) {
	trials, err := all[Trial](r, key(keyTrial, run))
	if err != nil || limit <= 0 {
		return nil, err
	}
	var rows []Checkpoint
	for _, t := range trials {
		prefix := key(keyCheckpoint, run, t.Name)
		lo, hi := prefix, after(prefix)
		if before > 0 {
			lo = checkpointKey(run, t.Name, before-1)
		}
		n := 0
		err := r.Scan(lo, hi, func(k, value []byte) error {
			var c Checkpoint
			if err := decode(k, value, &c); err != nil {
				return err
			}
			if !everything && !c.Visible() {
				return nil
			}
			rows = append(rows, c)
			if n++; n == limit {
				return errEnough
			}
			return nil
		})
		if err != nil && !errors.Is(err, errEnough) {
			return nil, err
		}
	}
	if len(trials) > 1 {
		slices.SortFunc(rows, func(a, b Checkpoint) int { return cmp.Compare(b.BegunSeq, a.BegunSeq) })
	}
	return rows[:min(len(rows), limit)], nil
}

// LastReport returns the newest report along the current line of a trial, and whether there
// is one.
func LastReport(r Reader, run, trial string) (Report, bool, error) {
	t, found, err := load[Trial](r, trialKey(run, trial))
	if err != nil || !found {
		return Report{}, false, err
	}
	line, err := windows(r, t)
	if err != nil {
		return Report{}, false, err
	}
	for _, w := range line {
		if w.to > w.from {
			return loadReport(r, run, trial, w.attempt, w.to)
		}
	}
	return Report{}, false, nil
}
