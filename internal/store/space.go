package store

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/data"
)

// Space that must be free on the disk of a store, in bytes and as a share of the
// disk. Saves stop first, then facts, and last the store itself; so there is
// always room to say why:
//
//	free  ──────────────────────────────────────────────────────────▶ none
//	      │ a save would leave     │ 10 %, but  │ 8 MiB     │
//	      │ 16 MiB more than       │ 16 MiB to  │           │
//	      │ that                   │ 4 GiB      │           │
//	      ▼                        ▼            ▼           ▼
//	      it is aborted        facts are    the ballast   nobody owns
//	      before it writes     refused      is released   the store
//
// A tenth of a large disk is more than a log needs: 4 GiB are millions of events.
const (
	keepPercent  = 10       // of the disk: with less, facts are refused and decisions pass
	keepForFacts = 16 << 20 // at least
	keepAtMost   = 4 << 30
	keepForEnds  = 16 << 20 // beyond this, for the facts that end a save
	keepToOwn    = 8 << 20  // with less, and no ballast, nobody owns the store
)

// keepOfFacts is what must be free for facts to be taken.
func keepOfFacts(u data.Usage) uint64 {
	return min(max(keepForFacts, u.Share(keepPercent)+1), keepAtMost)
}

// keepOfSaves is what saves leave free.
func keepOfSaves(u data.Usage) int64 {
	return int64(keepOfFacts(u) + keepForEnds) //nolint:gosec // bytes of a disk
}

// NoSpaceError says that the disk of a store is nearly full. It is
// [syscall.ENOSPC] to errors.Is.
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

// gauge tells whether a disk has room, looking at most ten times a second.
type gauge struct {
	dir  string
	free func() (data.Usage, error)

	mu   sync.Mutex
	at   time.Time
	last data.Usage

	releasing sync.Mutex // held while the ballast is removed
}

// lookTimeout bounds one look at a disk that does not answer.
const lookTimeout = 10 * time.Second

func newGauge(dir string, root *data.Root) *gauge {
	return &gauge{dir: dir, free: func() (data.Usage, error) {
		ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
		defer cancel()
		return root.Usage(ctx)
	}}
}

// look is the room on the disk. A filesystem that does not tell has plenty: a
// full one fails the write.
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

// forget makes the next look a new one.
func (g *gauge) forget() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.at = time.Time{}
}

// check wants need bytes to be free.
func (g *gauge) check(need uint64) error {
	u, err := g.look()
	if err == nil && u.Free < need {
		err = &NoSpaceError{Dir: g.dir, Free: u.Free, Size: u.Size, Need: need}
	}
	return err
}

// checkFor wants room for bytes that can wait, beside what facts need.
func (g *gauge) checkFor(bytes int64) error {
	u, err := g.look()
	if err != nil {
		return err
	}
	return g.check(keepOfFacts(u) + uint64(max(0, bytes)))
}

// admit is the gate for facts.
func (g *gauge) admit() error {
	u, err := g.look()
	if err != nil {
		return err
	}
	return g.check(keepOfFacts(u))
}
