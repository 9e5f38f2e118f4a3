// Package aftercommit does what follows the commits of a job, without delaying a save:
//
//	work.go     collects old checkpoints, or publishes the new one
//	diskuse.go  logs how many more checkpoints fit on the disk
package aftercommit

import (
	"context"
	"log/slog"
	"time"
)

// onceTimeout bounds the work after one commit, such as all decisions and files of a collection.
const onceTimeout = 10 * time.Minute

// Work runs after commits, in parallel with the training: Committed never waits. Commits while
// it runs start it one more time. A nil Work does nothing.
type Work struct {
	do      func(context.Context) error
	failure string // is logged if do fails
	log     *slog.Logger
	cancel  context.CancelFunc
	due     chan struct{} // capacity one
	last    chan struct{} // closed after the last commit
	done    chan struct{}
}

// New returns the work of do, or nil if do is nil. failure is logged if do fails.
func New(do func(context.Context) error, failure string, log *slog.Logger) *Work {
	if do == nil {
		return nil
	}
	return &Work{
		do: do, failure: failure, log: log,
		due: make(chan struct{}, 1), last: make(chan struct{}), done: make(chan struct{}),
	}
}

// Start waits for commits; the caller calls Stop.
func (k *Work) Start() {
	if k == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	k.cancel = cancel
	go k.run(ctx)
}

// Committed notes a commit.
func (k *Work) Committed() {
	if k == nil {
		return
	}
	select {
	case k.due <- struct{}{}:
	default: // already noted
	}
}

func (k *Work) run(ctx context.Context) {
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

// once does the work once. The next commit repeats what failed. A failed collection costs disk
// space: the owner finishes interrupted deletions when it next opens the store.
func (k *Work) once(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, onceTimeout)
	defer cancel()
	if err := k.do(ctx); err != nil {
		k.log.Warn(k.failure+"; the next commit tries again", "error", err)
	}
}

// Stop waits a limited time for the work after the last commit. It cuts the work short if ctx
// has ended.
func (k *Work) Stop(ctx context.Context, within time.Duration) {
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
