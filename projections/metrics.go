package projections

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// MetricsRange selects reports of a trial. Iterations count from 1 along the line: an
// attempt that resumed from iteration 40 continues at 41.
type MetricsRange struct {
	Run, Trial string
	Names      []string // metrics; empty: all
	From       int      // first iteration; 0: the first
	Until      int      // last iteration; 0: the last
	Points     int      // most rows of the line, and of each hidden attempt; 0: a row for each report
	All        bool     // include reports that a resume has hidden
}

// MetricsTable is the answer to a [MetricsRange], in the order of iterations. Where the
// line and its abandoned branches overlap, older attempts come first.
type MetricsTable struct {
	Run        string       `json:"run"`
	Trial      string       `json:"trial"`
	Iterations int          `json:"iterations"` // of the whole line
	Width      int          `json:"width"`      // iterations that one row stands for
	Names      []string     `json:"names"`      // of all metrics in the range, sorted
	Rows       []MetricsRow `json:"rows"`
}

// MetricsRow summarizes the reports of up to [MetricsTable.Width] iterations.
type MetricsRow struct {
	Attempt        int                `json:"attempt"`   // of the last report
	Iteration      int                `json:"iteration"` // of the first report, along the line
	UntilIteration int                `json:"until_iteration"`
	Step           int64              `json:"step"` // of the last report
	Time           time.Time          `json:"time"` // of the last report
	Seconds        float64            `json:"seconds"`
	Reports        int                `json:"reports"`
	Hidden         bool               `json:"hidden,omitempty"` // a resume went back before it
	Metrics        map[string]Summary `json:"metrics"`          // rank 0's

	// Ranks are the metrics of the last report over all ranks, in a large group.
	Ranks []events.MetricSummary `json:"ranks,omitempty"`
}

// Summary summarizes one metric over the reports of a row. Numbers that are not finite
// are the strings "NaN", "Infinity" and "-Infinity". Min and Max ignore NaN, and are
// absent if there is no other number.
type Summary struct {
	Count int `json:"count"` // number of reports that have the metric
	Min   any `json:"min,omitempty"`
	Max   any `json:"max,omitempty"`
	Last  any `json:"last"` // unchanged: a number, a string or a boolean
	NaNs  int `json:"nans,omitempty"`
}

// Metrics returns the reports of a trial in a range of iterations, summarized so that
// the rows are few and no spike is lost. It reads only the reports of the range.
func Metrics(r Reader, q MetricsRange) (MetricsTable, error) {
	out := MetricsTable{Run: q.Run, Trial: q.Trial, Width: 1, Names: []string{}, Rows: []MetricsRow{}}
	if q.From < 0 || q.Until < 0 || q.Points < 0 || q.Until != 0 && q.Until < q.From {
		return out, fmt.Errorf("%w: metrics from iteration %d until %d in %d points: want no number below 0, and an end that is not before the start", ErrReference, q.From, q.Until, q.Points)
	}
	t, err := GetTrial(r, q.Run, q.Trial)
	if err != nil {
		return out, err
	}
	out.Iterations = t.Iterations
	branches, err := lineBranches(r, t)
	if err == nil && q.All {
		var left []branch
		left, err = hiddenBranches(r, t, branches)
		branches = append(branches, left...)
	}
	if err != nil {
		return out, err
	}
	s := summing{q: q, lo: max(q.From, 1), rows: map[rowKey]*MetricsRow{}, names: map[string]bool{}}
	for _, b := range branches {
		s.hi = max(s.hi, b.base+b.to-b.from)
	}
	if q.Until != 0 {
		s.hi = min(s.hi, q.Until)
	}
	if span := s.hi - s.lo + 1; q.Points > 0 && span > q.Points {
		out.Width = (span + q.Points - 1) / q.Points
	}
	s.width = out.Width
	for _, b := range branches {
		if err := s.read(r, t, b); err != nil {
			return out, err
		}
	}
	for _, row := range s.rows {
		out.Rows = append(out.Rows, *row)
	}
	slices.SortFunc(out.Rows, func(a, b MetricsRow) int {
		return cmp.Or(cmp.Compare(a.Iteration, b.Iteration), cmp.Compare(a.Attempt, b.Attempt), cmp.Compare(a.UntilIteration, b.UntilIteration))
	})
	out.Names = slices.AppendSeq(out.Names, maps.Keys(s.names))
	slices.Sort(out.Names)
	return out, nil
}

// summing collects reports into rows.
type summing struct {
	q             MetricsRange
	lo, hi, width int
	rows          map[rowKey]*MetricsRow
	names         map[string]bool
}

// rowKey identifies one row. Rows of the line may span attempts.
type rowKey struct {
	hidden  bool
	attempt int // 0 for the line
	bucket  int
}

// read summarizes the part of a branch that is in the range. Rows come newest first,
// and so do the branches of the line.
func (s *summing) read(r Reader, t Trial, b branch) error {
	first := max(b.from+1, s.lo-b.base+b.from)
	last := min(b.to, s.hi-b.base+b.from)
	if first > last {
		return nil
	}
	lo := reportKey(t.Run, t.Name, b.attempt, last)
	hi := reportKey(t.Run, t.Name, b.attempt, first-1)
	return r.Scan(lo, hi, func(k, value []byte) error {
		report, err := decodeReport(k, value)
		if err != nil {
			return err
		}
		report.LineIteration = b.base + report.Iteration - b.from
		s.add(report, b.hidden)
		return nil
	})
}

func (s *summing) add(report Report, hidden bool) {
	k := rowKey{hidden: hidden, bucket: (report.LineIteration - s.lo) / s.width}
	if hidden {
		k.attempt = report.Attempt
	}
	row := s.rows[k]
	if row == nil {
		row = &MetricsRow{
			Attempt: report.Attempt, Iteration: report.LineIteration, UntilIteration: report.LineIteration,
			Step: report.Step, Time: report.Time, Hidden: hidden, Metrics: map[string]Summary{}, Ranks: s.selected(report.Summary),
		}
		s.rows[k] = row
	}
	row.Iteration = min(row.Iteration, report.LineIteration)
	row.UntilIteration = max(row.UntilIteration, report.LineIteration)
	row.Reports++
	row.Seconds += report.Seconds
	for name, value := range report.Metrics {
		s.names[name] = true
		if len(s.q.Names) > 0 && !slices.Contains(s.q.Names, name) {
			continue
		}
		row.Metrics[name] = row.Metrics[name].with(value)
	}
}

// selected returns the summaries of the metrics that are asked for.
func (s *summing) selected(all []events.MetricSummary) (out []events.MetricSummary) {
	for _, of := range all {
		if len(s.q.Names) == 0 || slices.Contains(s.q.Names, of.Name) {
			out = append(out, of)
		}
	}
	return out
}

// with adds an older value.
func (s Summary) with(value any) Summary {
	if s.Count++; s.Count == 1 {
		s.Last = value
	}
	v, ok := asNumber(value)
	switch {
	case !ok:
		return s
	case math.IsNaN(v):
		s.NaNs++
		return s
	}
	if least, ok := asNumber(s.Min); !ok || v < least {
		s.Min = value
	}
	if most, ok := asNumber(s.Max); !ok || v > most {
		s.Max = value
	}
	return s
}
