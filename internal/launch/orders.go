package launch

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
)

// StopRequest asks a job to end. It comes from a signal, from the end of the
// time that the job was given, or as trial.stop_requested from the log.
type StopRequest struct {
	Preempt bool   // the workers save first, on a step that all ranks agree on
	Reason  string // who asks, or why
	Signal  string // the name of the signal that it came by, which workers may have got too; or empty
}

// asks is what workers are told.
func (r StopRequest) asks() string {
	if r.Preempt {
		return client.Preempt
	}
	return client.Stop
}

// stopOrder is the request that a job obeys.
type stopOrder struct {
	StopRequest
	after uint64 // what is begun behind this sequence was begun since
}

// orders are the requests to a job. The first one counts, and a stop more than
// a preemption.
type orders struct {
	seen atomic.Uint64 // sequence of the last decision of the trial that was read or made

	mu   sync.Mutex
	now  *stopOrder
	came chan struct{} // closed when now changes
}

func newOrders() *orders { return &orders{came: make(chan struct{})} }

// saw takes note of a decision of the trial. No orders need none.
func (o *orders) saw(seq uint64) {
	if o == nil {
		return
	}
	for was := o.seen.Load(); was < seq && !o.seen.CompareAndSwap(was, seq); was = o.seen.Load() {
		continue
	}
}

// give takes a request, and reports whether it changes anything.
func (o *orders) give(r StopRequest) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.now == nil:
		o.now = &stopOrder{r, o.seen.Load()}
	case o.now.Preempt && !r.Preempt:
		o.now = &stopOrder{r, o.now.after}
	default:
		return false
	}
	close(o.came)
	o.came = make(chan struct{})
	return true
}

// given is what the job obeys, nil when nobody has asked for anything, and a
// channel that is closed when that changes. Nobody asks anything of no orders.
func (o *orders) given() (*stopOrder, <-chan struct{}) {
	if o == nil {
		return nil, nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.now, o.came
}

// takeOrders follows the job's log from a sequence, its requests and its
// deadline, until the result is called.
func (j *job) takeOrders(ctx context.Context, from uint64) (stop func()) {
	j.orders.saw(from - 1)
	return beside(ctx, func(ctx context.Context) {
		if err := j.followLane(ctx, from); err != nil && ctx.Err() == nil {
			j.log.Warn("requests to stop this job are not read from the log any more; send its trainer a signal instead", "error", err)
		}
	})
}

// takeRequests obeys signals and the deadline until the result is called, also
// while the log does not answer.
func (j *job) takeRequests(ctx context.Context) (stop func()) { return beside(ctx, j.followRequests) }

// beside runs do until the result is called, which waits for its end.
func beside(ctx context.Context, do func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var ended sync.WaitGroup
	ended.Go(func() { do(ctx) })
	return func() {
		cancel()
		ended.Wait()
	}
}

// followLane obeys what is asked of this job in the lane of its trial. What was
// asked of the trial before the job began was meant for another.
func (j *job) followLane(ctx context.Context, from uint64) error {
	lane := events.Aggregate{Run: j.cfg.Run, Trial: j.cfg.Trial}
	for r, err := range j.store.Log.ReadLane(ctx, lane, from, 0) {
		if err != nil {
			return err
		}
		j.orders.saw(r.Sequence)
		if r.Kind != (events.TrialStopRequested{}).Kind() {
			continue
		}
		body, err := r.Body()
		if err != nil {
			return err
		}
		b, ok := body.(*events.TrialStopRequested)
		if !ok {
			continue // it asks for nothing
		}
		if b.Job != "" && b.Job != j.cfg.Job {
			j.log.Info("a request to stop another job of the run is not obeyed", "job", b.Job, "reason", b.Reason)
			continue
		}
		j.ask(StopRequest{Preempt: b.Preempt, Reason: cmp.Or(b.Reason, "asked for in the log, without a reason")})
	}
	return nil
}

// followRequests obeys signals and the deadline.
func (j *job) followRequests(ctx context.Context) {
	var due <-chan time.Time
	if !j.cfg.Deadline.IsZero() {
		left := j.cfg.Deadline.Sub(j.cfg.Now()) - j.cfg.PreemptGrace - j.cfg.Grace
		timer := time.NewTimer(left)
		defer timer.Stop()
		due = timer.C
	}
	for {
		select {
		case r := <-j.cfg.Requests:
			j.ask(r)
		case <-due:
			j.ask(StopRequest{Preempt: true, Reason: fmt.Sprintf("the time of the job ends at %s", j.cfg.Deadline.Format(time.RFC3339))})
		case <-ctx.Done():
			return
		}
	}
}

func (j *job) ask(r StopRequest) {
	if j.orders.give(r) {
		j.log.Warn("the job is asked to end", "how", r.asks(), "reason", r.Reason)
	}
}
