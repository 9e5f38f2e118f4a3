package store

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store/views"
	"github.com/ckptstore/ckptstore/internal/store/voids"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// viewsOf returns the options of views of the store in dir, or in memory if dir is empty.
func (s *Store) viewsOf(dir string, log viewdb.Source) views.Options {
	o := s.opts.views
	o.Dir, o.Store, o.Log, o.ReadOnly, o.Logger = dir, s.ID, log, s.opts.Reader, s.opts.Logger
	return o
}

// useLog makes log the log of the store.
func (s *Store) useLog(log *jetlog.Log) {
	s.Log, s.Past = log, views.NewPast(s.viewsOf("", log), s.ownViews)
}

// owned returns the ownership of this process, or nil.
func (s *Store) owned() *ownership {
	if s.owner == nil {
		return nil
	}
	return s.owner.ownership()
}

// ownViews returns the views of this process, or nil.
func (s *Store) ownViews() *views.Views {
	if own := s.owned(); own != nil {
		return own.views
	}
	return s.followed
}

// recordVoids records the messages of the log that are not events until ctx ends.
func (s *Store) recordVoids(ctx context.Context, log *jetlog.Log, in *views.Views) {
	r := voids.Recorder{Log: log, View: in.View, Stamp: func() events.Stamp { return Stamp("owner") }, Logger: s.opts.Logger}
	r.Keep(ctx)
}

// VerifyViews rebuilds the views from the log next to the live ones, compares the two as of one
// sequence, and keeps the live ones.
func (s *Store) VerifyViews(ctx context.Context) (views.Rebuilt, error) {
	parent := s.Location
	if s.local != nil {
		parent = ""
	}
	out, err := views.Verify(ctx, parent, s.viewsOf("", s.Log), s.Views())
	if err == nil && s.local == nil {
		err = noteFullRead(s.Location, out.Sequence)
	}
	return out, err
}

// RebuildViews rebuilds the views of a directory from its log, compares them with the existing ones,
// and replaces those in one step. It returns [ErrLocked] if a process owns the store. It returns
// [ErrDamaged] if the log fails the checks of an open, and keeps the views then. An interruption
// leaves the old views or the new ones.
func RebuildViews(ctx context.Context, o Options) (out views.Rebuilt, err error) {
	_, isURL, err := parseLocation(o.Location)
	if err != nil {
		return out, fmt.Errorf("rebuild views: %w", err)
	}
	if isURL {
		return out, fmt.Errorf("%w %s: the views of a server's store are rebuilt by each process that opens it: `ckptstore views verify` compares them", ErrLocation, jetlog.Redacted(o.Location))
	}
	dir, err := filepath.Abs(o.Location)
	if err != nil {
		return out, fmt.Errorf("rebuild views: %w", err)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s, err := closedStore(dir, o)
	if err == nil {
		err = sound(dir)
	}
	if err != nil {
		return out, err
	}
	err = aloneWithLog(ctx, s, ", or compare with `ckptstore views verify`, which needs no lock", func(log *jetlog.Log) (err error) {
		if out, err = views.Rebuild(ctx, dir, s.ID, log); err == nil {
			err = noteFullRead(dir, out.Sequence)
		}
		return err
	})
	if err != nil {
		err = fmt.Errorf("rebuild views: %w", err)
	}
	return out, err
}

// errEnough ends a walk over the log.
var errEnough = errors.New("enough for now")

// fedLog is the log of an owner. What follows it feeds the keeper of the tamper evidence,
// too, which would otherwise be a second reader: the server then reads and sends, and the
// client parses, each message twice. Profile of `bench log`: that took about 15 µs of CPU
// time an event, and hashing it 2 µs.
type fedLog struct {
	*jetlog.Log
	keeper *ledger.Keeper // or nil
}

var _ viewdb.Source = fedLog{}

// Read implements [viewdb.Source].
func (f fedLog) Read(ctx context.Context, from, until uint64) iter.Seq2[events.Recorded, error] {
	if until != 0 || f.keeper == nil { // the past, or a part of the log
		return f.Log.Read(ctx, from, until)
	}
	return func(yield func(events.Recorded, error) bool) {
		err := f.Walk(ctx, from, 0, func(m events.Message, sequence uint64, stored time.Time, event func() events.Recorded) error {
			f.keeper.Feed(m, sequence, stored)
			if !yield(event(), nil) {
				return errEnough
			}
			return nil
		})
		if err != nil && !errors.Is(err, errEnough) {
			yield(events.Recorded{}, err)
		}
	}
}

// ledgerLog is a log as ledgers read it.
type ledgerLog struct{ *jetlog.Log }

var _ ledger.Log = ledgerLog{}

// Walk implements [ledger.Log].
func (l ledgerLog) Walk(ctx context.Context, from, until uint64, each func(m events.Message, sequence uint64, stored time.Time) error) error {
	return l.Log.Walk(ctx, from, until, func(m events.Message, sequence uint64, stored time.Time, _ func() events.Recorded) error {
		return each(m, sequence, stored)
	})
}

// Volume is the space on one disk, in bytes.
type Volume struct {
	Name       string // log, or data if that is elsewhere
	Free, Size uint64
}

// Health is the state of what this process serves.
type Health struct {
	Owns   bool   // the views and the log are in this process, or the store is a server's
	Log    uint64 // sequence of the log's last event
	LogErr error  // why the log does not answer
	Views  uint64 // last sequence that the views contain
	Halted error  // why the views no longer follow the log
	Memory bool   // the views are in memory because their directory fails
	Room   error  // why facts are refused
	Disks  []Volume
	Read   FullRead // of the log
}

// Health examines the store. It asks the log and the disks, and reads no row.
func (s *Store) Health(ctx context.Context) (h Health) {
	if s.Log == nil {
		h.LogErr = errors.New("this process cannot write the store, so it reads the receipts, not the log: ask a server that can")
	} else {
		h.Log, h.LogErr = s.Log.Last(ctx)
	}
	if v := s.ownViews(); v != nil {
		now := v.State()
		h.Owns, h.Views, h.Halted, h.Memory = true, now.Cursor, now.Halted, now.Memory
	}
	look := func(name string, usage func() (data.Usage, error)) {
		if u, err := usage(); err == nil && u.Size > 0 {
			h.Disks = append(h.Disks, Volume{Name: name, Free: u.Free, Size: u.Size})
		}
	}
	if h.Room = s.backup; s.top != "" {
		h.Room = errors.Join(h.Room, s.space.Admit())
		look("log", s.space.Look)
	}
	if s.top == "" || s.bucket != nil {
		look("data", func() (data.Usage, error) { return s.Data.Usage(ctx) })
	}
	if read, found, err := s.LastFullRead(); err == nil && found {
		h.Read = read
	}
	return h
}
