package session

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"reflect"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/retry"
	"github.com/ckptstore/ckptstore/internal/stragglers"
)

// handoff collects the reports of all ranks, one iteration at a time. Each rank
// has a mailbox of capacity one and blocks until the iteration is in the log, so
// nothing that a rank did before its report returned is lost, and no rank runs
// ahead of the others. While the log does not answer, all ranks together may run
// ahead of it: see reports.
type handoff struct {
	attempt  int
	limit    time.Duration // until all ranks have reported
	now      func() time.Time
	store    Store // the limit excludes the time in which it does not answer
	reports  *reports
	boxes    []chan struct{} // a rank's box holds a token while its report is unanswered
	in       chan delivery   // at most one per rank: sending never blocks
	gone     chan int        // a rank whose process has ended, once: sending never blocks
	left     map[int]bool    // ranks received from gone, or finished; owned by run's goroutine
	words    []lastWord      // by rank, guarded by its box
	finished chan int        // a rank that has returned without a last report, once: sending never blocks
	over     chan struct{}   // closed when reports are no longer taken
	why      error           // set before over is closed

	told func(context.Context, *events.Metrics) // of each iteration, before stop; nil: not called
	stop func() string                          // request to all ranks of an iteration: stop, save and stop, or none
	step atomic.Int64                           // of the newest iteration; -1 before the first
	slow *stragglers.Watch                      // nil: the nodes are not compared

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

func newHandoff(attempt, world int, limit time.Duration, now func() time.Time, record func(context.Context, ...events.Body) error) *handoff {
	h := &handoff{
		attempt: attempt, limit: limit, now: now, reports: newReports(record, slog.New(slog.DiscardHandler)),
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

// ended records that a rank's process is gone. It is called once per rank. A
// report that the rank had handed over still counts.
func (h *handoff) ended(rank int) { h.gone <- rank }

// report hands over rank's report and blocks until the iteration is in the log.
// The answer has the trainer's request to all ranks of that iteration.
func (h *handoff) report(ctx context.Context, rank int, r client.Report) (of Reported, err error) {
	took, err := ownTime(r.Metrics, metricTimeThisIter)
	if err != nil {
		return of, err
	}
	busy, err := ownTime(r.Metrics, metricBusyThisIter)
	if err != nil {
		return of, err
	}
	d := delivery{r, rank, h.now(), took, busy, make(chan reportAnswer, 1)}
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
func (h *handoff) answer(d delivery, iteration int, stop string, err error) {
	d.done <- reportAnswer{Reported{Iteration: iteration, Stop: stop, Done: d.Done, Step: d.Step}, err}
	<-h.boxes[d.rank]
}

// run collects iterations until every rank has ended. It returns the number of
// iterations that the log has, or will have when the reports have settled. An
// iteration refused for lack of space fails only its own reports. If ranks
// disagree on whether there is another iteration, the error names them.
func (h *handoff) run(ctx context.Context) (iterations int, err error) {
	defer func() {
		h.why = cmpErr(err, errors.New("the attempt is over: no report is taken any more"))
		close(h.over)
	}()
	last := h.began // a report may have arrived before this goroutine started
	iterations = h.from
	for {
		got, err := h.collect(ctx)
		if err != nil || got == nil {
			return iterations, err
		}
		m := h.merge(iterations+1, got, got[0].at.Sub(last))
		err = h.reports.add(ctx, m, h.slower(got)...)
		last = h.now()
		h.leave(got)
		stop := ""
		if err == nil {
			h.step.Store(got[0].Step)
			if h.told != nil {
				h.told(ctx, m)
				last = h.now() // the wait is no part of the ranks' next iteration
			}
			stop = h.stop() // called once, so that the ranks agree on the iteration
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
func (h *handoff) collect(ctx context.Context) ([]delivery, error) {
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
			late, cancel = h.store.calls.Timeout(context.WithoutCancel(ctx), h.limit)
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
			return refuse("ranks %v have not reported within %v, while ranks %v have", silent, h.limit, reported)
		case <-ctx.Done():
			return refuse("%w", ctx.Err())
		}
	}
}

// count returns the ranks that have reported, those that ended without a report,
// and those that may still do either.
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

// merge builds the iteration's event: rank 0's metrics are the trial's. Other
// ranks are listed where they differ, or summarized in a large group.
func (h *handoff) merge(iteration int, got []delivery, took time.Duration) *events.Metrics {
	m := &events.Metrics{
		Attempt: h.attempt, Iteration: iteration, Step: got[0].Step,
		Metrics: got[0].Metrics, Seconds: took.Seconds(),
	}
	if got[0].took != nil {
		m.Seconds = *got[0].took
	}
	m.Slowest = slowest(got)
	if len(got) > exactRanks {
		m.Summary, m.Others = summarize(got)
		return m
	}
	for rank, d := range got[1:] {
		if !reflect.DeepEqual(d.Metrics, m.Metrics) {
			m.Others = append(m.Others, events.RankMetrics{Rank: rank + 1, Metrics: d.Metrics})
		}
	}
	return m
}

// slower compares the nodes by the ranks' own work in an iteration, if all ranks measured it. It
// returns the facts that follow.
func (h *handoff) slower(got []delivery) []events.Body {
	if h.slow == nil || slices.ContainsFunc(got, func(d delivery) bool { return d.busy == nil }) {
		return nil
	}
	busy := make([]float64, len(got))
	for rank, d := range got {
		busy[rank] = *d.busy
	}
	return logSlow(h.reports.log, h.slow.Sample(stragglers.Busy, busy))
}

// logSlow logs and returns facts about the speed of nodes.
func logSlow(log *slog.Logger, facts []events.Body) []events.Body {
	for _, f := range facts {
		switch b, _ := f.(*events.NodeSlow); {
		case b == nil:
		case b.Over:
			log.Info("node is no longer slow", "node", b.Node, "by", b.By, "seconds", b.Seconds, "others", b.Others)
		default:
			log.Warn("node is slow", "node", b.Node, "by", b.By, "seconds", b.Seconds, "others", b.Others)
		}
	}
	return facts
}

// slowest returns the last of several ranks to report, the lowest of equals.
func slowest(got []delivery) *events.SlowestRank {
	if len(got) < 2 {
		return nil
	}
	begin, last := 0, 0
	for rank, d := range got {
		if d.at.Before(got[begin].at) {
			begin = rank
		}
		if d.at.After(got[last].at) {
			last = rank
		}
	}
	return &events.SlowestRank{Rank: last, Late: *events.Seconds(got[last].at.Sub(got[begin].at))}
}

// Bounds of an iteration's event in a large group.
const (
	exactRanks     = 1024      // largest group whose event has the metrics of each rank
	mostOutliers   = 32        // ranks that the event of a larger one lists
	outlierSigmas  = 3         // standard deviations from the mean beyond which a rank is one
	summarizedText = 128 << 10 // bytes of the names of the metrics that it summarizes
)

// summarize returns each numeric metric over all ranks, and the ranks that are furthest
// from the mean in one of them. Metrics of rank 0 come first if there are too many.
func summarize(got []delivery) (all []events.MetricSummary, outliers []events.RankMetrics) {
	names := slices.Sorted(maps.Keys(got[0].Metrics))
	text := 0
	count := func(name string) {
		quoted, _ := json.Marshal(name) // a string cannot fail
		text += len(quoted) + rankSpare
	}
	for _, name := range names {
		count(name)
	}
	more := map[string]bool{}
	for _, d := range got[1:] {
		for name := range d.Metrics {
			if _, of0 := got[0].Metrics[name]; !of0 && !more[name] && text < summarizedText {
				more[name] = true
				count(name)
			}
		}
	}
	names = append(names, slices.Sorted(maps.Keys(more))...)
	far := make([]float64, len(got)) // standard deviations from the mean
	for _, name := range names {
		if s, ok := summaryOf(name, got, far); ok {
			all = append(all, s)
		}
	}
	var ranks []int
	for rank, by := range far {
		if rank > 0 && by > outlierSigmas {
			ranks = append(ranks, rank)
		}
	}
	slices.SortStableFunc(ranks, func(a, b int) int { return cmp.Compare(far[b], far[a]) })
	ranks = ranks[:min(len(ranks), mostOutliers)]
	slices.Sort(ranks)
	for _, rank := range ranks {
		outliers = append(outliers, events.RankMetrics{Rank: rank, Metrics: got[rank].Metrics})
	}
	return all, outliers
}

// summaryOf returns one metric over all ranks, unless it is no number on any. It raises
// the distance of each rank from the mean; that of NaN is infinite.
func summaryOf(name string, got []delivery, far []float64) (events.MetricSummary, bool) {
	s := events.MetricSummary{Name: name}
	least, most, sum, squares := math.Inf(1), math.Inf(-1), 0.0, 0.0
	for rank, d := range got {
		v, ok := number(d.Metrics[name])
		switch {
		case !ok:
			continue
		case math.IsNaN(v):
			s.NaNs++
			far[rank] = math.Inf(1)
			continue
		}
		if s.Ranks == 0 || v < least {
			least, s.MinOf = v, rank
		}
		if s.Ranks == 0 || v > most {
			most, s.MaxOf = v, rank
		}
		s.Ranks++
		delta := v - sum // sum is the mean so far
		sum += delta / float64(s.Ranks)
		squares += delta * (v - sum)
	}
	if s.Ranks == 0 {
		return s, s.NaNs > 0
	}
	s.Min, s.Max, s.Mean = loggable(least), loggable(most), loggable(sum)
	deviation := math.Sqrt(squares / float64(s.Ranks))
	for rank, d := range got {
		v, ok := number(d.Metrics[name])
		if by := math.Abs(v-sum) / deviation; ok && (by > far[rank] || math.IsInf(v, 0)) {
			far[rank] = max(by, far[rank])
			if math.IsInf(v, 0) {
				far[rank] = math.Inf(1)
			}
		}
	}
	return s, true
}

// nonFinites are the numbers that JSON has no form for, by their names in the log.
var nonFinites = map[string]float64{"NaN": math.NaN(), "Infinity": math.Inf(1), "-Infinity": math.Inf(-1)}

// number returns the value of a metric if it is a number.
func number(metric any) (v float64, ok bool) {
	switch m := metric.(type) {
	case float64:
		return m, true
	case string:
		v, ok = nonFinites[m]
		return v, ok
	}
	return 0, false
}

// loggable returns a number in the form of the log.
func loggable(v float64) any {
	switch {
	case math.IsNaN(v):
		return "NaN"
	case math.IsInf(v, 1):
		return "Infinity"
	case math.IsInf(v, -1):
		return "-Infinity"
	}
	return v
}

// lastWord is a rank's last report, guarded by the rank's mailbox.
type lastWord struct {
	said bool
	step int64
}

// enter takes a rank's mailbox for a report. It refuses reports after the rank's
// last one. A marker does not count as an iteration and needs no mailbox: the
// rank has ended as if its process had.
func (h *handoff) enter(ctx context.Context, rank int, r client.Report) (counts bool, err error) {
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

// finishedAll reports whether every rank has made its last report and all reports
// are answered.
func (h *handoff) finishedAll() bool {
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
func (h *handoff) leave(got []delivery) {
	for rank, d := range got {
		if d.Done {
			h.left[rank] = true
		}
	}
}
