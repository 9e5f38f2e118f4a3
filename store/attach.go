package store

import (
	"context"
	"fmt"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/projections"
)

// Attached records a file that [storage.Root.Attach] has put beside a
// checkpoint. It belongs to it from then on, in place of one of that name.
func (s *Store) Attached(ctx context.Context, c projections.Checkpoint, name string, digest plan.Digest, size int64) error {
	err := s.decide(ctx, events.Aggregate{Run: c.Run, Trial: c.Trial}, &events.CheckpointAttached{
		Checkpoint: c.ID, Name: name, Digest: digest.String(), Size: size,
	})
	if err != nil {
		return fmt.Errorf("record %s of checkpoint %s@%s: %w", name, c.Run, c.ID, err)
	}
	return nil
}

// Supersede takes a committed checkpoint out of its run's line. It stays, by its
// ID, until a collection deletes it.
func (s *Store) Supersede(ctx context.Context, c projections.Checkpoint, reason string) error {
	_, err := s.mark(ctx, c.Run+"/"+c.Trial+"@"+c.ID, func(now projections.Checkpoint) (events.Body, error) {
		if !now.Visible() {
			return nil, nil
		}
		return &events.CheckpointSuperseded{Checkpoint: now.ID, Reason: reason}, nil
	})
	return err
}
