package restore

import (
	"context"
	"errors"
	"syscall"

	"golang.org/x/sync/errgroup"
)

// readBeside reads into memory beside the slots that hold the checkpoint. Where
// shared memory has no room for both, the slots give way: the files have all
// that is in them, and the next attempt would find as little room.
func (r *restore) readBeside(ctx context.Context) error {
	// First: what they hold is not to be overwritten by what is loaded.
	held, release := r.hold()
	defer func() { release() }()
	lent, err := r.lend(ctx, held)
	if err != nil {
		return err
	}
	if err := r.lendFiles(ctx, held); err != nil {
		return err
	}
	err = r.memory(ctx)
	if errors.Is(err, syscall.ENOSPC) && r.l.cfg.Spare() {
		err = r.memory(ctx) // without those that hold other checkpoints
	}
	if errors.Is(err, syscall.ENOSPC) {
		r.l.cfg.Logger.Warn("shared memory has no room for a load beside the staging slots: free slots are given up, and the files are read instead",
			"checkpoint", r.ckpt.ID, "error", err)
		release()
		held, release = nil, func() {}
		lent = 0
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
		if of.arena != nil || of.slots && of.allLent() {
			continue
		}
		g.Go(func() (err error) {
			of.arena, err = r.l.cfg.Arenas.Take(ctx, rank, "load", of.size)
			return err
		})
	}
	return g.Wait()
}
