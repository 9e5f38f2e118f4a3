package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/share"
)

// ErrExists says that there is a store already.
var ErrExists = problem.New(problem.Conflict, "store exists")

// ErrNotEmpty says that somebody else's files are where a store was to be made.
var ErrNotEmpty = problem.New(problem.Foreign, "not empty")

// Init makes a new store and returns its identity. In a directory, store.json
// is renamed into place last: without it an init that was cut is redone. With
// a URL, data says where checkpoints go; it must be a directory that every
// node of every job sees under that path; see [InitURL].
func Init(ctx context.Context, location, data string) (string, error) {
	return InitWith(ctx, location, InitOptions{Data: data})
}

// InitOptions say how to make a store.
type InitOptions struct {
	Data   string // with a URL: see [InitURL]
	Shared bool   // with a group, whose members may all write to it
	Group  string // name or number; empty: the one that the directory has
}

// InitWith is [Init] with options.
func InitWith(ctx context.Context, location string, o InitOptions) (string, error) {
	data := o.Data
	location, isURL, err := parseLocation(location)
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	if isURL && o.Shared {
		return "", fmt.Errorf("init %s: %w: a group shares a directory: who may write to a server's log is for the server to say", jetlog.Redacted(location), ErrLocation)
	}
	if isURL {
		made, err := InitURL(ctx, location, URLOptions{Data: data})
		return made.Store, err
	}
	if data != "" {
		return "", fmt.Errorf("init %s: %w: --data goes with a URL; in a directory, the data is in its data/", location, ErrLocation)
	}
	dir, err := filepath.Abs(location)
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	// Before the lock is a file in it: somebody else's directory stays as it is.
	if err := vacant(dir); err != nil {
		return "", fmt.Errorf("init %s: %w", dir, err)
	}
	if err := makeOwn(dir); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	lock, err := tryLock(dir)
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	if lock == nil {
		return "", fmt.Errorf("init: %w: another process holds %s", ErrLocked, filepath.Join(dir, "LOCK"))
	}
	defer func() { _ = lock.Close() }()
	if err := vacant(dir); err != nil {
		return "", fmt.Errorf("init %s: %w", dir, err)
	}
	if err := clearCutLog(dir); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	owner := thisUser()
	if o.Shared {
		if owner, err = makeShared(dir, o.Group); err == nil {
			// It is of the group that the directory had.
			err = errors.Join(lock.Chown(-1, owner.GID), share.File(lock))
		}
		if err != nil {
			return "", fmt.Errorf("init: %w", err)
		}
	}
	id := identity{Product: product, Store: NewID(), Format: Format, Created: time.Now().UTC(), Owner: owner}
	if err := createLog(ctx, filepath.Join(dir, "log"), id.Store); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	for _, sub := range []string{"data", "blobs"} {
		if err := beneath.At(dir).MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return "", fmt.Errorf("init: %w", err)
		}
	}
	if err := share.Tree(filepath.Join(dir, "log"), nil); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	text, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	if err := durable.Write(filepath.Join(dir, "store.json"), append(text, '\n')); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	return id.Store, durable.SyncDir(filepath.Dir(dir))
}

// vacant refuses a directory that is a store, or has files that are not those
// of a cut init, above all a store whose store.json is lost.
func vacant(dir string) error {
	if _, err := readIdentity(dir); !errors.Is(err, ErrNoStore) {
		return errors.Join(ErrExists, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	ended := false
	for _, e := range entries {
		switch name := e.Name(); {
		case name == endName: // what else is there says more
			ended = true
			continue
		case name == lockName || name == ballastName || name == "log" || strings.HasPrefix(name, durable.TempPrefix):
			continue
		case name == "data" || name == "blobs" || name == runName || name == "views" && emptyDir(filepath.Join(dir, name)):
			left, err := beneath.At(dir).ReadDir(filepath.Join(dir, name))
			if err != nil {
				return err
			}
			if len(left) == 0 {
				continue
			}
		case name != "views" && name != cardName && name != readName && name != repairName: // which only a store has
			return fmt.Errorf("%s is %w (it has %q): choose an empty or a new directory", dir, ErrNotEmpty, name)
		}
		return fmt.Errorf("%w: %s has the %s of a store but no store.json: restore that file from a backup, or run `ckptstore recover --store %s`, or choose an empty directory", ErrDamaged, dir, e.Name(), dir)
	}
	if ended {
		return fmt.Errorf("init: %w: %s has the %s of a store, which had a log, but no store.json: restore that file from a backup, or choose an empty directory", ErrDamaged, dir, endName)
	}
	return nil
}

// maxCutLog is at least the bytes of each file of a log with one event, and
// less than two events have.
const maxCutLog = 704

// clearCutLog removes the log of an init that was cut: nobody was told that
// there is a store. Files are judged, not what a server makes of them: to it,
// a damaged log may look like none or a short one.
func clearCutLog(dir string) error {
	path := filepath.Join(dir, "log")
	size, err := largestFile(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	case size > maxCutLog:
		return fmt.Errorf("%w: %s has a log of more than its first event but no store.json: restore that file from a backup, or run `ckptstore recover`, or move the log away", ErrDamaged, dir)
	}
	return os.RemoveAll(path)
}

func largestFile(dir string) (size int64, err error) {
	err = beneath.At(filepath.Dir(dir)).WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			size = max(size, info.Size())
		}
		return err
	})
	return size, err
}

func createLog(ctx context.Context, dir, id string) error {
	server, err := jetlog.StartServer(ctx, jetlog.ServerOptions{Dir: dir})
	if err != nil {
		return err
	}
	defer server.Shutdown()
	log, err := jetlog.Connect(ctx, server.OwnerOptions())
	if err != nil {
		return err
	}
	defer log.Close()
	return create(ctx, log, id, "data")
}

func create(ctx context.Context, log *jetlog.Log, id, data string, formerly ...string) error {
	created, err := events.NewDecision(Stamp("init"), events.Aggregate{}, &events.StoreCreated{Store: id, Format: Format, Data: data, Formerly: formerly})
	if err != nil {
		return err
	}
	return log.Create(ctx, created)
}
