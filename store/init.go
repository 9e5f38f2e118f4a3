package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
)

// ErrExists says that there is a store already.
var ErrExists = errors.New("store exists")

// Init makes a new store and returns its identity. In a directory, store.json
// is renamed into place last: without it an init that was cut is redone. With
// a URL, data says where checkpoints go; it must be a directory that every
// node of every job sees under that path.
func Init(ctx context.Context, location, data string) (string, error) {
	if IsURL(location) {
		return initURL(ctx, location, data)
	}
	dir, err := filepath.Abs(location)
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
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
	if _, err := readIdentity(dir); !errors.Is(err, ErrNoStore) {
		return "", errors.Join(fmt.Errorf("init %s: %w", dir, ErrExists), err)
	}
	if err := onlyOurs(dir); err != nil {
		return "", err
	}
	if err := clearCutLog(ctx, dir); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	id := identity{Product: product, Store: NewID(), Format: Format, Created: time.Now().UTC()}
	if err := createLog(ctx, filepath.Join(dir, "log"), id.Store); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	for _, sub := range []string{"data", "blobs"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return "", fmt.Errorf("init: %w", err)
		}
	}
	text, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	if err := writeDurable(filepath.Join(dir, "store.json"), append(text, '\n')); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	return id.Store, syncDir(filepath.Dir(dir))
}

// onlyOurs refuses a directory with files that are not a store's, above all a
// log or data whose store.json is lost.
func onlyOurs(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("init: %w", err)
	}
	for _, e := range entries {
		switch e.Name() {
		case "LOCK", "log", "blobs":
		case "data":
			if left, err := os.ReadDir(filepath.Join(dir, "data")); err != nil || len(left) > 0 {
				return errors.Join(fmt.Errorf("init: %w: %s has checkpoints but no store.json: restore that file from a backup, or choose an empty directory", ErrDamaged, dir), err)
			}
		default:
			return fmt.Errorf("init: %s is not empty (it has %q): choose an empty or a new directory", dir, e.Name())
		}
	}
	return nil
}

// clearCutLog removes the log of an init that was cut: nobody was told that
// there is a store. A log with more than its first event is no such thing.
func clearCutLog(ctx context.Context, dir string) error {
	path := filepath.Join(dir, "log")
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	last, err := lastOf(ctx, path)
	if err != nil && !errors.Is(err, jetlog.ErrNoLog) {
		return fmt.Errorf("%w: %s has a log that cannot be read and no store.json: restore that file from a backup, or move the log away: %w", ErrDamaged, dir, err)
	}
	if last > 1 {
		return fmt.Errorf("%w: %s has a log of %d events but no store.json: restore that file from a backup, or move the log away", ErrDamaged, dir, last)
	}
	return os.RemoveAll(path)
}

func lastOf(ctx context.Context, dir string) (uint64, error) {
	server, err := jetlog.StartServer(ctx, jetlog.ServerOptions{Dir: dir})
	if err != nil {
		return 0, err
	}
	defer server.Shutdown()
	log, err := jetlog.Connect(ctx, jetlog.Options{Dial: dialServer(server)})
	if err != nil {
		return 0, err
	}
	defer log.Close()
	_, info, err := log.Open(ctx)
	return info.Last, err
}

func createLog(ctx context.Context, dir, id string) (err error) {
	server, err := jetlog.StartServer(ctx, jetlog.ServerOptions{Dir: dir})
	if err != nil {
		return err
	}
	defer server.Shutdown()
	log, err := jetlog.Connect(ctx, jetlog.Options{Dial: dialServer(server)})
	if err != nil {
		return err
	}
	defer log.Close()
	return create(ctx, log, id, "data")
}

func create(ctx context.Context, log *jetlog.Log, id, data string) error {
	created, err := events.NewDecision(Stamp("init"), events.Aggregate{}, &events.StoreCreated{Store: id, Format: Format, Data: data})
	if err != nil {
		return err
	}
	return log.Create(ctx, created)
}

// writeDurable writes a file under a temporary name, syncs it, renames it into
// place and syncs the directory.
func writeDurable(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func ownedByMe(info os.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Getuid()
}
