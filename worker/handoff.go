package worker

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/worker/client"
)

// handoff takes the reports of all ranks, one iteration at a time. Each rank
// has a mailbox of capacity one and is held until the iteration is in the
// log; so nothing that a rank did before its report returned can be lost, and
// no rank runs ahead of the others.
type handoff struct {
	attempt int
	limit   time.Duration // until all ranks have reported
	now     func() time.Time
	say     func(context.Context, ...events.Body) error
	ranks   []mailbox
	over    chan struct{} // closed when no report will be taken any more
	why     error         // set before over is closed
}

type mailbox struct {
	in    chan delivery // capacity one
	ended chan struct{} // closed when the rank's process has ended
}

type delivery struct {
	client.Report
	at   time.Time // when the rank reported: waiting for others is not its time
	done chan error
}

func newHandoff(attempt, world int, limit time.Duration, now func() time.Time, say func(context.Context, ...events.Body) error) *handoff {
	h := &handoff{attempt: attempt, limit: limit, now: now, say: say, over: make(chan struct{})}
	for range world {
		h.ranks = append(h.ranks, mailbox{make(chan delivery, 1), make(chan struct{})})
	}
	return h
}

// ended says that a rank's process is gone. A report that it had handed over
// still counts.
func (h *handoff) ended(rank int) { close(h.ranks[rank].ended) }

// report hands over rank's report and blocks until the iteration is in the
// log.
func (h *handoff) report(ctx context.Context, rank int, r client.Report) error {
	d := delivery{r, h.now(), make(chan error, 1)}
	select {
	case h.ranks[rank].in <- d:
	case <-h.over:
		return h.why
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-d.done:
		return err
	case <-h.over:
		// The answer may have come in the same moment.
		select {
		case err := <-d.done:
			return err
		default:
			return h.why
		}
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run collects iterations until every rank has ended, and returns how many
// there were. Ranks that disagree on whether there is one more are an error
// that names them.
func (h *handoff) run(ctx context.Context) (iterations int, err error) {
	defer func() {
		h.why = cmpErr(err, errors.New("the attempt is over: no report is taken any more"))
		close(h.over)
	}()
	last := h.now()
	for {
		got, err := h.collect(ctx)
		if err != nil || got == nil {
			return iterations, err
		}
		iterations++
		err = h.say(ctx, h.merge(iterations, got, got[0].at.Sub(last)))
		last = h.now()
		for _, d := range got {
			d.done <- err
		}
		if err != nil {
			return iterations, err
		}
	}
}

// collect waits for one report of each rank; nil when all ranks have ended.
func (h *handoff) collect(ctx context.Context) ([]delivery, error) {
	got := make([]delivery, len(h.ranks))
	var reported, ended []int
	var limit <-chan time.Time
	refuse := func(err error) ([]delivery, error) {
		for _, rank := range reported {
			got[rank].done <- err
		}
		return nil, err
	}
	for rank, box := range h.ranks {
		select {
		case got[rank] = <-box.in:
			reported = append(reported, rank)
		case <-box.ended:
			// The mailbox may hold a last report: it counts.
			select {
			case got[rank] = <-box.in:
				reported = append(reported, rank)
			default:
				ended = append(ended, rank)
			}
		case <-limit:
			return refuse(fmt.Errorf("rank %d has not reported within %v, while ranks %v have", rank, h.limit, reported))
		case <-ctx.Done():
			return refuse(ctx.Err())
		}
		if limit == nil && len(reported) > 0 {
			timer := time.NewTimer(h.limit)
			defer timer.Stop()
			limit = timer.C
		}
	}
	switch {
	case len(reported) == 0:
		return nil, nil
	case len(ended) > 0:
		return refuse(fmt.Errorf("ranks %v reported while ranks %v have ended: every rank must report the same number of times", reported, ended))
	}
	return got, nil
}

// merge makes the iteration's event: rank 0's metrics are the trial's, other
// ranks are listed where they differ.
func (h *handoff) merge(iteration int, got []delivery, took time.Duration) *events.Metrics {
	m := &events.Metrics{
		Attempt: h.attempt, Iteration: iteration, Step: got[0].Step,
		Metrics: got[0].Metrics, Seconds: took.Seconds(),
	}
	for rank, d := range got[1:] {
		if !reflect.DeepEqual(d.Metrics, m.Metrics) {
			m.Others = append(m.Others, events.RankMetrics{Rank: rank + 1, Metrics: d.Metrics})
		}
	}
	return m
}

// checkMetrics reports a value that an event cannot hold.
func checkMetrics(metrics map[string]any) error {
	for k, v := range metrics {
		switch v.(type) {
		case float64, string, bool, nil:
		default:
			return fmt.Errorf("metric %q is a %T: metrics are numbers, strings or booleans", k, v)
		}
	}
	return nil
}
