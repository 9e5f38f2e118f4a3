package store

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/storage"
)

// Space that must be free on the disk of a store, in bytes. Saves stop first,
// then facts, and last the store itself; so there is always room to say why.
const (
	keepForLog   = 32 << 20 // a save that would leave less is aborted
	keepForFacts = 16 << 20 // with less, facts are refused and decisions pass
	keepToOwn    = 8 << 20  // with less, nobody owns the store
)

// NoSpaceError says that the disk of a store is nearly full. It is
// [syscall.ENOSPC] to errors.Is.
type NoSpaceError struct {
	Dir  string
	Free uint64
	Need uint64
}

func (e *NoSpaceError) Error() string {
	return fmt.Sprintf("the disk of %s has %d bytes free and the log needs %d: free space, then run the command again; `ckptstore ls --offline` works meanwhile",
		e.Dir, e.Free, e.Need)
}

// Is makes errors.Is(err, syscall.ENOSPC) true.
func (e *NoSpaceError) Is(target error) bool { return target == syscall.ENOSPC }

// gauge tells whether a disk has room, looking at most ten times a second.
type gauge struct {
	dir  string
	free func() (uint64, error)

	mu   sync.Mutex
	at   time.Time
	last uint64
}

func newGauge(dir string, data *storage.Root) *gauge { return &gauge{dir: dir, free: data.Free} }

// check wants need bytes to be free.
func (g *gauge) check(need uint64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if time.Since(g.at) > 100*time.Millisecond {
		free, err := g.free()
		if errors.Is(err, vfs.ErrUnsupported) {
			return nil // the filesystem does not tell: a full one fails the write
		}
		if err != nil {
			return err
		}
		g.at, g.last = time.Now(), free
	}
	if g.last < need {
		return &NoSpaceError{Dir: g.dir, Free: g.last, Need: need}
	}
	return nil
}

// admit is the gate for facts.
func (g *gauge) admit() error { return g.check(keepForFacts) }
