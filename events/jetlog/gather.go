package jetlog

import (
	"context"
	"time"
)

// gather holds the next batch back for those who were just acknowledged and
// are about to append again.
//
// A batch costs five syncs of the disk whether it has ten events or a
// thousand: the server stages it in a store of its own before it commits it.
// Without holding back, the callers part into two groups that take turns,
// each waiting for two batches of half the size. With 64 writers that keep 4
// appends in flight, that was half the rate at twice the latency. A timer that
// always runs out was worse than none: so the wait ends when all are back, and
// whoever comes alone or late does not wait.
type gather struct {
	expect int // appends that were in flight when the last batch returned
	until  time.Time
}

// Bounds of the wait: a share of what the last batch took, and a time that no
// caller who is going to append at once needs.
const (
	gatherShare = 4
	gatherMost  = 2 * time.Millisecond
)

// sent notes a batch that took so long and is about to be acknowledged.
func (g *gather) sent(inFlight int, took time.Duration) {
	g.expect = inFlight
	g.until = time.Now().Add(min(took/gatherShare, gatherMost))
}

// wait returns when as many appends are queued as were in flight, and soon
// after the last batch in any case.
func (g *gather) wait(ctx context.Context, q *queue) {
	left := time.Until(g.until)
	if left <= 0 || q.length() >= min(g.expect, maxBatch) {
		return
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	for q.length() < min(g.expect, maxBatch) {
		select {
		case <-q.ready:
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}
