package jetlog

import (
	"container/list"
	"context"
	"fmt"
	"sync"

	"github.com/ckptstore/ckptstore/events"
)

// Limits of what waits to be appended, so that a server that does not answer
// costs its clients no more memory than that.
const (
	queueBytes = 64 << 20
	queueFact  = 1 << 10 // bytes that a fact counts for at least: 65536 are as many as fit
)

// job is one call of Append. Its sequences are valid after done was sent nil.
type job struct {
	ctx       context.Context
	events    []events.Event
	bytes     int
	sequences []uint64
	done      chan error
	looked    uint64            // the end of the archive in which its events were looked for
	had       map[string]uint64 // the sequences of those that are in it, by ID
	place     *list.Element     // in the queue; nil when it was taken
}

// weight is the share of the budget that the job has until it is acknowledged
// or given up. One that is larger than the budget has it to itself.
func (j *job) weight() int64 {
	return min(queueBytes, max(int64(j.bytes), queueFact*int64(len(j.events))))
}

// queue holds jobs in the order of arrival.
type queue struct {
	mu    sync.Mutex
	jobs  list.List     // of *job
	ready chan struct{} // holds a token when jobs may be there
}

// enqueue has the committer send j and returns when it is acknowledged,
// refused, or its context or the log ends. Then it is not in the queue.
func (l *Log) enqueue(j *job) error {
	ctx, cancel := context.WithCancelCause(j.ctx)
	defer cancel(nil)
	defer context.AfterFunc(l.ctx, func() { cancel(ErrClosed) })()
	if err := l.room.Acquire(ctx, j.weight()); err != nil {
		return fmt.Errorf("%w: it was not sent, for lack of room among the facts that wait: %w", ErrUnacknowledged, l.because(context.Cause(ctx)))
	}
	defer l.room.Release(j.weight())
	l.queue.push(j)
	select {
	case err := <-j.done:
		return err
	case <-ctx.Done():
		l.queue.drop(j)
		return fmt.Errorf("%w: %w", ErrUnacknowledged, l.because(context.Cause(ctx)))
	}
}

func (q *queue) push(j *job) {
	q.mu.Lock()
	j.place = q.jobs.PushBack(j)
	q.mu.Unlock()
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// drop removes a job that was given up, unless it was taken: the committer
// leaves that one out of its next attempt.
func (q *queue) drop(j *job) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if j.place != nil {
		q.jobs.Remove(j.place)
		j.place = nil
	}
}

// take removes the jobs that fit one batch. A larger job comes alone.
func (q *queue) take() []*job {
	q.mu.Lock()
	defer q.mu.Unlock()
	var taken []*job
	count, bytes := 0, 0
	for front := q.jobs.Front(); front != nil; front = q.jobs.Front() {
		j := front.Value.(*job)
		count += len(j.events)
		bytes += j.bytes
		if len(taken) > 0 && (count > maxBatch || bytes > maxBatchBytes) {
			break
		}
		q.jobs.Remove(front)
		j.place = nil
		taken = append(taken, j)
	}
	return taken
}

func (q *queue) length() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.jobs.Len()
}
