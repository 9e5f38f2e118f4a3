package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
)

// handoff takes the reports of all ranks, one iteration at a time. Each rank
// has a mailbox of capacity one and is held until the iteration is in the
// log; so nothing that a rank did before its report returned can be lost, and
// no rank runs ahead of the others. While the log does not answer, all ranks
// together run ahead of it: see reports.
type handoff struct {
	attempt  int
	limit    time.Duration // until all ranks have reported
	now      func() time.Time
	store    Store // whose silence the limit leaves out
	reports  *reports
	boxes    []chan struct{} // a rank's holds a token while its report is not answered
	in       chan delivery   // at most one of each rank: sending never blocks
	gone     chan int        // a rank whose process has ended, once: sending never blocks
	left     map[int]bool    // ranks that were in gone or have finished; owned by the goroutine of run
	words    []lastWord      // of each rank, under its box
	finished chan int        // a rank that has returned without a last report, once: sending never blocks
	over     chan struct{}   // closed when no report will be taken any more
	why      error           // set before over is closed

	stop func() string // what all ranks of an iteration are asked: to stop, to save and stop, or nothing
	step atomic.Int64  // of the newest iteration; -1 before the first

	began time.Time
}

type delivery struct {
	client.Report
	rank int
	at   time.Time // when the rank reported: waiting for others is not its time
	took *float64  // seconds, if the rank has measured them itself
	done chan reportAnswer
}

// reportAnswer is what a rank gets for its report.
type reportAnswer struct {
	stop string
	err  error
}

// RefusedError says that the log does not take what this process has to say: no
// fault of the ranks.
type RefusedError struct{ Err error }

// Unwrap returns why the log refused it.
func (e *RefusedError) Unwrap() error { return e.Err }

func (e *RefusedError) Error() string { return e.Err.Error() }

// UnevenError says that some ranks have reported once more than others.
type UnevenError struct{ Reported, Ended []int }

// Error names the ranks.
func (e *UnevenError) Error() string {
	return fmt.Sprintf("ranks %v reported while ranks %v have ended: every rank must report the same number of times", e.Reported, e.Ended)
}

func newHandoff(attempt, world int, limit time.Duration, now func() time.Time, say func(context.Context, ...events.Body) error) *handoff {
	h := &handoff{
		attempt: attempt, limit: limit, now: now, reports: newReports(say, slog.New(slog.DiscardHandler)),
		in: make(chan delivery, world), gone: make(chan int, world),
		left: map[int]bool{}, over: make(chan struct{}), stop: func() string { return "" },
		words: make([]lastWord, world), finished: make(chan int, world),
	}
	h.step.Store(-1)
	h.began = now()
	for range world {
		h.boxes = append(h.boxes, make(chan struct{}, 1))
	}
	return h
}

// ended says, once, that a rank's process is gone. A report that it had
// handed over still counts.
func (h *handoff) ended(rank int) { h.gone <- rank }

// report hands over rank's report and blocks until the iteration is in the
// log. stop is what the trainer asks of all ranks that reported it.
func (h *handoff) report(ctx context.Context, rank int, r client.Report) (stop string, err error) {
	took, err := ownTime(r.Metrics)
	if err != nil {
		return "", err
	}
	d := delivery{r, rank, h.now(), took, make(chan reportAnswer, 1)}
	if counts, err := h.enter(ctx, rank, r); !counts {
		return "", err
	}
	h.in <- d
	select {
	case a := <-d.done:
		return a.stop, a.err
	case <-h.over:
		// The answer may have come in the same moment.
		select {
		case a := <-d.done:
			return a.stop, a.err
		default:
			return "", h.why
		}
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// answer ends a rank's report and lets its next one in.
func (h *handoff) answer(d delivery, stop string, err error) {
	d.done <- reportAnswer{stop, err}
	<-h.boxes[d.rank]
}

// run collects iterations until every rank has ended, and returns how many the
// log has, or will have when the reports have settled. One that is refused for lack of space is an error of its reports
// alone. Ranks that disagree on whether there is one more are an error
// that names them.
func (h *handoff) run(ctx context.Context) (iterations int, err error) {
	defer func() {
		h.why = cmpErr(err, errors.New("the attempt is over: no report is taken any more"))
		close(h.over)
	}()
	last := h.began // a report may be here before this goroutine
	for {
		got, err := h.collect(ctx)
		if err != nil || got == nil {
			return iterations, err
		}
		err = h.reports.add(ctx, h.merge(iterations+1, got, got[0].at.Sub(last)))
		last = h.now()
		h.leave(got)
		stop := ""
		if err == nil {
			h.step.Store(got[0].Step)
			stop = h.stop() // once, so that the ranks agree on the iteration
		}
		for _, d := range got {
			h.answer(d, stop, err)
		}
		if errors.Is(err, syscall.ENOSPC) {
			continue // the workers know; what they train is worth more than its metrics
		}
		if err != nil {
			return iterations, &RefusedError{Err: err}
		}
		iterations++
	}
}

// collect waits for one report of each rank; nil when all ranks have ended.
func (h *handoff) collect(ctx context.Context) ([]delivery, error) {
	got := map[int]delivery{}
	var limit <-chan struct{}
	cancel := func() {}
	defer func() { cancel() }()
	take := func(d delivery) {
		got[d.rank] = d
		if limit == nil {
			var late context.Context
			late, cancel = h.store.answering(context.WithoutCancel(ctx), h.limit)
			limit = late.Done()
		}
	}
	refuse := func(format string, args ...any) ([]delivery, error) {
		err := fmt.Errorf(format, args...)
		for _, d := range got {
			h.answer(d, "", err)
		}
		return nil, err
	}
	for {
		reported, ended, silent := h.count(got)
		switch {
		case len(silent) > 0:
		case len(reported) == 0:
			return nil, nil
		case len(ended) > 0:
			return refuse("%w", &UnevenError{reported, ended})
		default:
			all := make([]delivery, len(reported))
			for rank, d := range got {
				all[rank] = d
			}
			return all, nil
		}
		select {
		case d := <-h.in:
			take(d)
		case rank := <-h.finished:
			h.left[rank] = true
		case rank := <-h.gone:
			h.left[rank] = true
			for len(h.in) > 0 { // a last report may be in front of the news: it counts
				take(<-h.in)
			}
		case err := <-h.reports.broke:
			_, _ = refuse("%w", err)
			return nil, &RefusedError{Err: err}
		case <-limit:
			return refuse("ranks %v have not reported within %v, while ranks %v have", silent, h.limit, reported)
		case <-ctx.Done():
			return refuse("%w", ctx.Err())
		}
	}
}

// count says which ranks have reported, which have ended without, and which
// may still do either.
func (h *handoff) count(got map[int]delivery) (reported, ended, silent []int) {
	for rank := range h.boxes {
		switch _, ok := got[rank]; {
		case ok:
			reported = append(reported, rank)
		case h.left[rank]:
			ended = append(ended, rank)
		default:
			silent = append(silent, rank)
		}
	}
	return reported, ended, silent
}

// merge makes the iteration's event: rank 0's metrics are the trial's, other
// ranks are listed where they differ.
func (h *handoff) merge(iteration int, got []delivery, took time.Duration) *events.Metrics {
	m := &events.Metrics{
		Attempt: h.attempt, Iteration: iteration, Step: got[0].Step,
		Metrics: got[0].Metrics, Seconds: took.Seconds(),
	}
	if got[0].took != nil {
		m.Seconds = *got[0].took
	}
	for rank, d := range got[1:] {
		if !reflect.DeepEqual(d.Metrics, m.Metrics) {
			m.Others = append(m.Others, events.RankMetrics{Rank: rank + 1, Metrics: d.Metrics})
		}
	}
	return m
}
