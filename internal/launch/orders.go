package launch

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
)

// StopRequest asks a job to end. It comes from a signal, from the job's deadline,
// or from the log as trial.stop_requested.
type StopRequest struct {
	Preempt bool   // the workers save first, on a step that all ranks agree on
	Reason  string // who requested it, or why
	Signal  string // name of the signal, which workers may have received too; may be empty
	// Last, with Preempt, is set if the workers have trained all their steps. They may take as
	// long as they need to save and end. If they end well, the trial is complete; if they fail,
	// the request is void, and the group restarts.
	Last bool
}

// asks describes the request to the workers.
func (r StopRequest) asks() string {
	if r.Preempt {
		return client.Preempt
	}
	return client.Stop
}

// stopOrder is the request that a job obeys.
type stopOrder struct {
	StopRequest
	after uint64 // events after this sequence are later than the request
}

// orders holds the requests to a job. The first one counts. A stop overrides a preemption, and
// each other request overrides one with Last.
type orders struct {
	seen atomic.Uint64 // sequence of the last decision of the trial that was read or made

	mu   sync.Mutex
	now  *stopOrder
	came chan struct{} // closed when now changes
}

func newOrders() *orders { return &orders{came: make(chan struct{})} }

// saw records a decision of the trial. It does nothing if o is nil.
func (o *orders) saw(seq uint64) {
	if o == nil {
		return
	}
	for was := o.seen.Load(); was < seq && !o.seen.CompareAndSwap(was, seq); was = o.seen.Load() {
		continue
	}
}

// give adds a request, and reports whether it changes the order.
func (o *orders) give(r StopRequest) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.now == nil:
		o.now = &stopOrder{r, o.seen.Load()}
	case o.now.Preempt && !r.Preempt, o.now.Last && !r.Last:
		o.now = &stopOrder{r, o.now.after}
	default:
		return false
	}
	close(o.came)
	o.came = make(chan struct{})
	return true
}

// void removes an order, unless another has overridden it.
func (o *orders) void(was *stopOrder) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.now != was {
		return
	}
	o.now = nil
	close(o.came)
	o.came = make(chan struct{})
}

// given returns the order that the job obeys, nil if there is none, and a channel
// that is closed when that changes. A nil o has no order.
func (o *orders) given() (*stopOrder, <-chan struct{}) {
	if o == nil {
		return nil, nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.now, o.came
}

// takeOrders follows the job's log from a sequence, its requests and its
// deadline, until the caller calls stop.
func (j *job) takeOrders(ctx context.Context, from uint64) (stop func()) {
	j.orders.saw(from - 1)
	return inBackground(ctx, func(ctx context.Context) {
		if err := j.followLane(ctx, from); err != nil && ctx.Err() == nil {
			j.log.Warn("stop requests in the log are no longer read; send the trainer a signal instead", "error", err)
		}
	})
}

// takeRequests obeys signals and the deadline until the caller calls stop, even
// while the log does not answer.
func (j *job) takeRequests(ctx context.Context) (stop func()) {
	return inBackground(ctx, j.followRequests)
}

// inBackground runs do concurrently until the caller calls stop, which waits for its
// end.
func inBackground(ctx context.Context, do func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var ended sync.WaitGroup
	ended.Go(func() { do(ctx) })
	return func() {
		cancel()
		ended.Wait()
	}
}

// followLane obeys requests to this job in its trial's lane. Requests from before
// the job began were for another job.
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
			continue // not a request
		}
		if b.Job != "" && b.Job != j.cfg.Job {
			j.log.Info("ignoring a stop request for another job of the run", "job", b.Job, "reason", b.Reason)
			continue
		}
		j.ask(StopRequest{Preempt: b.Preempt, Reason: cmp.Or(b.Reason, "requested in the log, without a reason")})
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
	if j.link != nil {
		if j.idle.takes(r) {
			return
		}
		if err := j.link.Tell(msgAsked, r); err != nil {
			j.log.Error("request not sent to the coordinating node", "reason", r.Reason, "error", err)
		}
		return
	}
	if j.orders.give(r) {
		level := slog.LevelWarn
		if j.cfg.Shared {
			level = slog.LevelInfo // its trials take turns
		}
		j.log.Log(context.Background(), level, "job asked to end", "how", r.asks(), "reason", r.Reason)
	}
}
