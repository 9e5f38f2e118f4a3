package store

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/projections"
)

const (
	// settleEvery is how often an owner looks at whether what was decided was
	// carried out. Whoever decides has that long at least to do so.
	settleEvery = 30 * time.Second
	// settleLong is how long something may stay undone before the rest of the
	// log goes on without it: a restore may read what was deleted.
	settleLong = 10 * time.Minute
)

// settler knows up to which event all decisions about checkpoints are carried
// out in the data: receipts are there, and the files of what was aborted or
// deleted are gone. The next owner looks at those behind it, so that it takes
// no longer in a store with a long history. It repairs nothing itself.
type settler struct {
	store   *Store
	log     *jetlog.Log
	views   *follower
	settled atomic.Uint64
}

// keep moves settled on until ctx ends.
func (t *settler) keep(ctx context.Context, every time.Duration) {
	until := uint64(0) // the log's end one round ago
	said := false
	for sleep(ctx, every) {
		last, err := t.log.Last(ctx)
		if err == nil && until > t.settled.Load() {
			err = t.advance(ctx, until)
		}
		if err != nil && ctx.Err() == nil && !said {
			said = true
			t.store.opts.Logger.Warn("how much of the log is carried out is not known: the next owner looks at more of it", "error", err)
		}
		until = last
	}
}

// advance moves settled on to the first decision that is not carried out, or to
// until.
func (t *settler) advance(ctx context.Context, until uint64) error {
	for e, err := range t.log.ReadCheckpoints(ctx, t.settled.Load()+1, until) {
		if err != nil {
			return err
		}
		id, err := endedBy(e)
		if err != nil {
			return err
		}
		if id == "" {
			continue
		}
		var row projections.Checkpoint
		err = t.views.db.View(func(r projections.Reader) (err error) {
			row, err = ended(r, e.Scope.Run, e.Scope.Trial, id)
			return err
		})
		done := true
		if err == nil {
			done, err = settledInData(ctx, t.store, row)
		}
		if err != nil {
			return err
		}
		if !done && time.Since(e.Stored) < settleLong {
			return nil
		}
		t.settled.Store(e.Sequence)
	}
	t.settled.Store(until)
	return nil
}

// ended is the row of a checkpoint that was ended. It is empty where nothing is to be
// done about it: the views have not come to it yet, or its run has events that this
// version does not know.
func ended(r projections.Reader, run, trial, id string) (row projections.Checkpoint, err error) {
	if err = projections.Understood(r, run); err == nil {
		row, err = projections.GetCheckpoint(r, run, trial, id)
	}
	if errors.Is(err, projections.ErrNotFound) || errors.Is(err, events.ErrNewer) {
		return projections.Checkpoint{}, nil
	}
	return row, err
}

// endedBy is the checkpoint that a decision calls for something to be done about
// in the data; empty when it does not.
func endedBy(e events.Recorded) (string, error) {
	body, err := e.Body()
	if errors.Is(err, events.ErrNewer) {
		return "", nil // of a run that is left alone
	}
	if err != nil {
		return "", err
	}
	switch b := body.(type) {
	case *events.CheckpointCommitted:
		return b.Checkpoint, nil
	case *events.CheckpointAborted:
		return b.Checkpoint, nil
	case *events.CheckpointDeleted:
		return b.Checkpoint, nil
	}
	return "", nil
}
