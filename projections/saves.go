package projections

import (
	"cmp"
	"errors"
	"slices"
)

// Save is one save and what each of its ranks did for it.
type Save struct {
	Checkpoint Checkpoint  `json:"checkpoint"`
	Writes     []SaveWrite `json:"writes"` // by rank; empty once the checkpoint is deleted
}

// SaveWrite is the part of one rank.
type SaveWrite struct {
	Write
	Node int `json:"node"` // of the rank; -1 if it is unknown
}

// GetSave returns the save of a full ID in any state, or a [NotFoundError].
func GetSave(r Reader, run, trial, id string) (Save, error) {
	c, err := GetCheckpoint(r, run, trial, id)
	if err != nil {
		return Save{}, err
	}
	out := Save{Checkpoint: c, Writes: []SaveWrite{}}
	writes, err := Writes(r, run, trial, id)
	if err != nil {
		return out, err
	}
	for _, w := range writes {
		of, found, err := load[Worker](r, workerKey(run, trial, c.Attempt, w.Rank))
		if err != nil {
			return out, err
		}
		if !found {
			of.Node = -1
		}
		out.Writes = append(out.Writes, SaveWrite{w, of.Node})
	}
	return out, nil
}

// CheckpointsBefore returns at most limit checkpoints of all trials of a run that began
// before a sequence of the log, the newest begun first; 0 stands for the end of the log. The
// next page begins before the BegunSeq of the last one. Unless everything is set, only
// committed checkpoints in the current line are returned. It reads no more rows of
// checkpoints than it returns, and those between them that are not wanted.
func CheckpointsBefore(r Reader, run string, everything bool, before uint64, limit int) ([]Checkpoint, error) {
	trials, err := all[Trial](r, key(keyTrial, run))
	if err != nil {
		return nil, err
	}
	rows := []Checkpoint{}
	for _, t := range trials {
		prefix, n := key(keyCheckpoint, run, t.Name), 0
		lo := prefix
		if before > 0 {
			lo = checkpointKey(run, t.Name, before-1)
		}
		err := r.Scan(lo, after(prefix), func(k, value []byte) error {
			if n == limit {
				return errFound
			}
			var c Checkpoint
			if err := decode(k, value, &c); err != nil {
				return err
			}
			if everything || c.Visible() {
				rows, n = append(rows, c), n+1
			}
			return nil
		})
		if err != nil && !errors.Is(err, errFound) {
			return nil, err
		}
	}
	slices.SortFunc(rows, func(a, b Checkpoint) int { return cmp.Compare(b.BegunSeq, a.BegunSeq) })
	return rows[:min(limit, len(rows))], nil
}
