package session

import (
	"context"
	"sync"

	"github.com/ckptstore/ckptstore/events"
)

// outbox appends the facts of one rank's saves to the log in order, after the
// rank has gone back to training. It holds at most a plan and a seal for each of
// the rank's slots, since a save without a slot appends nothing.
type outbox struct {
	// ctx ends with the attempt; facts not appended by then are lost.
	ctx context.Context
	// record durably appends bodies as one rank.
	record func(ctx context.Context, bodies ...events.Body) error
	// lost is called when a fact of a save could not be appended.
	lost func(checkpoint string, err error)

	mu    sync.Mutex
	queue []letter
	empty chan struct{} // closed when all posted facts are appended; nil: they are
}

// letter is a queued fact.
type letter struct {
	checkpoint string
	body       events.Body
	said       chan error // result for a waiting caller, or nil
}

// post queues a fact.
func (o *outbox) post(checkpoint string, body events.Body) {
	o.put(letter{checkpoint: checkpoint, body: body})
}

// recordNow appends a fact, after all that were posted before it.
func (o *outbox) recordNow(ctx context.Context, checkpoint string, body events.Body) error {
	l := letter{checkpoint, body, make(chan error, 1)}
	o.put(l)
	select {
	case err := <-l.said:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (o *outbox) put(l letter) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queue = append(o.queue, l)
	if o.empty == nil {
		o.empty = make(chan struct{})
		go o.run()
	}
}

// run appends the queued facts until the queue is empty.
func (o *outbox) run() {
	for {
		o.mu.Lock()
		if len(o.queue) == 0 {
			close(o.empty)
			o.empty = nil
			o.mu.Unlock()
			return
		}
		// Facts of one save form a batch, so that a fact refused for one save
		// does not take another save with it.
		n := 1
		for n < len(o.queue) && o.queue[n].checkpoint == o.queue[0].checkpoint {
			n++
		}
		letters := o.queue[:n:n]
		o.queue = o.queue[n:]
		o.mu.Unlock()
		bodies := make([]events.Body, len(letters))
		for i, l := range letters {
			bodies[i] = l.body
		}
		err := o.record(o.ctx, bodies...)
		told := false
		for _, l := range letters {
			switch {
			case l.said != nil:
				l.said <- err
			case err != nil && !told:
				told = true
				o.lost(l.checkpoint, err)
			}
		}
	}
}

// flush waits until all posted facts are appended or lost.
func (o *outbox) flush(ctx context.Context) error {
	o.mu.Lock()
	empty := o.empty
	o.mu.Unlock()
	if empty == nil {
		return nil
	}
	select {
	case <-empty:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
