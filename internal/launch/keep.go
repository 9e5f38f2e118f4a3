package launch

import (
	"context"
	"log/slog"
	"time"
)

// keepTimeout bounds one collection, over all its decisions and files.
const keepTimeout = 10 * time.Minute

// keeper collects after commits, beside the training: a commit is noted and
// never waits. Commits during a collection are seen to by one more.
type keeper struct {
	collect func(context.Context) error
	log     *slog.Logger
	cancel  context.CancelFunc
	due     chan struct{} // capacity one
	last    chan struct{} // closed when no commit comes any more
	done    chan struct{}
}

// newKeeper returns nil when nothing is to be collected.
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
	default: // it is noted already
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

// once collects. A failure costs disk space: the next commit tries again, and
// what was cut is finished when the store is next opened.
func (k *keeper) once(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, keepTimeout)
	defer cancel()
	if err := k.collect(ctx); err != nil {
		k.log.Warn("old checkpoints could not all be deleted; the next commit tries again", "error", err)
	}
}

// stop lets the collection of the last commit end within a time. When ctx has
// ended it is cut.
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
