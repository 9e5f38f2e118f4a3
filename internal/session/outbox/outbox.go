// Package outbox appends the facts of a node's ranks to the log, in few events and in order.
//
//	Outbox   facts of one rank's saves, appended after the rank was answered
//	Joining  facts of all ranks of the node about one phase of a save, in one event
package outbox

import (
	"context"
	"sync"

	"github.com/ckptstore/ckptstore/events"
)

// Outbox appends the facts of one rank's saves to the log in order, after the
// rank has gone back to training. It holds at most a plan and a seal for each of
// the rank's slots, since a save without a slot appends nothing.
type Outbox struct {
	ctx    context.Context
	record func(ctx context.Context, bodies ...events.Body) error
	lost   func(checkpoint string, err error)

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

// New returns the outbox of a rank. Facts that are not appended when ctx ends are lost. record
// durably appends bodies as the rank. lost is called when a fact of a save could not be appended.
func New(ctx context.Context, record func(context.Context, ...events.Body) error, lost func(checkpoint string, err error)) *Outbox {
	return &Outbox{ctx: ctx, record: record, lost: lost}
}

// Post queues a fact.
func (o *Outbox) Post(checkpoint string, body events.Body) {
	o.put(letter{checkpoint: checkpoint, body: body})
}

// Record appends a fact, after all that were posted before it.
func (o *Outbox) Record(ctx context.Context, checkpoint string, body events.Body) error {
	l := letter{checkpoint, body, make(chan error, 1)}
	o.put(l)
	select {
	case err := <-l.said:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (o *Outbox) put(l letter) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queue = append(o.queue, l)
	if o.empty == nil {
		o.empty = make(chan struct{})
		go o.run()
	}
}

// run appends the queued facts until the queue is empty.
func (o *Outbox) run() {
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

// Flush waits until all posted facts are appended or lost.
func (o *Outbox) Flush(ctx context.Context) error {
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
