package restore

import (
	"context"
	"errors"
	"syscall"

	"golang.org/x/sync/errgroup"
)

// readBeside reads into memory in addition to the slots that hold the checkpoint.
// If shared memory has no room for both, the slots are freed: the files have all
// their data, and the next attempt would find as little room.
func (r *restore) readBeside(ctx context.Context) error {
	// Hold first, so that the load does not overwrite them.
	held, release := r.hold()
	defer func() { release() }()
	if r.fetch(ctx, held) {
		release()
		held, release = r.hold()
	}
	if err := r.share(ctx, held); err != nil {
		return err
	}
	defer func() { r.shared.end() }()
	lent, err := r.lendSlots(ctx, held)
	if err != nil {
		return err
	}
	if err := r.lendFiles(ctx, held); err != nil {
		return err
	}
	err = r.memory(ctx)
	if errors.Is(err, syscall.ENOSPC) && r.l.cfg.Spare() {
		err = r.memory(ctx) // frees the slots that hold other checkpoints
	}
	if errors.Is(err, syscall.ENOSPC) && r.shared != nil {
		r.l.cfg.Logger.Warn("shared memory has no room for what other nodes pass on; reading files instead", "checkpoint", r.ckpt.ID, "error", err)
		r.unshare()
		if err := r.lendFiles(ctx, held); err != nil {
			return err
		}
		err = r.memory(ctx)
	}
	if errors.Is(err, syscall.ENOSPC) {
		r.l.cfg.Logger.Warn("shared memory has no room for a load and the staging slots; free slots released, reading files instead",
			"checkpoint", r.ckpt.ID, "error", err)
		release()
		held, release = nil, func() {}
		lent = Report{}
		r.takeBack()
		r.l.cfg.Spare()
		if err := r.lendFiles(ctx, nil); err != nil {
			return err
		}
		err = r.memory(ctx)
	}
	if err != nil {
		return err
	}
	return r.read(ctx, held, lent)
}

// memory takes an arena for each rank that has none yet.
func (r *restore) memory(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for rank := range r.ranks {
		of := &r.ranks[rank]
		if of.arena != nil || of.allLent() {
			continue
		}
		g.Go(func() (err error) {
			of.arena, err = r.l.cfg.Arenas.Take(ctx, rank, "load", of.size)
			return err
		})
	}
	return g.Wait()
}
