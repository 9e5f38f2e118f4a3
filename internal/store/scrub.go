package store

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

const (
	// scrubAfter is how long after it began to own a store a process first
	// reads the whole log; commands that end sooner do not.
	scrubAfter = time.Minute
	// scrubEvery is how often it reads it again.
	scrubEvery = 6 * time.Hour
	// scrubRate is how many bytes a second it reads at most, so that a
	// training does not notice.
	scrubRate = 8 << 20
	// scrubStep is how many bytes are read between two pauses.
	scrubStep = 1 << 18
)

// scrubber reads the whole log in the background while this process owns the
// store: a server jumps over a damaged block and calls itself healthy, and the
// views read each event once, when it is new. Then it compares all receipts with
// the log, and repairs those that are missing or damaged.
type scrubber struct {
	store   *Store
	settled time.Duration // since when what it repairs has ended
	cancel  context.CancelFunc
	done    chan struct{}
}

func startScrubber(s *Store, after, every time.Duration) *scrubber {
	ctx, cancel := context.WithCancel(context.Background())
	b := &scrubber{store: s, settled: settleLong, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(b.done)
		for wait := after; sleep(ctx, wait); {
			if wait = after; s.Owns() {
				b.pass(ctx)
				wait = every
			}
		}
	}()
	return b
}

func (b *scrubber) stop() {
	b.cancel()
	<-b.done
}

// pass reads the log once and says what is wrong with it.
func (b *scrubber) pass(ctx context.Context) {
	p := stepped{pacer: pacer{rate: scrubRate}}
	out, err := b.store.readLog(ctx, p.pace, p.pace)
	log := b.store.opts.Logger
	switch {
	case ctx.Err() != nil:
	case err != nil:
		log.Warn("the log could not be read to its end in the background; it is tried again", "read", out.Events, "error", err)
	case len(out.Findings) > 0:
		first := []any{slog.Int("findings", len(out.Findings)), slog.String("first", out.Findings[0].String())}
		log.Error("the log is damaged: end all trainings, keep the directory as it is, and run `ckptstore verify --log`", first...)
	default:
		log.Debug("the whole log was read", "events", out.Events)
		b.repair(ctx, p.pace)
	}
}

// repair does for all checkpoints what an owner does when it takes over for
// those that were decided last. What has ended a moment ago is left to those who
// are at it.
func (b *scrubber) repair(ctx context.Context, pace func(context.Context, int64) error) {
	own := b.store.owner.ownership()
	if own == nil {
		return
	}
	err := repairAll(ctx, b.store, b.store.Log, own.views.db.View, b.settled, pace)
	if err != nil && ctx.Err() == nil {
		b.store.opts.Logger.Warn("receipts could not be repaired in the background; it is tried again", "error", err)
	}
}

// stepped is a pacer that pauses rarely: a pause for each event would take
// longer than the event.
type stepped struct {
	pacer
	mu    sync.Mutex
	owing int64
}

func (s *stepped) pace(ctx context.Context, bytes int64) error {
	s.mu.Lock()
	s.owing += bytes
	owing := s.owing
	if owing >= scrubStep {
		s.owing = 0
	}
	s.mu.Unlock()
	if owing < scrubStep {
		return ctx.Err()
	}
	return s.pacer.pace(ctx, owing)
}
