package session

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
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

// Bounds of the metrics of an iteration, in bytes.
const (
	maxEvent   = 1 << 20  // limit of the log
	eventSpare = 16 << 10 // reserved for everything other than metrics
	rankSpare  = 64       // reserved in each rank's part
	maxReport  = 64 << 10 // per rank, if there is room for as much from each
)

// ReportLimit returns the maximum size in bytes of a rank's metrics, as JSON. The
// metrics of all ranks share one event; of a large group, it has those of few ranks and
// a summary.
func ReportLimit(world int) int {
	if world > exactRanks {
		const summary = 4 // times the text of the names, for their numbers
		return (maxEvent-eventSpare-summary*summarizedText)/(1+mostOutliers) - rankSpare
	}
	return min(maxReport, (maxEvent-eventSpare)/world-rankSpare)
}

// checkMetrics returns an error if an event cannot hold the metrics of one rank
// of a world.
func checkMetrics(metrics map[string]any, world int) error {
	for k, v := range metrics {
		switch v.(type) {
		case float64, string, bool, nil:
		default:
			return fmt.Errorf("metric %q is a %T: metrics are numbers, strings or booleans", k, v)
		}
	}
	body, err := json.Marshal(metrics)
	if err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	if limit := ReportLimit(world); len(body) > limit {
		return fmt.Errorf("the metrics have %d bytes; each of %d ranks may report %d at a time: report fewer, or put large values into a file", len(body), world, limit)
	}
	return nil
}

// bareNumbers quotes the names of non-finite numbers, which Python's json module
// writes bare. Everything else stays unchanged.
func bareNumbers(body []byte) []byte {
	var out []byte
	quoted := false
	for i := 0; i < len(body); i++ {
		if !quoted {
			if name := nonFinite(body[i:]); name != "" {
				out = append(append(append(out, '"'), name...), '"')
				i += len(name) - 1
				continue
			}
		}
		switch {
		case body[i] == '"':
			quoted = !quoted
		case quoted && body[i] == '\\' && i+1 < len(body):
			out = append(out, body[i])
			i++
		}
		out = append(out, body[i])
	}
	return out
}

func nonFinite(at []byte) string {
	for _, name := range []string{"NaN", "Infinity", "-Infinity"} {
		if bytes.HasPrefix(at, []byte(name)) {
			return name
		}
	}
	return ""
}

// Metrics with a meaning of their own, as in Ray's function API.
const (
	metricDuplicate    = "__duplicate__"     // true: the rank has returned without a last report; not an iteration
	metricTimeThisIter = "time_this_iter_s"  // seconds of the rank's own work, in place of the trainer's measurement
	metricBusyThisIter = client.BusyThisIter // seconds of the iteration in which the rank waited for no other rank
)

// alreadyDone refuses requests after a rank's last report.
func alreadyDone(rank int, at int64) error {
	return problem.Errorf(problem.Conflict, "already done: rank %d finished with step %d; it cannot report again", rank, at)
}

// isMarker reports whether a report only records that a rank has returned.
func isMarker(r client.Report) bool { return r.Metrics[metricDuplicate] == true }

// ownTime removes one of the rank's own measurements of time from its metrics and returns
// it, or nil if there is none. Left in, it would make every rank's report differ.
func ownTime(metrics map[string]any, name string) (*float64, error) {
	said, has := metrics[name]
	if !has {
		return nil, nil
	}
	seconds, ok := said.(float64)
	if !ok || seconds < 0 || math.IsInf(seconds, 0) {
		return nil, badRequest("metric %q is %v: want seconds, a number from 0 on, or leave it out", name, said)
	}
	delete(metrics, name)
	return &seconds, nil
}
