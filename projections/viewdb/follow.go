package viewdb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

// Source is the log.
type Source interface {
	// Read yields the log from sequence from to until inclusive; with until 0 it
	// continues with events as they are appended. It ends when ctx ends and after an
	// error. It must yield every sequence once, in order.
	Read(ctx context.Context, from, until uint64) iter.Seq2[events.Recorded, error]
	// Last returns the last sequence of the log, 0 if it is empty.
	Last(ctx context.Context) (uint64, error)
}

// A batch ends at the first of these limits.
const (
	batchEvents = 5000
	batchBytes  = 1 << 20
	batchAge    = 20 * time.Millisecond
)

// syncEvery is the interval at which the view is made durable during updates.
const syncEvery = time.Second

// Follow folds the log from the cursor to its end, and then new events, until ctx ends
// or the view is closed. It returns the context's error when ctx ends; any other error
// means that the view cannot get past an event. Events become visible as soon as no
// other event is waiting, at most 20 ms later, and durable a second later.
func (db *DB) Follow(ctx context.Context, src Source) error {
	return db.update(ctx, src, true)
}

// CatchUp folds the log from the cursor to its current end. The folded events are
// durable on return, even after an error.
func (db *DB) CatchUp(ctx context.Context, src Source) error {
	return db.update(ctx, src, false)
}

func (db *DB) update(ctx context.Context, src Source, follow bool) error {
	if !db.updating.TryLock() {
		return fmt.Errorf("update views in %s: %w", db.dir, ErrBusy)
	}
	defer db.updating.Unlock()
	if db.life.Err() != nil {
		return fmt.Errorf("update views in %s: %w", db.dir, ErrClosed)
	}
	within, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(db.life, cancel)()

	db.advance(func() { db.halted = nil })
	err := db.fail.guard(func() error {
		err := db.run(within, src, follow)
		if errors.Is(err, pebble.ErrCorruption) {
			db.fail.set(err.Error())
		}
		return err
	})
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case db.life.Err() != nil:
		return fmt.Errorf("update views in %s: %w", db.dir, ErrClosed)
	}
	err = fmt.Errorf("update views in %s: %w", db.dir, err)
	db.advance(func() { db.halted = err })
	return err
}

func (db *DB) run(ctx context.Context, src Source, follow bool) error {
	last, err := src.Last(ctx)
	if err != nil {
		return fmt.Errorf("read the end of the log: %w", err)
	}
	at := db.Cursor()
	if last < at {
		return fmt.Errorf("%w: it ends at %d, the views are at %d; restore log/ from a backup, or run `ckptstore recover`, which makes a log of the receipts; compare the log with a copy before you delete the views", ErrRolledBack, last, at)
	}
	until := uint64(0)
	if !follow {
		if last == at {
			return db.sync()
		}
		until = last
	}
	ctx, cancel := context.WithCancel(ctx)
	u := updater{db: db, at: at, end: last}
	queue := u.fetch(src.Read(ctx, at+1, until), ctx.Done())
	err = u.fold(ctx, queue, until)
	cancel()
	for range queue { // the reader must be gone before we return
	}
	return errors.Join(err, u.drop(), db.sync())
}

// sync makes all committed batches durable.
func (db *DB) sync() error { return db.pebble.LogData(nil, pebble.Sync) }

// updater folds one reading of the log.
type updater struct {
	db    *DB
	at    uint64   // last sequence in the batch, or the cursor
	end   uint64   // of the log, when reading started
	rows  *overlay // of the batch, nil between batches
	count int      // events in the batch
	dirty bool     // committed since the last sync
}

type arrival struct {
	event events.Recorded
	err   error
}

// fetch reads ahead in the background. The channel is closed when the log ends or after
// done is closed.
func (u *updater) fetch(log iter.Seq2[events.Recorded, error], done <-chan struct{}) <-chan arrival {
	queue := make(chan arrival, 1024)
	go func() {
		defer close(queue)
		for event, err := range log {
			select {
			case queue <- arrival{event, err}:
			case <-done:
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return queue
}

// fold empties the queue, in batches.
func (u *updater) fold(ctx context.Context, queue <-chan arrival, until uint64) error {
	age := time.NewTimer(batchAge)
	defer age.Stop()
	tick := time.NewTicker(syncEvery)
	defer tick.Stop()
	for {
		select {
		case a, ok := <-queue:
			if err := u.take(ctx, a, ok, until); err != nil {
				return err
			}
			if u.count == 1 {
				age.Reset(batchAge)
			}
			// A batch stays open only while the log is still far ahead.
			full := u.count >= batchEvents || u.count > 0 && u.rows.bytes >= batchBytes
			if full || len(queue) == 0 && u.at >= u.end {
				if err := u.commit(); err != nil {
					return err
				}
			}
			if until != 0 && u.at >= until {
				return u.commit()
			}
		case <-age.C:
			if err := u.commit(); err != nil {
				return err
			}
		case <-tick.C:
			if err := u.sync(); err != nil {
				return err
			}
		case <-ctx.Done():
			return errors.Join(ctx.Err(), u.commit())
		}
	}
}

// take folds one event into the batch.
func (u *updater) take(ctx context.Context, a arrival, ok bool, until uint64) error {
	if err := ctx.Err(); err != nil {
		return errors.Join(err, u.commit())
	}
	if !ok {
		return fmt.Errorf("the log ended unexpectedly at %d", u.at)
	}
	if a.err != nil {
		return errors.Join(fmt.Errorf("read the log after event %d: %w", u.at, a.err), u.commit())
	}
	if err := check(a.event, u.at, u.db.store); err != nil {
		return errors.Join(err, u.commit())
	}
	if u.rows == nil {
		u.rows = newOverlay(u.db.pebble)
	}
	if err := projections.Apply(u.rows, a.event); err != nil {
		return errors.Join(err, u.drop()) // the batch may hold a part of it
	}
	u.at = a.event.Sequence
	u.count++
	return nil
}

// check verifies that an event can follow the one at sequence at.
func check(r events.Recorded, at uint64, store string) error {
	if r.Sequence != at+1 {
		return fmt.Errorf("%w: event %d follows event %d; `ckptstore verify --log` lists what is missing, `ckptstore recover` makes a log of the receipts", ErrGap, r.Sequence, at)
	}
	if r.Kind != (events.StoreCreated{}).Kind() || store == "" {
		return nil
	}
	var created events.StoreCreated
	if err := json.Unmarshal(r.Data, &created); err != nil {
		return fmt.Errorf("event %d (%s): decode body: %w", r.Sequence, r.Kind, err)
	}
	if created.Store != store {
		return fmt.Errorf("event %d: the log is %w: of %s, not of %s", r.Sequence, ErrForeign, created.Store, store)
	}
	return nil
}

// commit writes the batch and its cursor, if there is one.
func (u *updater) commit() error {
	if u.count == 0 {
		return nil
	}
	if err := u.write(); err != nil {
		return errors.Join(fmt.Errorf("commit rows up to event %d: %w", u.at, err), u.drop())
	}
	u.dirty = true
	at := u.at
	u.db.advance(func() { u.db.sequence = at })
	return u.drop()
}

// write puts the rows and the cursor into the database, both or neither.
func (u *updater) write() error {
	b := u.db.pebble.NewBatch()
	err := u.rows.write(b)
	if err == nil {
		err = u.db.writeCursor(b, u.at)
	}
	if err == nil {
		err = b.Commit(pebble.NoSync)
	}
	return errors.Join(err, b.Close())
}

// drop discards the batch.
func (u *updater) drop() error {
	if u.rows == nil {
		return nil
	}
	rows := u.rows
	u.rows, u.count = nil, 0
	return rows.close()
}

func (u *updater) sync() error {
	if !u.dirty {
		return nil
	}
	u.dirty = false
	return u.db.sync()
}

// Replay returns the rows as of sequence until, 0 for the end of the log. It needs no
// database. A sequence beyond the end is an error.
func Replay(ctx context.Context, src Source, until uint64) (*projections.Memory, error) {
	last, err := src.Last(ctx)
	if err != nil {
		return nil, fmt.Errorf("replay: read the end of the log: %w", err)
	}
	if until > last {
		return nil, fmt.Errorf("replay up to event %d: the log ends at %d", until, last)
	}
	if until == 0 {
		until = last
	}
	m := projections.NewMemory()
	at := uint64(0)
	if until == 0 {
		return m, nil
	}
	for r, err := range src.Read(ctx, 1, until) {
		if err != nil {
			return nil, fmt.Errorf("replay after event %d: %w", at, err)
		}
		if err := check(r, at, ""); err != nil {
			return nil, fmt.Errorf("replay: %w", err)
		}
		if err := projections.Apply(m, r); err != nil {
			return nil, fmt.Errorf("replay: %w", err)
		}
		if at = r.Sequence; at == until {
			return m, nil
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("replay: stopped after event %d: %w", at, err)
	}
	return nil, fmt.Errorf("replay: the log was read up to event %d only, not to %d", at, until)
}
