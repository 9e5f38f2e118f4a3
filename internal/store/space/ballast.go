package space

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

// BallastName is a file of BallastSize bytes without content. When the disk is full in spite of the
// limits, the ballast is removed to make room for the necessary records: commits, aborts, the ends
// of trials, leases.
const (
	BallastName = "ballast"
	BallastSize = 16 << 20
	// ballastEvery is how often an owner checks the disk.
	ballastEvery = time.Second
)

// Ballast is the ballast of one store.
type Ballast struct {
	path  string
	space *Gauge
	log   *slog.Logger
}

// NewBallast returns the ballast in the directory of a store.
func NewBallast(dir string, space *Gauge, log *slog.Logger) Ballast {
	return Ballast{path: filepath.Join(dir, BallastName), space: space, log: log}
}

// Release removes the ballast if there is less room than the log needs. Every process of a store
// may call it before it decides.
func (b Ballast) Release() {
	if b.space.Check(ToOwn) == nil {
		return
	}
	// The name disappears before the blocks are freed: wait for another remover.
	b.space.releasing.Lock()
	defer b.space.releasing.Unlock()
	if !b.there() {
		return
	}
	b.space.Forget()
	if b.space.Check(ToOwn) == nil {
		return
	}
	if err := removed(b.path); err != nil {
		b.log.Error("disk full: ballast not removed", "path", b.path, "error", err)
		return
	}
	b.space.Forget()
	b.log.Error("disk full: ballast removed to make room for decisions; free space", "path", b.path, "bytes", BallastSize)
}

// load makes the ballast if it does not exist and there is more room than it takes.
func (b Ballast) load() error {
	u, err := b.space.Look()
	if err != nil || b.there() || u.Free < uint64(OfSaves(u))+BallastSize { //nolint:gosec // bytes of a disk
		return err
	}
	// A fixed name, so that unfinished ones do not pile up after kills.
	dir := filepath.Dir(b.path)
	temp := filepath.Join(dir, durable.TempPrefix+BallastName)
	if err := removed(temp); err != nil {
		return err
	}
	f, err := beneath.At(dir).OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, BallastSize)
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
		return nil // a filesystem that cannot reserve room
	}
	return err
}

// Keep checks the disk until ctx ends.
func (b Ballast) Keep(ctx context.Context) {
	said := false
	for {
		b.Release()
		if err := b.load(); err != nil && !said {
			said = true
			b.log.Warn("ballast not made: on a full disk decisions may have no room", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(ballastEvery):
		}
	}
}

func (b Ballast) there() bool {
	_, err := os.Lstat(b.path)
	return err == nil
}

// removed removes a file that may be missing.
func removed(path string) error {
	if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
