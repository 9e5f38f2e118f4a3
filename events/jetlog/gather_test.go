package jetlog

import (
	"testing"
	"testing/synctest"
	"time"
)

// A batch waits only for the callers that were in flight.
func TestGather(t *testing.T) {
	for _, c := range []struct {
		name   string
		expect int           // were in flight
		took   time.Duration // by the last batch
		idle   time.Duration // from its end to the first append
		queued int           // when the wait begins
		later  int           // that come 100 µs after it
		want   time.Duration
	}{
		{"no appends before", 0, 0, 0, 1, 0, 0},
		{"all are back", 3, time.Second, 0, 3, 0, 0},
		{"all come back soon", 3, time.Second, 0, 1, 2, 100 * time.Microsecond},
		{"one is gone", 3, time.Second, 0, 1, 1, gatherMost},
		{"one is gone, and disks are fast", 3, time.Millisecond, 0, 1, 1, time.Millisecond / gatherShare},
		{"the first comes late", 3, time.Second, time.Second, 1, 0, 0},
		{"more than a batch holds", 3 * maxBatch, time.Second, 0, maxBatch, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := &queue{ready: make(chan struct{}, 1)}
				push := func(n int) {
					for range n {
						q.push(&job{})
					}
				}
				var g gather
				g.sent(c.expect, c.took)
				<-time.After(c.idle)
				push(c.queued)
				go func() {
					<-time.After(100 * time.Microsecond)
					push(c.later)
				}()
				begin := time.Now()
				g.wait(t.Context(), q)
				if got := time.Since(begin); got != c.want {
					t.Errorf("waited %v, want %v", got, c.want)
				}
				<-time.After(time.Millisecond) // for late callers
			})
		})
	}
}
