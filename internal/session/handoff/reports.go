package handoff

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/retry"
)

// Bounds within which reports may run ahead of a log that does not answer: ranks
// continue before their iteration is in the log. Beyond them the training waits.
// If the trainer is killed, iterations that ran ahead are lost, as is the
// training since the last checkpoint.
const (
	aheadAfter = 2 * time.Second // silence of the log before the first
	aheadMost  = 10_000          // iterations
	aheadBytes = 16 << 20        // of metrics
)

// reports appends iterations to the log, one at a time and in order.
type reports struct {
	record func(context.Context, ...events.Body) error
	log    *slog.Logger

	mu    sync.Mutex
	queue []*iteration // iterations not yet in the log; the first is being appended
	bytes int          // of their metrics
	idle  chan struct{}
	broke chan error // capacity 1: an iteration that had run ahead was refused
	lost  int        // number of such iterations
	short bool       // lack of room has been logged; owned by run

	over chan struct{} // closed by end
	end  func()        // records that no worker is left to wait for room
}

// iteration is one report of all ranks, queued for the log.
type iteration struct {
	metrics *events.Metrics
	facts   []events.Body // that follow from it
	bytes   int
	said    chan error // result, of capacity 1
	ahead   bool       // its ranks have continued
}

func (it *iteration) bodies() []events.Body { return append([]events.Body{it.metrics}, it.facts...) }

func newReports(record func(context.Context, ...events.Body) error, log *slog.Logger) *reports {
	idle := make(chan struct{})
	close(idle)
	r := &reports{record: record, log: log, idle: idle, broke: make(chan error, 1), over: make(chan struct{})}
	r.end = sync.OnceFunc(func() { close(r.over) })
	return r
}

// EndReports records that no process is left to wait for the room that reports
// need.
func (h *Handoff) EndReports() { h.reports.end() }

// Settle ends the reports and waits until all that were taken are in the
// log or refused.
func (h *Handoff) Settle() { h.reports.settle() }

// settle waits until all added iterations are in the log or refused.
func (r *reports) settle() {
	r.end()
	r.mu.Lock()
	idle := r.idle
	r.mu.Unlock()
	<-idle
}

// add queues an iteration and the facts that follow from it. It returns when the iteration
// is in the log, is refused, or may run ahead. The error is the log's.
func (r *reports) add(ctx context.Context, m *events.Metrics, facts ...events.Body) error {
	text, err := json.Marshal(m.Metrics)
	if err != nil {
		return err
	}
	it := &iteration{metrics: m, facts: facts, bytes: len(text), said: make(chan error, 1)}
	for _, o := range m.Others {
		more, err := json.Marshal(o.Metrics)
		if err != nil {
			return err
		}
		it.bytes += len(more)
	}
	wait := aheadAfter
	r.mu.Lock()
	if len(r.queue) > 0 {
		wait = 0
	} else {
		r.idle = make(chan struct{})
		go r.run(ctx)
	}
	r.queue = append(r.queue, it)
	r.bytes += it.bytes
	r.mu.Unlock()

	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case err := <-it.said:
		return err
	case <-timer.C:
	}
	if r.letGo(it) {
		return nil
	}
	return <-it.said
}

// letGo lets an iteration run ahead if there is room.
func (r *reports) letGo(it *iteration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	it.ahead = len(it.said) == 0 && len(r.queue) <= aheadMost && r.bytes <= aheadBytes
	return it.ahead
}

// run appends queued iterations until the queue is empty.
func (r *reports) run(ctx context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.queue) > 0 {
		it := r.queue[0]
		r.mu.Unlock()
		err := r.append(ctx, it)
		r.mu.Lock()
		r.queue = r.queue[1:]
		r.bytes -= it.bytes
		it.said <- err
		if it.ahead && err != nil {
			r.refused(it, err)
		}
	}
	close(r.idle)
}

// append appends an iteration. Without room it waits in parallel with the
// training; the iteration is dropped when the training ends.
func (r *reports) append(ctx context.Context, it *iteration) error {
	for {
		err := r.record(ctx, it.bodies()...)
		if !errors.Is(err, syscall.ENOSPC) {
			r.short = false
			return err
		}
		if !r.short {
			r.short = true
			r.log.Warn("no room for metrics; retrying", "step", it.metrics.Step, "error", err)
		}
		timer := time.NewTimer(retry.RoomPause)
		select {
		case <-timer.C:
			continue
		case <-r.over:
			err = r.record(ctx, it.bodies()...)
		case <-ctx.Done():
		}
		timer.Stop()
		return err
	}
}

// refused handles the refusal of an iteration whose ranks have continued.
func (r *reports) refused(it *iteration, err error) {
	if r.lost++; r.lost == 1 {
		r.log.Warn("metrics refused by the log after their ranks continued", "iteration", it.metrics.Iteration, "step", it.metrics.Step, "error", err)
	}
	if errors.Is(err, syscall.ENOSPC) {
		return // their training is worth more than its metrics
	}
	select {
	case r.broke <- err:
	default: // one is enough
	}
}
