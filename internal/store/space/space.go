// Package space keeps room on the disk of a store for what must be recorded there.
//
// When the disk fills, saves stop first, then facts, and last the store itself. So there is always
// room to record why:
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
package space

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

// Bytes that must be free on the disk: see the package comment.
const (
	ForFacts = 16 << 20 // minimum for facts
	ForEnds  = 16 << 20 // in addition, for the facts that end a save
	ToOwn    = 8 << 20  // with less, and no ballast, no process owns the store

	percent = 10 // of the disk: with less, facts are refused and decisions pass
	atMost  = 4 << 30
)

// ofFacts returns the bytes that must be free for facts to be accepted.
func ofFacts(u data.Usage) uint64 {
	return min(max(ForFacts, u.Share(percent)+1), atMost)
}

// OfSaves returns the bytes that saves leave free.
func OfSaves(u data.Usage) int64 {
	return int64(ofFacts(u) + ForEnds) //nolint:gosec // bytes of a disk
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

// Gauge reports whether a disk has room. It checks at most ten times a second.
type Gauge struct {
	Dir   string                     // for messages
	Usage func() (data.Usage, error) // of the disk

	mu   sync.Mutex
	at   time.Time
	last data.Usage

	releasing sync.Mutex // held while the ballast is removed
}

// lookTimeout bounds one check of a disk that does not answer.
const lookTimeout = 10 * time.Second

// New returns the gauge of the disk that has a directory.
func New(dir string, root interface {
	Usage(context.Context) (data.Usage, error)
},
) *Gauge {
	return &Gauge{Dir: dir, Usage: func() (data.Usage, error) {
		ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
		defer cancel()
		return root.Usage(ctx)
	}}
}

// Look returns the room on the disk. A filesystem that does not report its size counts as roomy: if
// it is full, the write fails.
func (g *Gauge) Look() (data.Usage, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if time.Since(g.at) > 100*time.Millisecond {
		u, err := g.Usage()
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

// Forget makes the next look read the disk again.
func (g *Gauge) Forget() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.at = time.Time{}
}

// Check returns an error unless need bytes are free.
func (g *Gauge) Check(need uint64) error {
	u, err := g.Look()
	if err == nil && u.Free < need {
		err = &NoSpaceError{Dir: g.Dir, Free: u.Free, Size: u.Size, Need: need}
	}
	return err
}

// CheckFor returns an error unless there is room for bytes that can wait, in addition to the
// room for facts.
func (g *Gauge) CheckFor(bytes int64) error {
	u, err := g.Look()
	if err != nil {
		return err
	}
	return g.Check(ofFacts(u) + uint64(max(0, bytes)))
}

// Admit returns an error unless there is room for facts.
func (g *Gauge) Admit() error {
	u, err := g.Look()
	if err != nil {
		return err
	}
	return g.Check(ofFacts(u))
}
