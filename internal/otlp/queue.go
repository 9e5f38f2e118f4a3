package otlp

import (
	"context"
	"sync"
)

// Reasons for which a trace is not delivered, as the metric has them.
const (
	dropFull    = "full"    // the queue was full: the oldest trace made room
	dropRefused = "refused" // the collector refused it
	dropOld     = "old"     // the save ended too long ago
	dropUnread  = "unread"  // its rows could not be read
)

// Reasons lists the values of the label of the dropped traces.
var Reasons = []string{dropFull, dropRefused, dropOld, dropUnread}

// Counts are the traces of a process.
type Counts struct {
	Waiting int // in the queue, with the trace that is being sent
	Sent    uint64
	Dropped map[string]uint64 // by reason; has every reason
}

// item is a trace in the queue.
type item struct {
	seq  uint64 // of the event that ended it
	what string
	text []byte
}

// queue has the traces that wait, in the order of the log, and how far the log was read. Everything
// up to done is delivered or dropped.
type queue struct {
	mu      sync.Mutex
	size    int
	waiting []item
	sending *item
	read    uint64 // sequence up to which the log was read
	over    bool   // nothing more is sent
	news    chan struct{}
	sent    uint64
	dropped map[string]uint64
}

func newQueue(size int) *queue {
	q := &queue{size: size, news: make(chan struct{}), dropped: map[string]uint64{}}
	for _, r := range Reasons {
		q.dropped[r] = 0
	}
	return q
}

// changed wakes all that wait. The caller holds mu.
func (q *queue) changed() {
	close(q.news)
	q.news = make(chan struct{})
}

// reset forgets the traces that wait: a subscription begins after an event.
func (q *queue) reset(read uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting, q.sending, q.read, q.over = nil, nil, read, false
	q.changed()
}

// add appends a trace, and drops the oldest that waits if the queue is full. It never waits.
func (q *queue) add(it item) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) >= q.size {
		q.waiting = append(q.waiting[:0], q.waiting[1:]...)
		q.dropped[dropFull]++
	}
	q.waiting, q.read = append(q.waiting, it), it.seq
	q.changed()
}

// pass notes that the log was read up to an event, which is of no trace.
func (q *queue) pass(seq uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.read = seq
	q.changed()
}

// stop ends the waiting for what is not sent.
func (q *queue) stop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.over = true
	q.changed()
}

// drop counts a trace that is not made.
func (q *queue) drop(seq uint64, reason string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.read = seq
	q.dropped[reason]++
	q.changed()
}

// next takes the first trace for sending. It waits for one until ctx ends.
func (q *queue) next(ctx context.Context) (item, error) {
	for {
		q.mu.Lock()
		if len(q.waiting) > 0 {
			it := q.waiting[0]
			q.waiting = append(q.waiting[:0], q.waiting[1:]...)
			q.sending = &it
			q.mu.Unlock()
			return it, nil
		}
		news := q.news
		q.mu.Unlock()
		select {
		case <-news:
		case <-ctx.Done():
			return item{}, context.Cause(ctx)
		}
	}
}

// finish ends the sending of a trace. The reason is empty if the collector has it.
func (q *queue) finish(reason string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sending = nil
	if reason == "" {
		q.sent++
	} else {
		q.dropped[reason]++
	}
	q.changed()
}

// done returns the sequence up to which nothing waits.
func (q *queue) done() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.sending != nil:
		return q.sending.seq - 1
	case len(q.waiting) > 0:
		return q.waiting[0].seq - 1
	}
	return q.read
}

// empty waits until everything up to a sequence is delivered or dropped, nothing more is sent, or
// ctx ends.
func (q *queue) empty(ctx context.Context, seq uint64) error {
	for {
		q.mu.Lock()
		news, over := q.news, q.over
		q.mu.Unlock()
		if q.done() >= seq {
			return nil
		}
		if over {
			return errLeaving
		}
		select {
		case <-news:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// counts returns the numbers for the metrics.
func (q *queue) counts() Counts {
	q.mu.Lock()
	defer q.mu.Unlock()
	c := Counts{Waiting: len(q.waiting), Sent: q.sent, Dropped: map[string]uint64{}}
	if q.sending != nil {
		c.Waiting++
	}
	for r, n := range q.dropped {
		c.Dropped[r] = n
	}
	return c
}
