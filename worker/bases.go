package worker

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/storage"
)

// basesTimeout bounds the question for what may be reused. A save that gets no
// answer writes everything.
const basesTimeout = 10 * time.Second

// bases are the checkpoints whose chunks a save need not write again. All ranks
// of a save ask for the same, so the last answer is kept.
type bases struct {
	mu   sync.Mutex
	of   string // checkpoint that is saved
	list []storage.Base
}

// basesOf are the newest checkpoint of the trial's line and the one that the
// attempt was resumed from, if that is another.
func (s *saver) basesOf(ctx context.Context, checkpoint string) []storage.Base {
	s.reuse.mu.Lock()
	defer s.reuse.mu.Unlock()
	if s.reuse.of == checkpoint {
		return s.reuse.list
	}
	ctx, cancel := context.WithTimeout(ctx, basesTimeout)
	defer cancel()
	refs := []string{s.lane.run + "/" + s.lane.trial + "@latest"}
	if s.resume != "" && !isPath(s.resume) {
		refs = append(refs, qualify(s.lane.run, s.resume))
	}
	var list []storage.Base
	for _, ref := range refs {
		b, found, err := s.base(ctx, ref)
		if err != nil {
			s.log.Warn("nothing of a checkpoint is reused, all of it is written", "save", checkpoint, "of", ref, "error", err)
		}
		if found && !slices.Contains(list, b) {
			list = append(list, b)
		}
	}
	s.reuse.of, s.reuse.list = checkpoint, list
	return list
}

func (s *saver) base(ctx context.Context, ref string) (b storage.Base, found bool, err error) {
	c, err := s.store.Views.Resolve(ctx, ref)
	if none := (*projections.NotFoundError)(nil); errors.As(err, &none) {
		return b, false, nil
	}
	if err != nil || c.State != projections.Committed {
		return b, false, err
	}
	digest, err := plan.ParseDigest(c.Manifest)
	return storage.Base{Ref: storage.RefOf(c.Run, c.Trial, c.ID), Manifest: digest}, err == nil, err
}

// reusing is a writer of a checkpoint that writes only what is new.
func (s *saver) reusing(ctx context.Context, checkpoint string) *storage.FileWriter {
	say := func(err error) {
		s.log.Info("what could be reused is written again", "save", checkpoint, "reason", err)
	}
	return s.store.Data.Writer(s.ref(checkpoint)).Reusing(say, s.basesOf(ctx, checkpoint)...)
}
