package launch

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/ckptstore/ckptstore/internal/data"
)

// nearlyFull is the disk usage, in percent, at which a job warns.
const nearlyFull = 80

// diskUse logs how the saves of a job use the disk of its store: at the first
// commit, how many more checkpoints fit, and later once that the disk is nearly
// full.
type diskUse struct {
	usage   func(context.Context) (data.Usage, error)
	bounded bool // by a policy: then the first log is omitted
	log     *slog.Logger

	mu           sync.Mutex
	asking       bool
	told, warned bool
}

// committed takes the size of a checkpoint, in bytes. It returns at once, even if
// the disk hangs. A nil diskUse logs nothing: the clients of an agent log it
// themselves.
func (d *diskUse) committed(bytes int64) {
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
		ctx, cancel := context.WithTimeout(context.Background(), examineLimit)
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

func (d *diskUse) say(bytes int64, u data.Usage) {
	if !d.told && !d.bounded && bytes > 0 {
		d.log.Info("checkpoints are kept until removed", "bytes", bytes, "more_that_fit", u.Free/uint64(bytes), //nolint:gosec // a size
			"next", "bound them with --keep, such as --keep last=3, or with `ckptstore gc`")
	}
	d.told = true
	if full := percentFull(u); full >= nearlyFull && !d.warned {
		d.warned = true
		d.log.Warn(fmt.Sprintf("the disk of the store is %d %% full", full), "free", u.Free,
			"next", "bound what is kept with --keep, such as --keep last=3, or with `ckptstore gc`; saves wait while the disk is full")
	}
}

// percentFull is 0 if the size of the disk is unknown.
func percentFull(u data.Usage) uint64 {
	if u.Size == 0 || u.Free > u.Size {
		return 0
	}
	return 100 - u.Free*100/u.Size
}
