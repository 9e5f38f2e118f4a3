package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/share"
	"github.com/ckptstore/ckptstore/internal/store/holder"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// RebuiltViews is the outcome of a rebuild of the views from the log.
type RebuiltViews struct {
	Sequence uint64 `json:"sequence"`          // last event in both
	Equal    bool   `json:"equal"`             // the views had the same rows
	Digest   string `json:"digest"`            // of the rebuilt rows
	Had      string `json:"had"`               // digest of the previous views; empty without views or with a problem
	Problem  string `json:"problem,omitempty"` // why the previous views cannot be read
}

// VerifyViews rebuilds the views from the log next to the live ones, compares the two as of one
// sequence, and keeps the live ones.
func (s *Store) VerifyViews(ctx context.Context) (out RebuiltViews, err error) {
	parent := s.Location
	if s.local != nil {
		parent = os.TempDir()
	}
	if parent == s.Location {
		sweepScratch(parent)
	}
	dir, remove, err := makeScratch(parent)
	if err != nil {
		return out, fmt.Errorf("verify views: %w", err)
	}
	defer func() { err = errors.Join(err, remove()) }()
	fresh, err := viewdb.Open(filepath.Join(dir, "views"), viewdb.Options{Store: s.ID, Logger: s.opts.Logger})
	if err != nil {
		return out, fmt.Errorf("verify views: %w", err)
	}
	defer func() { err = errors.Join(err, fresh.Close()) }()
	if err := fresh.CatchUp(ctx, s.Log); err != nil {
		return out, fmt.Errorf("verify views: %w", err)
	}
	// A query waits until the views have caught up with the log.
	if _, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{}); err != nil {
		return out, fmt.Errorf("verify views: %w", err)
	}
	live, err := query.Ask(ctx, s.Views(), query.State, query.Params{})
	if err != nil {
		return out, fmt.Errorf("verify views: %w", err)
	}
	if err := fresh.CatchUp(ctx, until{s.Log, live.Sequence}); err != nil {
		return out, fmt.Errorf("verify views: %w", err)
	}
	sum, at, err := fresh.Digest()
	if err != nil {
		return out, fmt.Errorf("verify views: %w", err)
	}
	out = RebuiltViews{Sequence: at, Digest: fmt.Sprintf("%x", sum), Had: live.Digest}
	out.Equal = out.Digest == out.Had && at == live.Sequence
	if s.local == nil {
		err = noteFullRead(s.Location, at)
	}
	return out, err
}

// Views that are folded for a comparison are in a directory that is removed after it. If the process
// was killed, the next comparison removes it: then nothing locks the file in it.
const (
	scratchPrefix = durable.TempPrefix + "views-"
	scratchLock   = "lock"
	// scratchAge is the age of a directory without that file: it may be new.
	scratchAge = 24 * time.Hour
)

// makeScratch makes such a directory, which the caller removes.
func makeScratch(parent string) (dir string, remove func() error, err error) {
	if dir, err = os.MkdirTemp(parent, scratchPrefix+"*"); err != nil {
		return "", nil, err
	}
	lock, err := holder.MakeWitness(dir)
	if err == nil {
		err = os.Rename(lock.Name(), filepath.Join(dir, scratchLock)) // it is locked by now
	}
	remove = func() error {
		err := os.RemoveAll(dir)
		if lock != nil {
			err = errors.Join(err, lock.Close())
		}
		return err
	}
	if err != nil {
		return "", nil, errors.Join(err, remove())
	}
	return dir, remove, nil
}

// sweepScratch removes the directories of processes that were killed, best effort.
func sweepScratch(parent string) {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return // making a new one reports it
	}
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), scratchPrefix) {
			continue
		}
		dir := filepath.Join(parent, e.Name())
		lock := filepath.Join(dir, scratchLock)
		left := holder.Unlocked(lock)
		if _, err := os.Lstat(lock); errors.Is(err, os.ErrNotExist) {
			info, err := e.Info()
			left = err == nil && time.Since(info.ModTime()) > scratchAge
		}
		if left {
			_ = os.RemoveAll(dir) // or the next comparison does
		}
	}
}

// until is a log that ends early.
type until struct {
	log  *jetlog.Log
	last uint64
}

var _ viewdb.Source = until{}

// Last implements [viewdb.Source].
func (u until) Last(context.Context) (uint64, error) { return u.last, nil }

// Read implements [viewdb.Source].
func (u until) Read(ctx context.Context, from, until uint64) iter.Seq2[events.Recorded, error] {
	return u.log.Read(ctx, from, until)
}

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

// RebuildViews rebuilds the views of a directory from its log, compares them with the existing ones,
// and replaces those in one step. It returns [ErrLocked] if a process owns the store. It returns
// [ErrDamaged] if the log fails the checks of an open, and keeps the views then. An interruption
// leaves the old views or the new ones.
func RebuildViews(ctx context.Context, o Options) (out RebuiltViews, err error) {
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
		if out, err = rebuildBeside(ctx, dir, s.ID, log); err == nil {
			err = noteFullRead(dir, out.Sequence)
		}
		return err
	})
	if err != nil {
		err = fmt.Errorf("rebuild views: %w", err)
	}
	return out, err
}

// rebuildBeside rebuilds the views under the store's lock.
func rebuildBeside(ctx context.Context, dir, id string, log *jetlog.Log) (out RebuiltViews, err error) {
	fresh, views := filepath.Join(dir, durable.TempPrefix+"views"), filepath.Join(dir, "views")
	if err := os.RemoveAll(fresh); err != nil { // left by an interrupted rebuild
		return out, err
	}
	if err := share.MkdirAll(fresh, 0o700); err != nil {
		return out, err
	}
	if out.Digest, out.Sequence, err = foldInto(ctx, fresh, id, log); err != nil {
		return out, errors.Join(err, os.RemoveAll(fresh))
	}
	_, err = os.Lstat(views)
	if errors.Is(err, os.ErrNotExist) {
		return out, errors.Join(os.Rename(fresh, views), durable.SyncDir(dir))
	}
	if err != nil {
		return out, err
	}
	had, at, err := foldInto(ctx, views, id, log)
	switch {
	case ctx.Err() != nil:
		return out, errors.Join(ctx.Err(), os.RemoveAll(fresh))
	case errors.Is(err, viewdb.ErrRolledBack):
		// The views have more events than the log: they show what the log has lost.
		return out, errors.Join(err, os.RemoveAll(fresh))
	case err != nil:
		out.Problem = err.Error() // often the reason for the rebuild
	default:
		out.Had, out.Equal = had, had == out.Digest && at == out.Sequence
	}
	if err := unix.Renameat2(unix.AT_FDCWD, fresh, unix.AT_FDCWD, views, unix.RENAME_EXCHANGE); err != nil {
		return out, fmt.Errorf("exchange %s and %s: %w: delete %s, it is rebuilt when the store is next opened", fresh, views, err, views)
	}
	return out, errors.Join(durable.SyncDir(dir), os.RemoveAll(fresh))
}

// foldInto brings the views in dir up to date and closes them.
func foldInto(ctx context.Context, dir, id string, log *jetlog.Log) (digest string, at uint64, err error) {
	db, err := viewdb.Open(dir, viewdb.Options{FS: viewsOn(nil, dir), Store: id})
	if err != nil {
		return "", 0, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := db.CatchUp(ctx, log); err != nil {
		return "", 0, err
	}
	sum, at, err := db.Digest()
	return fmt.Sprintf("%x", sum), at, err
}

// An owner whose views fail records this in the store's directory, so that the next owner waits less
// long for a file system that does not answer: when several jobs end at once, each of them may own
// the store in turn.
const (
	viewsFailedName = "views.failed"
	// shortPatience is the patience for the views after an owner's failure. A working file
	// system answers within it.
	shortPatience = 2 * time.Second
)

// viewsFailure is the content of that file.
type viewsFailure struct {
	At    time.Time `json:"at"`
	Cause string    `json:"cause"`
}

// noteViewsFailed writes the file, best effort.
func (s *Store) noteViewsFailed(dir string, cause error) {
	if s.opts.Reader {
		return
	}
	text, err := json.Marshal(viewsFailure{At: time.Now().UTC(), Cause: cause.Error()})
	if err == nil {
		err = durable.Write(filepath.Join(dir, viewsFailedName), append(text, '\n'))
	}
	if err != nil {
		s.opts.Logger.Debug("failure of the views not recorded for the next owner", "error", err)
	}
}

// noteViewsWork removes the file.
func (s *Store) noteViewsWork(dir string) {
	if s.opts.Reader {
		return
	}
	if err := os.Remove(filepath.Join(dir, viewsFailedName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.opts.Logger.Debug("record of failed views not removed", "error", err)
	}
}

// viewsPatience returns how long one operation of the views may take: 0 for the default, or less if
// an owner's views failed recently.
func viewsPatience(dir string, now time.Time) time.Duration {
	info, err := os.Lstat(filepath.Join(dir, viewsFailedName))
	if err != nil || !info.Mode().IsRegular() {
		return 0
	}
	if age := now.Sub(info.ModTime()); age < 0 || age > diskRetry {
		return 0
	}
	return shortPatience
}

// plainViews is the filesystem of views. It checks them before a database opens their files, since
// the database would follow symbolic links and wait for pipes. The check is part of the database's
// first call, so that a disk that does not answer is treated as in any other call.
type plainViews struct {
	vfs.FS
	dir string
}

// viewsOn returns the filesystem of the views in a directory. If files is nil, it uses the machine's.
func viewsOn(files vfs.FS, dir string) vfs.FS {
	if files == nil {
		files = vfs.Default
	}
	return plainViews{files, dir}
}

// MkdirAll implements [vfs.FS].
func (p plainViews) MkdirAll(dir string, perm os.FileMode) error {
	if err := onlyPlain(filepath.Dir(p.dir), p.dir); err != nil {
		return err
	}
	return p.FS.MkdirAll(dir, perm)
}

// Unwrap implements [vfs.FS].
func (p plainViews) Unwrap() vfs.FS { return p.FS }

const (
	// quarantineEvery is how often an owner checks for messages that are not events.
	quarantineEvery = time.Second
	// quarantineMost limits the messages recorded each time: there may be many.
	quarantineMost = 100
)

// quarantine records each message of the log that is not an event by a decision, to show that it is
// known and was not overlooked. Readers skip such messages in any case.
type quarantine struct {
	log    *jetlog.Log
	view   func(func(projections.Reader) error) error
	logger *slog.Logger
	until  uint64 // all messages up to this sequence are recorded
}

// errEnough ends a pass over the voids.
var errEnough = errors.New("enough for now")

// keep records new messages until ctx ends.
func (q *quarantine) keep(ctx context.Context) {
	said := false
	for {
		err := q.record(ctx)
		if errors.Is(err, jetlog.ErrNotAllowed) {
			return // another process may record them
		}
		if err != nil && ctx.Err() == nil && !said {
			said = true
			q.logger.Warn("messages that are not events not recorded; retrying", "error", err)
		}
		if !sleep(ctx, quarantineEvery) {
			return
		}
	}
}

// record decides about the messages that the views list.
func (q *quarantine) record(ctx context.Context) error {
	var open []projections.Void
	seen := q.until
	if err := q.view(func(r projections.Reader) error {
		return projections.Voids(r, q.until, func(v projections.Void) error {
			switch {
			case len(open) == quarantineMost:
				return errEnough
			case v.RecordedSeq == 0:
				open = append(open, v)
			case len(open) == 0:
				seen = v.Sequence
			}
			return nil
		})
	}); err != nil && !errors.Is(err, errEnough) {
		return err
	}
	q.until = seen
	for _, v := range open {
		end, err := q.log.LaneEnd(ctx, events.Aggregate{})
		if err != nil {
			return err
		}
		d, err := events.NewDecision(Stamp("owner"), events.Aggregate{}, &events.LogVoided{Sequence: v.Sequence, Digest: v.Digest, Why: v.Why})
		if err != nil {
			return err
		}
		seq, err := q.log.Decide(ctx, d, end)
		if errors.Is(err, jetlog.ErrConflict) {
			return nil // another process may have recorded it: the views will show it
		}
		if err != nil {
			return err
		}
		q.until = v.Sequence
		q.logger.Warn("message of the log is not an event: recorded and skipped", "sequence", v.Sequence, "subject", v.Subject, "why", v.Why, "recorded", seq)
	}
	return nil
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
	views := s.local
	if own := s.owned(); own != nil {
		views = own.views
	}
	if h.Owns = views != nil && views.db != nil; h.Owns {
		db, _, halted := views.db.present()
		h.Halted, h.Memory = halted, views.db.dir != "" && views.db.inMemory()
		if db != nil {
			h.Views = db.Cursor()
		}
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

// owned returns the ownership of this process, or nil.
func (s *Store) owned() *ownership {
	if s.owner == nil {
		return nil
	}
	return s.owner.ownership()
}

// ownViews returns the views of this process, or nil.
func (s *Store) ownViews() *shelf {
	if s.local != nil {
		return s.local.db
	}
	if own := s.owned(); own != nil {
		return own.views.db
	}
	return nil
}
