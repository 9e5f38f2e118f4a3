package views

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/share"
	"github.com/ckptstore/ckptstore/internal/store/holder"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// Rebuilt is the outcome of a rebuild of the views from the log.
type Rebuilt struct {
	Sequence uint64 `json:"sequence"`          // last event in both
	Equal    bool   `json:"equal"`             // the views had the same rows
	Digest   string `json:"digest"`            // of the rebuilt rows
	Had      string `json:"had"`               // digest of the previous views; empty without views or with a problem
	Problem  string `json:"problem,omitempty"` // why the previous views cannot be read
}

// Verify folds the log of o next to live views, in a directory in parent that it removes, and compares
// the two as of one sequence. Without a parent the directory is in the system's temporary directory.
func Verify(ctx context.Context, parent string, o Options, live query.Source) (out Rebuilt, err error) {
	if parent == "" {
		parent = os.TempDir()
	} else {
		sweepScratch(parent)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("verify views: %w", err)
		}
	}()
	dir, remove, err := makeScratch(parent)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	fresh, err := viewdb.Open(filepath.Join(dir, "views"), viewdb.Options{Store: o.Store, Logger: o.Logger})
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, fresh.Close()) }()
	if err := fresh.CatchUp(ctx, o.Log); err != nil {
		return out, err
	}
	// A query waits until the views have caught up with the log.
	if _, err := query.Ask(ctx, live, query.Runs, query.Params{}); err != nil {
		return out, err
	}
	had, err := query.Ask(ctx, live, query.State, query.Params{})
	if err != nil {
		return out, err
	}
	if err := fresh.CatchUp(ctx, until{o.Log, had.Sequence}); err != nil {
		return out, err
	}
	sum, at, err := fresh.Digest()
	if err != nil {
		return out, err
	}
	out = Rebuilt{Sequence: at, Digest: fmt.Sprintf("%x", sum), Had: had.Digest}
	out.Equal = out.Digest == out.Had && at == had.Sequence
	return out, nil
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
	viewdb.Source
	last uint64
}

var _ viewdb.Source = until{}

// Last implements [viewdb.Source].
func (u until) Last(context.Context) (uint64, error) { return u.last, nil }

// Rebuild rebuilds the views of a store's directory from its log, compares them with the existing ones,
// and replaces those in one step. The caller holds the store's lock. An interruption leaves the old
// views or the new ones.
func Rebuild(ctx context.Context, dir, id string, log viewdb.Source) (out Rebuilt, err error) {
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
func foldInto(ctx context.Context, dir, id string, log viewdb.Source) (digest string, at uint64, err error) {
	db, err := viewdb.Open(dir, viewdb.Options{FS: onDisk(nil, dir), Store: id})
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
