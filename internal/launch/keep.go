package launch

import (
	"context"
	"log/slog"
	"time"
)

// keepTimeout bounds one collection, over all its decisions and files.
const keepTimeout = 10 * time.Minute

// keeper collects after commits, in parallel with the training: committed never
// waits. Commits during a collection start one more.
type keeper struct {
	collect func(context.Context) error
	log     *slog.Logger
	cancel  context.CancelFunc
	due     chan struct{} // capacity one
	last    chan struct{} // closed after the last commit
	done    chan struct{}
}

// newKeeper returns nil if nothing needs collection.
func newKeeper(collect func(context.Context) error, log *slog.Logger) *keeper {
	if collect == nil {
		return nil
	}
	return &keeper{
		collect: collect, log: log,
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
		k.log.Warn("some old checkpoints not deleted; the next commit tries again", "error", err)
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
