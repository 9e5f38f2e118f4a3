package aftercommit

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/data"
)

// nearlyFull is the disk usage, in percent, at which a job warns.
const nearlyFull = 80

// DiskUse logs how the saves of a job use the disk of its store: at the first
// commit, how many more checkpoints fit, and later once that the disk is nearly
// full. Jobs may share it.
type DiskUse struct {
	advice string // how to bound what is kept
	usage  func(context.Context) (data.Usage, error)
	log    *slog.Logger

	// Bounded is set where a policy bounds what is kept: then the first log is omitted.
	Bounded bool

	mu           sync.Mutex
	asking       bool
	told, warned bool
}

// NewDiskUse returns the log of a disk, of which usage returns the size and the free room. advice
// completes "bound them with".
func NewDiskUse(usage func(context.Context) (data.Usage, error), log *slog.Logger, advice string) *DiskUse {
	return &DiskUse{usage: usage, advice: advice, log: log}
}

// usageTimeout bounds the wait for a disk that does not answer.
const usageTimeout = 2 * time.Minute

// Committed takes the size of a checkpoint, in bytes. It returns at once, even if
// the disk hangs. A nil DiskUse logs nothing: the clients of an agent log it
// themselves.
func (d *DiskUse) Committed(bytes int64) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.asking || d.told && d.warned {
		return
	}
	d.asking = true
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), usageTimeout)
		defer cancel()
		u, err := d.usage(ctx)
		d.mu.Lock()
		defer d.mu.Unlock()
		d.asking = false
		if err == nil { // errors are ignored: a save without room fails with its own error
			d.say(bytes, u)
		}
	}()
}

func (d *DiskUse) say(bytes int64, u data.Usage) {
	if !d.told && !d.Bounded && bytes > 0 {
		d.log.Info("checkpoints are kept until removed", "bytes", bytes, "more_that_fit", u.Free/uint64(bytes), //nolint:gosec // a size
			"next", "bound them with "+d.advice)
	}
	d.told = true
	if full := percentFull(u); full >= nearlyFull && !d.warned {
		d.warned = true
		d.log.Warn(fmt.Sprintf("the disk of the store is %d %% full", full), "free", u.Free,
			"next", "bound what is kept with "+d.advice+"; saves wait while the disk is full")
	}
}

// percentFull is 0 if the size of the disk is unknown.
func percentFull(u data.Usage) uint64 {
	if u.Size == 0 || u.Free > u.Size {
		return 0
	}
	return 100 - u.Free*100/u.Size
}
