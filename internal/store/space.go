package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/durable"
)

// Space that must be free on the disk of a store, in bytes and as a share of the disk. Saves stop
// first, then facts, and last the store itself. So there is always room to record why:
//
//	free  ──────────────────────────────────────────────────────────▶ none
//	      │ a save would leave     │ 10 %, but  │ 8 MiB     │
//	      │ 16 MiB more than       │ 16 MiB to  │           │
//	      │ that                   │ 4 GiB      │           │
//	      ▼                        ▼            ▼           ▼
//	      it is aborted        facts are    the ballast   the store
//	      before it writes     refused      is released   is not owned
//
// A tenth of a large disk is more than a log needs: 4 GiB are millions of events.
const (
	keepPercent  = 10       // of the disk: with less, facts are refused and decisions pass
	keepForFacts = 16 << 20 // minimum for facts
	keepAtMost   = 4 << 30
	keepForEnds  = 16 << 20 // in addition, for the facts that end a save
	keepToOwn    = 8 << 20  // with less, and no ballast, no process owns the store
)

// keepOfFacts returns the bytes that must be free for facts to be accepted.
func keepOfFacts(u data.Usage) uint64 {
	return min(max(keepForFacts, u.Share(keepPercent)+1), keepAtMost)
}

// keepOfSaves returns the bytes that saves leave free.
func keepOfSaves(u data.Usage) int64 {
	return int64(keepOfFacts(u) + keepForEnds) //nolint:gosec // bytes of a disk
}

// NoSpaceError reports that the disk of a store is nearly full. It is [syscall.ENOSPC] to
// errors.Is.
type NoSpaceError struct {
	Dir  string
	Free uint64
	Size uint64 // of the disk
	Need uint64
}

func (e *NoSpaceError) Error() string {
	full := ""
	if e.Size > 0 {
		full = fmt.Sprintf(", which is %d %% full,", 100-e.Free*100/e.Size)
	}
	return fmt.Sprintf("the disk of %s%s has %d bytes free and the log needs %d: free space, then run the command again; `ckptstore ls --offline` works meanwhile",
		e.Dir, full, e.Free, e.Need)
}

// Is makes errors.Is(err, syscall.ENOSPC) true.
func (e *NoSpaceError) Is(target error) bool { return target == syscall.ENOSPC }

// gauge reports whether a disk has room. It checks at most ten times a second.
type gauge struct {
	dir  string
	free func() (data.Usage, error)

	mu   sync.Mutex
	at   time.Time
	last data.Usage

	releasing sync.Mutex // held while the ballast is removed
}

// lookTimeout bounds one check of a disk that does not answer.
const lookTimeout = 10 * time.Second

func newGauge(dir string, root interface {
	Usage(context.Context) (data.Usage, error)
},
) *gauge {
	return &gauge{dir: dir, free: func() (data.Usage, error) {
		ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
		defer cancel()
		return root.Usage(ctx)
	}}
}

// look returns the room on the disk. A filesystem that does not report its size counts as roomy: if
// it is full, the write fails.
func (g *gauge) look() (data.Usage, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if time.Since(g.at) > 100*time.Millisecond {
		u, err := g.free()
		if errors.Is(err, errors.ErrUnsupported) {
			return data.Usage{Free: math.MaxUint64}, nil
		}
		if err != nil {
			return u, err
		}
		g.at, g.last = time.Now(), u
	}
	return g.last, nil
}

// forget makes the next look read the disk again.
func (g *gauge) forget() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.at = time.Time{}
}

// check returns an error unless need bytes are free.
func (g *gauge) check(need uint64) error {
	u, err := g.look()
	if err == nil && u.Free < need {
		err = &NoSpaceError{Dir: g.dir, Free: u.Free, Size: u.Size, Need: need}
	}
	return err
}

// checkFor returns an error unless there is room for bytes that can wait, in addition to the
// room for facts.
func (g *gauge) checkFor(bytes int64) error {
	u, err := g.look()
	if err != nil {
		return err
	}
	return g.check(keepOfFacts(u) + uint64(max(0, bytes)))
}

// admit returns an error unless there is room for facts.
func (g *gauge) admit() error {
	u, err := g.look()
	if err != nil {
		return err
	}
	return g.check(keepOfFacts(u))
}

// ballastName is a file of ballastSize bytes without content. When the disk is full in spite of the
// limits, the ballast is removed to make room for the necessary records: commits, aborts, the ends
// of trials, leases.
const (
	ballastName = "ballast"
	ballastSize = 16 << 20
	// ballastEvery is how often an owner checks the disk.
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

// release removes the ballast if there is less room than the log needs. Every process of a store
// may call it before it decides.
func (b ballast) release() {
	if b.space.check(keepToOwn) == nil {
		return
	}
	// The name disappears before the blocks are freed: wait for another remover.
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
		b.log.Error("disk full: ballast not removed", "path", b.path, "error", err)
		return
	}
	b.space.forget()
	b.log.Error("disk full: ballast removed to make room for decisions; free space", "path", b.path, "bytes", ballastSize)
}

// load makes the ballast if it does not exist and there is more room than it takes.
func (b ballast) load() error {
	u, err := b.space.look()
	if err != nil || exists(b.path) || u.Free < uint64(keepOfSaves(u))+ballastSize { //nolint:gosec // bytes of a disk
		return err
	}
	// A fixed name, so that unfinished ones do not pile up after kills.
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
		return nil // a filesystem that cannot reserve room
	}
	return err
}

// keep checks the disk until ctx ends.
func (b ballast) keep(ctx context.Context) {
	said := false
	for {
		b.release()
		if err := b.load(); err != nil && !said {
			said = true
			b.log.Warn("ballast not made: on a full disk decisions may have no room", "error", err)
		}
		if !sleep(ctx, ballastEvery) {
			return
		}
	}
}
