package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/durable"
)

// logEnd is end.json: an event that the log has had, at or near its end. A log
// that was cut behind the last receipt looks whole, and whoever went on with it
// would give sequences out again that were acknowledged.
//
//	STORE/end.json   {"store", "sequence", "event", "at", "settled"}
//
// An owner that ends in order writes it after the last append, so it is the
// log's end. While it lives it writes it every second in which the end moved:
// after a kill, what came in the last second has no such witness.
type logEnd struct {
	Store    string    `json:"store"`
	Sequence uint64    `json:"sequence"`
	Event    string    `json:"event"` // its ID
	At       time.Time `json:"at"`    // when it was the last one
	// Settled is the event up to which every decision about a checkpoint was
	// carried out in the data; 0 when that is not known.
	Settled uint64 `json:"settled,omitempty"`
}

const (
	endName  = "end.json"
	endEvery = time.Second
	// endTimeout bounds the last writing of an owner that ends.
	endTimeout = 5 * time.Second
)

func readEnd(dir string) (e logEnd, err error) {
	path := filepath.Join(dir, endName)
	text, err := readFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return e, nil // of a new store, or one of before there was any
	}
	if err == nil {
		err = json.Unmarshal(text, &e)
	}
	if err != nil {
		err = fmt.Errorf("%w: where the log ended is not known: %s: %w: compare log/ with a backup, then delete that file: it is written again", ErrDamaged, path, err)
	}
	return e, err
}

// hadEnd holds the log to have the event that was its end when its owner last
// wrote so, and returns how much of it was settled then.
func hadEnd(ctx context.Context, s *Store, log *jetlog.Log, last uint64) (settled uint64, err error) {
	if IsURL(s.opts.Location) {
		return 0, nil
	}
	end, err := readEnd(s.Location)
	if err != nil || end.Sequence == 0 {
		return 0, err
	}
	if end.Store != s.ID {
		return 0, fmt.Errorf("%w: %s is that of store %s: the directory was put together from two; delete that file if log/ is the right one", ErrForeign, filepath.Join(s.Location, endName), end.Store)
	}
	has := fmt.Sprintf("it ends at event %d", last)
	if end.Sequence <= last {
		event, err := log.At(ctx, end.Sequence)
		switch {
		case err == nil && event.ID == end.Event:
			return end.Settled, nil
		case err == nil:
			has = fmt.Sprintf("event %d is %s, %s", end.Sequence, event.ID, event.Kind)
		case errors.Is(err, jetlog.ErrEnd), errors.Is(err, jetlog.ErrGap):
			has = err.Error()
		default:
			return 0, err
		}
	}
	return 0, fmt.Errorf("%w: the log was rolled back: %s, and on %s it ended at event %d, %s: restore log/ from a backup, or, to go on without what it lost, delete %s",
		ErrDamaged, has, end.At.Local().Format(time.DateTime), end.Sequence, end.Event, filepath.Join(s.Location, endName))
}

// noteEnd writes where the log ends now and how much of it is settled, if that is
// not what is written.
func noteEnd(ctx context.Context, dir, store string, log *jetlog.Log, settled uint64) error {
	last, err := log.Last(ctx)
	if err != nil {
		return err
	}
	if had, err := readEnd(dir); err == nil && had.Sequence == last && had.Store == store && had.Settled == settled {
		return nil
	}
	event, err := log.At(ctx, last)
	if err != nil {
		return err
	}
	text, err := json.Marshal(logEnd{Store: store, Sequence: last, Event: event.ID, At: time.Now().UTC(), Settled: min(settled, last)})
	if err != nil {
		return err
	}
	return durable.Write(filepath.Join(dir, endName), append(text, '\n'))
}

// keepEnd notes the log's end until ctx ends.
func (w *ownership) keepEnd(ctx context.Context, s *Store) {
	said := false
	for sleep(ctx, endEvery) {
		err := noteEnd(ctx, w.dir, s.ID, w.log, w.settler.settled.Load())
		if ctx.Err() == nil && err != nil && !said {
			said = true
			s.opts.Logger.Warn("where the log ends cannot be noted: that it is cut would not be noticed behind the last commit", "error", err)
		}
	}
}

// settle ends what others do with the store, folds the rest of the log, and
// notes its end. Nothing is appended after it.
func (w *ownership) settle() {
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	w.server.Disconnect()
	if err := noteEnd(ctx, w.dir, w.store.ID, w.log, w.settler.settled.Load()); err != nil {
		w.store.opts.Logger.Warn("where the log ends was not noted", "error", err)
	}
	last, err := w.log.Last(ctx)
	if err != nil || w.views.db.Cursor() >= last {
		return // they are a cache
	}
	if err := w.views.finish(ctx); err != nil {
		w.store.opts.Logger.Warn("the views are behind the log; they are brought up to it when the store is next opened", "error", err)
	}
}
