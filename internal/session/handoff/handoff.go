// Package handoff collects one report of each rank and appends them as one event.
//
//	Handoff   the reports of an attempt's ranks, one iteration at a time
//	Config    which attempt, its limit, and how an iteration is appended
//	Reported  the answer to a report
//	Earlier   the reports that an earlier coordinator of the living group has answered
//	reports   the iterations on their way to the log, which may fall behind the ranks
//
// The file summary.go builds the event of an iteration, and metrics.go has the bounds and names of the
// metrics.
package handoff

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/retry"
)

// Config describes the reports of an attempt's group.
type Config struct {
	Attempt int
	World   int
	Limit   time.Duration // until all ranks have reported
	Now     func() time.Time
	Calls   *retry.Calls // of the log; the limit leaves out the time in which it does not answer
	Log     *slog.Logger
	// Record durably appends an iteration, and the facts that follow from it. It does not wait for room.
	Record func(context.Context, ...events.Body) error
	// Told is called with each iteration, before Stop; nil: it is not.
	Told func(context.Context, *events.Metrics)
	// Stop returns the request to all ranks of an iteration: stop, save and stop, or none. Nil: none.
	Stop func() string
	// Slower compares the nodes by the seconds of work of each rank in an iteration. It returns the facts that
	// follow. Nil: they are not compared.
	Slower func(busy []float64) []events.Body
}

// Handoff collects the reports of all ranks, one iteration at a time. Each rank
// has a mailbox of capacity one and blocks until the iteration is in the log, so
// nothing that a rank did before its report returned is lost, and no rank runs
// ahead of the others. While the log does not answer, all ranks together may run
// ahead of it: see reports.
type Handoff struct {
	cfg      Config
	reports  *reports
	boxes    []chan struct{} // a rank's box holds a token while its report is unanswered
	in       chan delivery   // at most one per rank: sending never blocks
	gone     chan int        // a rank whose process has ended, once: sending never blocks
	left     map[int]bool    // ranks received from gone, or finished; owned by Run's goroutine
	words    []lastWord      // by rank, guarded by its box
	finished chan int        // a rank that has returned without a last report, once: sending never blocks
	over     chan struct{}   // closed when reports are no longer taken
	why      error           // set before over is closed

	step  atomic.Int64 // of the newest iteration; -1 before the first
	began time.Time

	resumed // of an earlier coordinator of the living group
}

type delivery struct {
	client.Report
	rank int
	at   time.Time // time of the report, so that waiting for other ranks is not counted
	took *float64  // seconds, if the rank measured them itself
	busy *float64  // seconds in which the rank waited for no other one, if it measured them
	done chan reportAnswer
}

// reportAnswer is the reply to a rank's report.
type reportAnswer struct {
	Reported
	err error
}

// UnevenError reports that some ranks reported one more time than others.
type UnevenError struct{ Reported, Ended []int }

// Error names the ranks.
func (e *UnevenError) Error() string {
	return fmt.Sprintf("ranks %v reported while ranks %v have ended: every rank must report the same number of times", e.Reported, e.Ended)
}

// New returns the hand-off of a group. [Handoff.Run] collects its reports.
func New(c Config) *Handoff {
	h := &Handoff{
		cfg: c, reports: newReports(c.Record, c.Log),
		in: make(chan delivery, c.World), gone: make(chan int, c.World),
		left: map[int]bool{}, over: make(chan struct{}),
		words: make([]lastWord, c.World), finished: make(chan int, c.World),
	}
	h.step.Store(-1)
	h.began = c.Now()
	for range c.World {
		h.boxes = append(h.boxes, make(chan struct{}, 1))
	}
	return h
}

// Step returns the step of the newest reported iteration, or -1 before the first.
func (h *Handoff) Step() int64 { return h.step.Load() }

// Ended records that a rank's process is gone. It is called once per rank. A
// report that the rank had handed over still counts.
func (h *Handoff) Ended(rank int) { h.gone <- rank }

// Report hands over rank's report and blocks until the iteration is in the log.
// The answer has the trainer's request to all ranks of that iteration.
func (h *Handoff) Report(ctx context.Context, rank int, r client.Report) (of Reported, err error) {
	took, err := ownTime(r.Metrics, metricTimeThisIter)
	if err != nil {
		return of, err
	}
	busy, err := ownTime(r.Metrics, metricBusyThisIter)
	if err != nil {
		return of, err
	}
	d := delivery{r, rank, h.cfg.Now(), took, busy, make(chan reportAnswer, 1)}
	if counts, err := h.enter(ctx, rank, r); !counts {
		return Reported{Done: err == nil, Step: r.Step}, err
	}
	if of, late := h.late(rank); late { // all ranks had reported, and some have the answer
		of.Done, of.Step = r.Done, r.Step
		if r.Done {
			h.finished <- rank
		}
		<-h.boxes[rank]
		return of, nil
	}
	h.in <- d
	select {
	case a := <-d.done:
		return a.Reported, a.err
	case <-h.over:
		// The answer may have arrived at the same moment.
		select {
		case a := <-d.done:
			return a.Reported, a.err
		default:
			return of, h.why
		}
	case <-ctx.Done():
		return of, ctx.Err()
	}
}

// answer ends a rank's report and admits its next one.
func (h *Handoff) answer(d delivery, iteration int, stop string, err error) {
	d.done <- reportAnswer{Reported{Iteration: iteration, Stop: stop, Done: d.Done, Step: d.Step}, err}
	<-h.boxes[d.rank]
}

// Run collects iterations until every rank has ended. It returns the number of
// iterations that the log has, or will have when the reports have settled. An
// iteration refused for lack of space fails only its own reports. If ranks
// disagree on whether there is another iteration, the error names them.
func (h *Handoff) Run(ctx context.Context) (iterations int, err error) {
	defer func() {
		if h.why = err; err == nil {
			h.why = errors.New("the attempt is over: no report is taken any more")
		}
		close(h.over)
	}()
	last := h.began // a report may have arrived before this goroutine started
	iterations = h.from
	for {
		got, err := h.collect(ctx)
		if err != nil || got == nil {
			return iterations, err
		}
		m := merge(h.cfg.Attempt, iterations+1, got, got[0].at.Sub(last))
		err = h.reports.add(ctx, m, h.slower(got)...)
		last = h.cfg.Now()
		h.leave(got)
		stop := ""
		if err == nil {
			h.step.Store(got[0].Step)
			if h.cfg.Told != nil {
				h.cfg.Told(ctx, m)
				last = h.cfg.Now() // the wait is no part of the ranks' next iteration
			}
			if h.cfg.Stop != nil {
				stop = h.cfg.Stop() // called once, so that the ranks agree on the iteration
			}
		}
		for _, d := range got {
			h.answer(d, iterations+1, stop, err)
		}
		if errors.Is(err, syscall.ENOSPC) {
			continue // the workers have the error; their training is worth more than its metrics
		}
		if err != nil {
			return iterations, &retry.RefusedError{Err: err}
		}
		iterations++
	}
}

// collect waits for one report of each rank. It returns nil when all ranks have
// ended.
func (h *Handoff) collect(ctx context.Context) ([]delivery, error) {
	got := map[int]delivery{}
	silent := len(h.boxes) - len(h.left) // ranks that may still report or end
	var limit <-chan struct{}
	cancel := func() {}
	defer func() { cancel() }()
	take := func(d delivery) {
		if _, again := got[d.rank]; !again && !h.left[d.rank] {
			silent--
		}
		got[d.rank] = d
		if limit == nil {
			var late context.Context
			late, cancel = h.cfg.Calls.Timeout(context.WithoutCancel(ctx), h.cfg.Limit)
			limit = late.Done()
		}
	}
	leave := func(rank int) {
		if _, reported := got[rank]; !reported && !h.left[rank] {
			silent--
		}
		h.left[rank] = true
	}
	refuse := func(format string, args ...any) ([]delivery, error) {
		err := fmt.Errorf(format, args...)
		for _, d := range got {
			h.answer(d, 0, "", err)
		}
		return nil, err
	}
	for {
		switch {
		case silent > 0:
		case len(got) == 0:
			return nil, nil
		case len(got) < len(h.boxes):
			reported, ended, _ := h.count(got)
			return refuse("%w", &UnevenError{reported, ended})
		default:
			all := make([]delivery, len(got))
			for rank, d := range got {
				all[rank] = d
			}
			return all, nil
		}
		select {
		case d := <-h.in:
			take(d)
		case rank := <-h.finished:
			leave(rank)
		case rank := <-h.gone:
			leave(rank)
			for len(h.in) > 0 { // a last report may be queued before its rank's end: it counts
				take(<-h.in)
			}
		case err := <-h.reports.broke:
			_, _ = refuse("%w", err)
			return nil, &retry.RefusedError{Err: err}
		case <-limit:
			reported, _, silent := h.count(got)
			return refuse("ranks %v have not reported within %v, while ranks %v have", silent, h.cfg.Limit, reported)
		case <-ctx.Done():
			return refuse("%w", ctx.Err())
		}
	}
}

// count returns the ranks that have reported, those that ended without a report,
// and those that may still do either.
func (h *Handoff) count(got map[int]delivery) (reported, ended, silent []int) {
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

// slower compares the nodes by the ranks' own work in an iteration, if all ranks measured it. It
// returns the facts that follow.
func (h *Handoff) slower(got []delivery) []events.Body {
	if h.cfg.Slower == nil || slices.ContainsFunc(got, func(d delivery) bool { return d.busy == nil }) {
		return nil
	}
	busy := make([]float64, len(got))
	for rank, d := range got {
		busy[rank] = *d.busy
	}
	return h.cfg.Slower(busy)
}

// lastWord is a rank's last report, guarded by the rank's mailbox.
type lastWord struct {
	said bool
	step int64
}

// enter takes a rank's mailbox for a report. It refuses reports after the rank's
// last one. A marker does not count as an iteration and needs no mailbox: the
// rank has ended as if its process had.
func (h *Handoff) enter(ctx context.Context, rank int, r client.Report) (counts bool, err error) {
	select { // even after the end, to return the reason
	case h.boxes[rank] <- struct{}{}:
	default:
		select {
		case h.boxes[rank] <- struct{}{}:
		case <-h.over:
			return false, h.why
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
	word := &h.words[rank]
	switch marker := isMarker(r); {
	case word.said:
		err = alreadyDone(rank, word.step)
	case marker:
		*word = lastWord{true, r.Step}
		h.finished <- rank
	default:
		word.said, word.step = r.Done, r.Step
		return true, nil
	}
	<-h.boxes[rank]
	return false, err
}

// Finished reports whether every rank has made its last report and all reports
// are answered.
func (h *Handoff) Finished() bool {
	for rank := range h.words {
		select {
		case h.boxes[rank] <- struct{}{}:
		default:
			return false
		}
		said := h.words[rank].said
		<-h.boxes[rank]
		if !said {
			return false
		}
	}
	return true
}

// leave removes the ranks whose last report was taken.
func (h *Handoff) leave(got []delivery) {
	for rank, d := range got {
		if d.Done {
			h.left[rank] = true
		}
	}
}
