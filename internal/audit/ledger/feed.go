package ledger

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// feed holds the messages that a reader of the log has passed on and the keeper has not
// folded yet. It is bounded and its reader never waits: a message for which there is no
// room is dropped, and the keeper reads it from the log later.
type feed struct {
	mu    sync.Mutex
	open  bool // the keeper follows
	list  []fed
	bytes int
	grown chan struct{} // has a value when list has grown
}

// fed is a message of the log.
type fed struct {
	events.Message
	sequence uint64
	stored   time.Time
}

const (
	fedMost  = 1 << 14  // messages that wait
	fedBytes = 16 << 20 // and the bytes of their bodies
	// gatherFor is how long messages gather before they are folded. Woken for each
	// message, the keeper cost as much for the wake-ups as for the hashes.
	gatherFor = 2 * time.Millisecond
)

// Feed passes on a message that another reader of the log has, so that the keeper needs no
// reader of its own: one more makes the server read, send and the client parse each message
// twice. It does not wait, and keeps the message, which must not change. The reader should
// pass on all messages in order; the keeper reads others from the log.
func (k *Keeper) Feed(m events.Message, sequence uint64, stored time.Time) {
	f := &k.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.open || len(f.list) >= fedMost || f.bytes+len(m.Data) > fedBytes {
		return
	}
	f.list, f.bytes = append(f.list, fed{m, sequence, stored}), f.bytes+len(m.Data)
	select {
	case f.grown <- struct{}{}:
	default:
	}
}

// turn begins or ends the feed, and empties it.
func (f *feed) turn(open bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open, f.list, f.bytes = open, nil, 0
}

// take empties the feed, whose next messages are kept in the memory of used.
func (f *feed) take(used []fed) []fed {
	clear(used)
	f.mu.Lock()
	defer f.mu.Unlock()
	list := f.list
	f.list, f.bytes = used[:0], 0
	return list
}

// lateAfter is how long the keeper waits for an event of the log to be fed.
const lateAfter = time.Second

// followFed is follow with the messages of the feed. It reads those from the log that were
// dropped, and those that do not come in time, such as when their reader has stopped.
func (k *Keeper) followFed(ctx context.Context) error {
	k.feed.turn(true)
	defer k.feed.turn(false)
	tick := time.NewTicker(lateAfter)
	defer tick.Stop()
	var reads repeated
	var list []fed
	due := uint64(0) // the end of the log at the last tick
	late := true     // the log has events that were not fed in time
	for {
		list = k.feed.take(list)
		err := k.foldFed(ctx, list, late)
		switch {
		case errors.Is(err, ErrDamaged):
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		case reads.changed(err) && err != nil:
			k.o.Logger.Warn("audit: log not followed; retrying", "error", err)
		}
		if late = err != nil; late {
			if !pause(ctx, headEvery) {
				return ctx.Err()
			}
			continue
		}
		if !pause(ctx, gatherFor) {
			return ctx.Err()
		}
		select {
		case <-k.feed.grown:
		case <-tick.C:
			last, err := k.log.Last(ctx)
			late, due = err != nil || uint64(k.size()) < due, last //nolint:gosec // not negative
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// foldFed folds messages of the feed, each after those before it, and if the feed is late,
// all others that the log has.
func (k *Keeper) foldFed(ctx context.Context, list []fed, late bool) error {
	for _, m := range list {
		if m.sequence <= uint64(k.size()) { //nolint:gosec // not negative
			continue
		}
		if err := k.walkUntil(ctx, m.sequence-1); err != nil {
			return err
		}
		if err := k.fold(m.Message, m.sequence, m.stored); err != nil {
			return err
		}
	}
	if !late {
		return nil
	}
	last, err := k.log.Last(ctx)
	if err != nil {
		return err
	}
	return k.walkUntil(ctx, last)
}
