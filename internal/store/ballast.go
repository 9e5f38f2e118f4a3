package store

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
)

// ballastName is a file of ballastSize bytes that holds nothing. When the disk
// is full all the same, whoever did it, it is removed, and what must still be
// said has room: commits, aborts, the ends of trials, leases.
const (
	ballastName = "ballast"
	ballastSize = 16 << 20
	// ballastEvery is how often an owner looks at the disk.
	ballastEvery = time.Second
)

type ballast struct {
	path  string
	space *gauge
	log   *slog.Logger
}

func (s *Store) ballast() ballast {
	return ballast{path: filepath.Join(s.Location, ballastName), space: s.space, log: s.opts.Logger}
}

// release gives the ballast up if there is less room than the log needs. Every
// process of a store may, before it decides.
func (b ballast) release() {
	if b.space.check(keepToOwn) == nil {
		return
	}
	// Its name is gone before its blocks are: another that removes it is waited for.
	b.space.releasing.Lock()
	defer b.space.releasing.Unlock()
	if !exists(b.path) {
		return
	}
	b.space.forget()
	if b.space.check(keepToOwn) == nil {
		return
	}
	if err := removed(b.path); err != nil {
		b.log.Error("the disk is full and its ballast cannot be removed", "path", b.path, "error", err)
		return
	}
	b.space.forget()
	b.log.Error("the disk is full: its ballast was removed so that decisions have room; free space", "path", b.path, "bytes", ballastSize)
}

// load makes the ballast if there is none and room for more than it.
func (b ballast) load() error {
	u, err := b.space.look()
	if err != nil || exists(b.path) || u.Free < uint64(keepOfSaves(u))+ballastSize { //nolint:gosec // bytes of a disk
		return err
	}
	// One name, so that those that a kill has cut do not pile up.
	dir := filepath.Dir(b.path)
	temp := filepath.Join(dir, durable.TempPrefix+ballastName)
	if err := removed(temp); err != nil {
		return err
	}
	f, err := beneath.At(dir).OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, ballastSize)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), b.path)
	}
	if err != nil {
		err = errors.Join(err, removed(f.Name()))
	}
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil // a filesystem that promises no room to anyone
	}
	return err
}

// keep looks at the disk until ctx ends.
func (b ballast) keep(ctx context.Context) {
	said := false
	for {
		b.release()
		if err := b.load(); err != nil && !said {
			said = true
			b.log.Warn("no ballast could be made: on a full disk decisions may have no room", "error", err)
		}
		if !sleep(ctx, ballastEvery) {
			return
		}
	}
}
