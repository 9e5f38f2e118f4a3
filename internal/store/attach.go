package store

import (
	"context"
	"fmt"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/projections"
)

// Attached records a file that [data.Root.Attach] has put beside a
// checkpoint. It belongs to it from then on, in place of one of that name.
func (s *Store) Attached(ctx context.Context, c projections.Checkpoint, name string, digest checkpoint.Digest, size int64) error {
	err := s.decide(ctx, events.Aggregate{Run: c.Run, Trial: c.Trial}, &events.CheckpointAttached{
		Checkpoint: c.ID, Name: name, Digest: digest.String(), Size: size,
	})
	if err != nil {
		return fmt.Errorf("record %s of checkpoint %s@%s: %w", name, c.Run, c.ID, err)
	}
	return nil
}
