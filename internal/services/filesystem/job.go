package filesystem

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// jobs commits the checkpoints of processes that are no ranks of the run: each is
// a short job of its own, as an import is. Concurrent jobs of one run are
// serialized; if a trainer runs the run, they are refused.
type jobs struct {
	store *store.Store
	log   *slog.Logger

	mu   sync.Mutex
	runs map[string]chan struct{} // full while a job of the run is running
}

// turn waits until no job of a run is running here.
func (j *jobs) turn(ctx context.Context, run string) (done func(), err error) {
	j.mu.Lock()
	turn := j.runs[run]
	if turn == nil {
		turn = make(chan struct{}, 1)
		j.runs[run] = turn
	}
	j.mu.Unlock()
	select {
	case turn <- struct{}{}:
		return func() { <-turn }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (j *jobs) save(ctx context.Context, w whole) (id string, err error) {
	done, err := j.turn(ctx, w.to.run)
	if err != nil {
		return "", err
	}
	defer done()
	job := store.NewID()
	held, release, err := j.store.HoldRun(ctx, w.to.run, job)
	if running := (*store.RunningError)(nil); errors.As(err, &running) {
		return "", conflict("%w: save from its ranks, or under another run", err)
	}
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, release()) }()
	got, err := session.Import(held, session.ImportConfig{
		Run: w.to.run, Trial: projections.DefaultTrial, Job: job, Step: w.step, Name: w.to.name, Sealed: w.from,
		Command: os.Args, Reap: process.ReapEarlier, Logger: j.log, NewID: store.NewID,
	}, session.Store{
		ID: j.store.ID, Log: j.store.Log, Views: store.Queries{From: j.store.Views()}, Blobs: j.store.Blobs, Data: j.store.Data,
		Conflict: func(err error) bool { return errors.Is(err, jetlog.ErrConflict) }, Unserved: store.Unserved,
	})
	return got.Checkpoint, err
}
