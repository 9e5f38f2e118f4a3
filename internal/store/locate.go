package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
)

// markName is the file that says whose data is in the data location of a
// server's store. Without it, a mount point with nothing mounted would take
// checkpoints that no other machine sees.
const markName = "location.json"

// place is where this machine finds the data of a store behind a URL.
type place struct {
	dir   string // with data/ and blobs/
	store string
	owned bool   // a process owns the directory and serves its log
	on    string // host of that process
}

// locate finds the data: where the log's first event says, or beside a log
// that is served from a store's directory, under the same path as there.
func locate(ctx context.Context, log *jetlog.Log, created events.StoreCreated) (place, error) {
	if filepath.IsAbs(created.Data) {
		return place{dir: created.Data, store: created.Store}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	served, err := log.Served(ctx)
	if err != nil {
		return place{}, fmt.Errorf("find the data of store %s: it lies beside its log, in %q of a directory, and no `ckptstore serve --listen` says of which: %w", created.Store, created.Data, err)
	}
	if served.Store != created.Store || !filepath.IsAbs(served.Directory) {
		return place{}, fmt.Errorf("%w: find the data of store %s: who serves it says that it is store %s in %q", ErrForeign, created.Store, served.Store, served.Directory)
	}
	return place{dir: served.Directory, store: created.Store, owned: true, on: served.Host}, nil
}

// probe checks that the directory is this store's, and by a file that it can
// be written and read here. A reader makes no file. It returns what the directory says
// whose it is.
func (p place) probe(reader bool) (id identity, err error) {
	if p.owned {
		id, err = readIdentity(p.dir)
	} else {
		id, err = readMark(p.dir)
	}
	if errors.Is(err, ErrNoStore) || errors.Is(err, os.ErrNotExist) {
		err = fmt.Errorf("%s: nothing there says that it is the data of store %s: %w", p.dir, p.store, os.ErrNotExist)
	}
	if err == nil && id.Store != p.store {
		err = fmt.Errorf("%w: %s holds the data of store %s, not of %s", ErrForeign, p.dir, id.Store, p.store)
	}
	if err == nil && !reader {
		err = tryOut(p.dir)
	}
	switch {
	case err == nil:
		return id, nil
	case p.owned:
		return id, fmt.Errorf("data location: %w: it is served by %s from there: share that directory (NFS and the like) and mount it on this machine under the same path", err, p.on)
	}
	return id, fmt.Errorf("data location: %w: the log says that this store's data is there: mount it on this machine", err)
}

// readMark reads whose data is in dir.
func readMark(dir string) (identity, error) {
	var id identity
	path := filepath.Join(dir, markName)
	text, err := readFile(path)
	if err != nil {
		return id, err
	}
	if err := json.Unmarshal(text, &id); err != nil || id.Product != product || id.Store == "" {
		return id, errors.Join(fmt.Errorf("%w: %s does not say whose data it is", ErrDamaged, path), err)
	}
	return id, nil
}

// tryOut writes a file in dir and reads it back.
func tryOut(dir string) error {
	f, err := os.CreateTemp(dir, ".probe-*")
	if err != nil {
		return fmt.Errorf("probe the data location: %w", err)
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
		return fmt.Errorf("probe the data location: %w", err)
	}
	return nil
}
