package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/store/views"
	"github.com/ckptstore/ckptstore/projections"
)

// repairAlways is the number of events at the end of the log whose decisions are always checked,
// even if they are known to be carried out.
const repairAlways = 10_000

// repair carries out in the data the log's decisions about checkpoints that a crash has left
// undone: it writes missing receipts and removes the leftovers of aborted and deleted
// checkpoints. It checks the decisions behind settled, the event up to which all are known to be
// carried out, and returns the log's end, up to which they are now. It logs failures, which
// [repairAll] retries.
//
// It leaves directories that the log does not know: they may be a user's copies.
func repair(ctx context.Context, s *Store, log *jetlog.Log, v *views.Views, settled uint64) (uint64, error) {
	last, err := log.Last(ctx)
	if err != nil {
		return 0, err
	}
	from := uint64(1)
	if last > repairAlways {
		from = last - repairAlways
	}
	if settled > 0 {
		from = min(from, settled+1)
	}
	type id struct{ run, trial, checkpoint string }
	seen := map[id]bool{}
	var g errgroup.Group // a check is a request where the data is in a bucket
	g.SetLimit(s.Data.Width())
	defer func() { _ = g.Wait() }() // never fails
	for e, err := range log.ReadCheckpoints(ctx, from, last) {
		if err != nil {
			return 0, err
		}
		checkpoint, err := endedBy(e)
		if err != nil {
			return 0, err
		}
		key := id{e.Scope.Run, e.Scope.Trial, checkpoint}
		if checkpoint == "" || seen[key] {
			continue
		}
		seen[key] = true
		var row projections.Checkpoint
		if err := v.View(func(r projections.Reader) (err error) {
			row, err = ended(r, key.run, key.trial, key.checkpoint)
			return err
		}); err != nil {
			return 0, err
		}
		g.Go(func() error {
			repairOne(ctx, s, log, row)
			return nil
		})
	}
	_ = g.Wait()
	return last, ctx.Err()
}

// repairOne carries out the decision about one checkpoint. A failure must not keep the store
// from opening.
func repairOne(ctx context.Context, s *Store, log *jetlog.Log, c projections.Checkpoint) {
	done, err := settledInData(ctx, s, c)
	if !done && err == nil {
		ref := RefOf(c)
		switch c.State {
		case projections.Committed:
			err = repairReceipt(ctx, s, log, c)
		case projections.Deleted:
			if s.Data.HasLinks() { // otherwise a collection knows which files must stay
				err = s.Data.RemoveCommitted(ctx, ref)
			}
		case projections.Aborted:
			err = s.Data.Remove(ctx, ref)
		}
	}
	if locked := (*object.LockedError)(nil); errors.As(err, &locked) {
		s.opts.Logger.Info("files of an aborted checkpoint stay", "checkpoint", c.Run+"@"+c.ID, "reason", locked)
		return
	}
	if err != nil {
		s.opts.Logger.Warn("checkpoint not repaired; run `ckptstore verify`", "checkpoint", c.Run+"@"+c.ID, "error", err)
	}
}

// settledInData reports whether the decision about a checkpoint is carried out: its receipt is
// readable, or its directory is gone.
func settledInData(ctx context.Context, s *Store, c projections.Checkpoint) (bool, error) {
	switch c.State {
	case projections.Committed:
		_, err := s.Data.Receipt(ctx, RefOf(c))
		if errors.Is(err, data.ErrNotCommitted) || errors.As(err, new(*data.CorruptError)) {
			return false, nil
		}
		return err == nil, err
	case projections.Aborted, projections.Deleted:
		// Most of these were removed long ago.
		has, err := s.hasFiles(ctx, RefOf(c))
		return !has && err == nil, err // files behind a link are not removed
	}
	return true, nil
}

// repairAll is repair for every checkpoint of the log, run by run. If age is not 0, it skips
// checkpoints that ended more recently, whose processes may still be at work, and deleted ones,
// which a restore may be reading: the next collection removes those.
func repairAll(ctx context.Context, s *Store, log *jetlog.Log, read func(func(projections.Reader) error) error, age time.Duration, pace func(context.Context, int64) error) error {
	const each = 1 << 10 // approximate cost of one check, in bytes
	var runs []projections.Run
	if err := read(func(r projections.Reader) (err error) {
		runs, err = projections.Runs(r)
		return err
	}); err != nil {
		return err
	}
	for _, run := range runs {
		var list []projections.Checkpoint
		err := read(func(r projections.Reader) (err error) {
			if err = projections.Understood(r, run.Name); err == nil {
				list, err = projections.Checkpoints(r, run.Name, true)
			}
			return err
		})
		if errors.Is(err, events.ErrNewer) {
			s.opts.Logger.Warn("checkpoints of a run not repaired", "run", run.Name, "error", err)
			continue
		}
		if err != nil {
			return err
		}
		var g errgroup.Group
		g.SetLimit(s.Data.Width())
		for _, c := range list {
			if age > 0 && (c.State == projections.Deleted || time.Since(c.EndedAt) < age) {
				continue
			}
			if err = pace(ctx, each); err != nil {
				break
			}
			g.Go(func() error {
				repairOne(ctx, s, log, c)
				return nil
			})
		}
		if err := errors.Join(err, g.Wait()); err != nil {
			return err
		}
	}
	return nil
}

// unpaced is a pace without a limit.
func unpaced(ctx context.Context, _ int64) error { return ctx.Err() }

// repairReceipt writes the receipt for a checkpoint's event.
func repairReceipt(ctx context.Context, s *Store, log *jetlog.Log, c projections.Checkpoint) error {
	receipt, err := receiptOf(ctx, s.ID, log, c)
	if err != nil {
		return err
	}
	return s.Data.WriteReceipt(ctx, RefOf(c), receipt)
}

// receiptOf returns the receipt of a committed checkpoint according to the log.
func receiptOf(ctx context.Context, store string, log *jetlog.Log, c projections.Checkpoint) (checkpoint.Receipt, error) {
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return checkpoint.Receipt{}, err
	}
	r, err := log.At(ctx, c.CommittedSeq)
	if err != nil {
		return checkpoint.Receipt{}, fmt.Errorf("the event that commits it: %w", err)
	}
	return checkpoint.Receipt{
		Store: store, Run: c.Run, Trial: c.Trial, Checkpoint: c.ID, Name: c.Name, Step: c.Step, Attempt: c.Attempt,
		Sequence: r.Sequence, Event: r.ID, Manifest: digest, CommittedAt: r.Time,
		WorldSize: c.WorldSize, Bytes: c.Bytes,
	}, nil
}

// repairName is next to data/. The empty file stays when a repair ends: removing a file that other
// processes lock would let two of them in.
const repairName = "REPAIR"

// LockRepair keeps other repairs of the same data out until unlock, including those of other
// processes, whichever process owns the store. It covers other machines if the filesystem's locks
// do. It returns [ErrLocked] at once while another repair runs. It returns
// [errors.ErrUnsupported] if nothing can be locked: the data is in no directory, or its filesystem
// has no locks.
func (s *Store) LockRepair() (unlock func() error, err error) {
	path := filepath.Join(s.top, repairName)
	if info, err := os.Stat(s.top); s.top == "" || err != nil || !info.IsDir() {
		return nil, fmt.Errorf("repair: %w: the data of the store, %s, is in no directory of this machine that could be locked against another repair: run the command where it is", errors.ErrUnsupported, s.Data.Dir())
	}
	f, err := s.insideData().OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock against another repair: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(refusedRepair(path, err), f.Close())
	}
	host, _ := os.Hostname()
	card := fmt.Sprintf("process %d on %s since %s", os.Getpid(), host, time.Now().Format(time.DateTime))
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt([]byte(card), 0)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock against another repair: %w", err), f.Close())
	}
	return func() error { return errors.Join(f.Truncate(0), f.Close()) }, nil
}

// refusedRepair explains why the lock was not taken.
func refusedRepair(path string, err error) error {
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		who := "another process"
		if card, err := readFile(path); err == nil && strings.HasPrefix(string(card), "process ") {
			who = string(card)
		}
		return fmt.Errorf("%w against a second repair: %s repairs it and holds %s: wait until it ends, or end it, then run the command again", ErrLocked, who, path)
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.ENOTSUP), errors.Is(err, unix.ENOLCK):
		return fmt.Errorf("repair: %w: the filesystem of %s has no locks to keep a second repair out: %w", errors.ErrUnsupported, path, err)
	}
	return fmt.Errorf("lock %s against another repair: %w", path, err)
}

const (
	// settleEvery is how often an owner checks whether decisions were carried out. The
	// deciding process has at least that long to do so.
	settleEvery = 30 * time.Second
	// settleLong is how long a decision may stay undone before the rest of the log counts
	// without it: a restore may read a deleted checkpoint.
	settleLong = 10 * time.Minute
)

// settler tracks up to which event all decisions about checkpoints are carried out in the data:
// receipts exist, and the files of aborted and deleted checkpoints are gone. The next owner checks
// only later decisions, so that a long history does not slow it down. It repairs nothing itself.
type settler struct {
	store   *Store
	log     *jetlog.Log
	views   *views.Views
	settled atomic.Uint64
}

// keep advances settled until ctx ends.
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
			t.store.opts.Logger.Warn("settled part of the log not known; the next owner checks more of it", "error", err)
		}
		until = last
	}
}

// advance moves settled to the first decision that is not carried out, or to until.
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
		err = t.views.View(func(r projections.Reader) (err error) {
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

// ended returns the row of a checkpoint that has ended. It is empty if nothing must be done about
// it: the views have not reached it yet, or its run has events that this version does not know.
func ended(r projections.Reader, run, trial, id string) (row projections.Checkpoint, err error) {
	if err = projections.Understood(r, run); err == nil {
		row, err = projections.GetCheckpoint(r, run, trial, id)
	}
	if errors.Is(err, projections.ErrNotFound) || errors.Is(err, events.ErrNewer) {
		return projections.Checkpoint{}, nil
	}
	return row, err
}

// endedBy returns the checkpoint whose data a decision affects, or "".
func endedBy(e events.Recorded) (string, error) {
	body, err := e.Body()
	if errors.Is(err, events.ErrNewer) {
		return "", nil // its run is left alone
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
