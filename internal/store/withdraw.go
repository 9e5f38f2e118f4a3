package store

import (
	"context"
	"slices"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// Withdraw takes committed checkpoints, all of one run, out of its line and deletes
// them, as the program that saved them or a user wants it. The result says what became
// of each: one that something holds, such as a pin, keeps its files until the first
// collection after that is over. What had to wait before goes with this one.
func (s *Store) Withdraw(ctx context.Context, all []projections.Checkpoint, reason string) ([]Collected, error) {
	if len(all) == 0 {
		return nil, nil
	}
	for _, c := range all {
		_, err := s.mark(ctx, c.Run+"/"+c.Trial+"@"+c.ID, func(now projections.Checkpoint) (events.Body, error) {
			if now.Withdrawn {
				return nil, nil
			}
			return &events.CheckpointSuperseded{Checkpoint: now.ID, Reason: reason}, nil
		})
		if err != nil {
			return nil, err
		}
	}
	done, err := s.Collect(ctx, CollectOptions{Runs: []string{all[0].Run}, Policy: retention.Policy{}, Apply: true})
	return slices.DeleteFunc(done.Checkpoints, func(c Collected) bool {
		return !slices.ContainsFunc(all, func(one projections.Checkpoint) bool { return one.Trial == c.Trial && one.ID == c.ID })
	}), err
}

// Stays says what holds the files of a checkpoint that was to be deleted; empty for
// one whose files are gone.
func (c Collected) Stays() string {
	if c.Action == Keep {
		return c.Reason
	}
	return c.Left
}
