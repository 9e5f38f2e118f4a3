package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// openURL connects to a NATS server. The views are folded in memory.
func openURL(ctx context.Context, o Options) (_ *Store, err error) {
	log, err := jetlog.Connect(ctx, jetlog.Options{URL: o.Location, Logger: o.Logger})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoStore, err)
	}
	defer func() {
		if err != nil {
			err = damage(err)
			log.Close()
		}
	}()
	created, _, err := log.Open(ctx)
	if errors.Is(err, jetlog.ErrNoLog) {
		return nil, fmt.Errorf("%w at %s: make one with `ckptstore init --store URL --data DIR`: %w", ErrNoStore, jetlog.Redacted(o.Location), err)
	}
	if err != nil {
		return nil, err
	}
	if err := checkLog(ctx, log, created.Store); err != nil {
		return nil, err
	}
	s := &Store{ID: created.Store, Location: jetlog.Redacted(o.Location), Log: log, opts: o, formerly: created.Formerly}
	if s.Runtime, err = runtimeDir(created.Store); err != nil {
		return nil, err
	}
	if err := sweepJobs(s.Runtime); err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	if err := probe(created.Data); err != nil {
		return nil, err
	}
	if err := s.openData(filepath.Join(created.Data, "data"), filepath.Join(created.Data, "blobs")); err != nil {
		return nil, err
	}
	receipts, err := recorded(ctx, s, log)
	if err != nil {
		return nil, err
	}
	db, err := viewdb.Open("views", viewdb.Options{FS: vfs.NewMem(), Store: s.ID, Logger: o.Logger})
	if err != nil {
		return nil, err
	}
	if s.local, err = follow(ctx, db, log, s); err != nil {
		return nil, err
	}
	// Nobody owns the data of a server's store: whoever opens it repairs it.
	if err = repair(ctx, s, log, s.local, receipts); err != nil {
		return nil, errors.Join(err, s.local.close())
	}
	return s, nil
}

// initURL makes the log on a server and the data directory beside it.
func initURL(ctx context.Context, url, data string) (string, error) {
	if data == "" || !filepath.IsAbs(data) {
		return "", fmt.Errorf("init %s: %w: --data must be the absolute path of a directory that every node sees, got %q", jetlog.Redacted(url), ErrLocation, data)
	}
	log, err := jetlog.Connect(ctx, jetlog.Options{URL: url})
	if err != nil {
		return "", fmt.Errorf("init: %w: %w", ErrNoStore, err)
	}
	defer log.Close()
	if created, _, err := log.Open(ctx); err == nil {
		return "", fmt.Errorf("init %s: %w: it is %s, with its data in %s", jetlog.Redacted(url), ErrExists, created.Store, created.Data)
	}
	for _, sub := range []string{"data", "blobs"} {
		if err := os.MkdirAll(filepath.Join(data, sub), 0o700); err != nil {
			return "", fmt.Errorf("init: %w", err)
		}
	}
	if err := probe(data); err != nil {
		return "", err
	}
	id := NewID()
	return id, create(ctx, log, id, data)
}

// probe checks by a file that the data location can be written and read here.
func probe(dir string) error {
	hint := "the log says that this store's data is there; mount it on this machine"
	f, err := os.CreateTemp(dir, ".probe-*")
	if err != nil {
		return fmt.Errorf("probe the data location: %w: %s", err, hint)
	}
	name := f.Name()
	_, err = f.WriteString("probe")
	err = errors.Join(err, f.Close())
	if err == nil {
		var back []byte
		if back, err = os.ReadFile(name); err == nil && string(back) != "probe" {
			err = fmt.Errorf("%s reads back %q", name, back)
		}
	}
	if err = errors.Join(err, os.Remove(name)); err != nil {
		return fmt.Errorf("probe the data location: %w: %s", err, hint)
	}
	return nil
}
