package launch

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session"
)

// keepTimeout bounds one collection, over all its decisions and files.
const keepTimeout = 10 * time.Minute

// publishTime is how long a job that ends waits until its last commit is published.
const publishTime = 10 * time.Second

// keeper collects, or does something else, after commits, in parallel with the training:
// committed never waits. Commits during a collection start one more.
type keeper struct {
	collect func(context.Context) error
	failure string // is logged if collect fails
	log     *slog.Logger
	cancel  context.CancelFunc
	due     chan struct{} // capacity one
	last    chan struct{} // closed after the last commit
	done    chan struct{}
}

// newKeeper returns nil if nothing needs collection.
func newKeeper(collect func(context.Context) error, failure string, log *slog.Logger) *keeper {
	if collect == nil {
		return nil
	}
	return &keeper{
		collect: collect, failure: failure, log: log,
		due: make(chan struct{}, 1), last: make(chan struct{}), done: make(chan struct{}),
	}
}

// start begins to collect; the caller stops it.
func (k *keeper) start() {
	if k == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	k.cancel = cancel
	go k.run(ctx)
}

// committed notes a commit.
func (k *keeper) committed() {
	if k == nil {
		return
	}
	select {
	case k.due <- struct{}{}:
	default: // already noted
	}
}

func (k *keeper) run(ctx context.Context) {
	defer close(k.done)
	for {
		select {
		case <-k.due:
			k.once(ctx)
		case <-k.last:
			select {
			case <-k.due:
				k.once(ctx)
			default:
			}
			return
		}
	}
}

// once runs one collection. A failure costs disk space: the next commit tries
// again, and the owner finishes interrupted deletions when it next opens the
// store.
func (k *keeper) once(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, keepTimeout)
	defer cancel()
	if err := k.collect(ctx); err != nil {
		k.log.Warn(k.failure+"; the next commit tries again", "error", err)
	}
}

// stop waits a limited time for the collection of the last commit. It cuts the
// collection short if ctx has ended.
func (k *keeper) stop(ctx context.Context, within time.Duration) {
	if k == nil {
		return
	}
	close(k.last)
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-k.done:
	case <-timer.C:
	case <-ctx.Done():
	}
	k.cancel()
	<-k.done
}

// nearlyFull is the disk usage, in percent, at which a job warns.
const nearlyFull = 80

// DiskUse logs how the saves of a job use the disk of its store: at the first
// commit, how many more checkpoints fit, and later once that the disk is nearly
// full. Jobs may share it.
type DiskUse struct {
	advice  string // how to bound what is kept
	usage   func(context.Context) (data.Usage, error)
	bounded bool // by a policy: then the first log is omitted
	log     *slog.Logger

	mu           sync.Mutex
	asking       bool
	told, warned bool
}

// keepAdvice is what a job of one trial can do.
const keepAdvice = "--keep, such as --keep last=3, or with `ckptstore gc`"

// NewDiskUse returns the log of the disk of a store's data, for jobs that have no policy. advice
// completes "bound them with".
func NewDiskUse(store session.Store, log *slog.Logger, advice string) *DiskUse {
	return &DiskUse{usage: store.Data.Usage, advice: advice, log: log}
}

// committed takes the size of a checkpoint, in bytes. It returns at once, even if
// the disk hangs. A nil DiskUse logs nothing: the clients of an agent log it
// themselves.
func (d *DiskUse) committed(bytes int64) {
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

func (d *DiskUse) say(bytes int64, u data.Usage) {
	if !d.told && !d.bounded && bytes > 0 {
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
