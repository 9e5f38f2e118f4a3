package jetlog

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// deaf returns a log whose server is gone, with a job that occupies the committer.
func deaf(t *testing.T) *Log {
	t.Helper()
	l, s := newLog(t)
	s.Shutdown()
	ctx, cancel := context.WithCancel(t.Context())
	head := fact(t, 0)
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = l.Append(ctx, head) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	await(t, "the first append to be in flight", func() bool {
		if l.room.TryAcquire(queueBytes) { // it has not come yet
			l.room.Release(queueBytes)
			return false
		}
		return l.queue.length() == 0
	})
	return l
}

func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	late := time.After(20 * time.Second)
	for !is() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// large returns a fact of about kib KiB.
func large(t *testing.T, kib int) events.Fact {
	t.Helper()
	f := fact(t, 1)
	f.Data = []byte(`"` + strings.Repeat("x", kib<<10) + `"`)
	return f
}

// Abandoned appends are not kept for a server that may come back.
func TestQueueForgetsWhoGaveUp(t *testing.T) {
	l := deaf(t)
	for range 400 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		if _, err := l.Append(ctx, large(t, 200)); !errors.Is(err, ErrUnacknowledged) {
			t.Fatal(err)
		}
		cancel()
		if n := l.queue.length(); n > 0 {
			t.Fatalf("%d appends are queued, and no caller waits for them", n)
		}
	}
}

// The queue is bounded in bytes and in facts, and a caller without room gets an error.
func TestQueueIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		facts []events.Fact
		most  int // appends of them that are queued in addition to the first
	}{
		"bytes": {slices.Repeat([]events.Fact{large(t, 900)}, 5), 14},
		"facts": {slices.Repeat([]events.Fact{fact(t, 1)}, 8000), 8},
	} {
		t.Run(name, func(t *testing.T) {
			l := deaf(t)
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			for range c.most + 2 {
				wg.Go(func() {
					if _, err := l.Append(ctx, c.facts...); !errors.Is(err, ErrUnacknowledged) {
						t.Error(err)
					}
				})
			}
			await(t, "a full queue", func() bool { return l.queue.length() >= c.most })
			// A new caller waits for room, but no longer than its context allows.
			late, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
			_, err := l.Append(late, c.facts...)
			stop()
			if !errors.Is(err, ErrUnacknowledged) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "lack of room") {
				t.Errorf("an append to a full queue: %v", err)
			}
			if n := l.queue.length(); n != c.most {
				t.Errorf("%d appends are queued, want %d", n, c.most)
			}
			cancel()
			wg.Wait()
			if n := l.queue.length(); n > 0 {
				t.Errorf("%d appends are still queued", n)
			}
		})
	}
}

// A caller that waited for room continues when there is some, and returns it.
func TestQueueMakesRoom(t *testing.T) {
	l, _ := newLog(t)
	if !l.room.TryAcquire(queueBytes) {
		t.Fatal("a new log has no room")
	}
	facts := factsOf(t, 3)
	done := make(chan error, 1)
	go func() {
		_, err := l.Append(t.Context(), facts...)
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("it did not wait for room: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	l.room.Release(queueBytes)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if !l.room.TryAcquire(queueBytes) {
		t.Error("not all room was given back")
	}
	// A job that alone is larger than the budget takes all of it.
	if got := (&job{bytes: 2 * queueBytes}).weight(); got != queueBytes {
		t.Errorf("twice the budget weighs %d", got)
	}
}
