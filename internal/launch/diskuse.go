package launch

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/ckptstore/ckptstore/internal/data"
)

// nearlyFull is how much of the disk is in use when a job warns of it, in percent.
const nearlyFull = 80

// diskUse says what the saves of a job do to the disk of its store: once, at the first
// commit, how many more it has room for, and once that it is nearly full.
type diskUse struct {
	usage   func(context.Context) (data.Usage, error)
	bounded bool // by a policy, so that the first is not worth saying
	log     *slog.Logger

	mu           sync.Mutex
	asking       bool
	told, warned bool
}

// committed takes the size of a checkpoint, in bytes. It returns at once, whatever the
// disk does. A nil diskUse says nothing: the clients of an agent say it themselves.
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
		if err == nil { // nobody knows otherwise, and a save that has no room says so
			d.say(bytes, u)
		}
	}()
}

func (d *diskUse) say(bytes int64, u data.Usage) {
	if !d.told && !d.bounded && bytes > 0 {
		d.log.Info("checkpoints are kept until they are removed", "bytes", bytes, "more_that_fit", u.Free/uint64(bytes), //nolint:gosec // a size
			"next", "bound them with --keep, such as --keep last=3, or with `ckptstore gc`")
	}
	d.told = true
	if full := percentFull(u); full >= nearlyFull && !d.warned {
		d.warned = true
		d.log.Warn(fmt.Sprintf("the disk of the store is %d %% full", full), "free", u.Free,
			"next", "bound what is kept with --keep, such as --keep last=3, or with `ckptstore gc`; a full disk keeps saves waiting")
	}
}

// percentFull is 0 where the size of the disk is not known.
func percentFull(u data.Usage) uint64 {
	if u.Size == 0 || u.Free > u.Size {
		return 0
	}
	return 100 - u.Free*100/u.Size
}
