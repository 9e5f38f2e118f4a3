package insight

import (
	"math"

	"github.com/ckptstore/ckptstore/projections"
)

// Exact returns the reports of a row: of one metric, or of all if the name is
// empty.
type Exact func(row projections.MetricsRow, name string) (projections.MetricsTable, error)

// Highlights finds the last, the least and the greatest value of a metric in the
// line. A row that sums up several reports lacks the step of its least value, and
// the step of its last value if its last report lacks the metric. Highlights
// reads the reports of such a row by exact.
func Highlights(table projections.MetricsTable, name string, exact Exact) (h projections.MetricEnds, err error) {
	var last, least, most *projections.MetricsRow
	low, high := math.Inf(1), math.Inf(-1)
	for i := range table.Rows {
		row := &table.Rows[i]
		s, has := row.Metrics[name]
		if !has || row.Hidden {
			continue
		}
		last = row
		h.Reports += s.Count
		if v, ok := projections.Number(s.Min); ok && v <= low {
			low, least = v, row
		}
		if v, ok := projections.Number(s.Max); ok && v >= high {
			high, most = v, row
		}
	}
	find := func(row *projections.MetricsRow, is func(any) bool) (*projections.MetricValue, error) {
		if row == nil {
			return nil, nil
		}
		rows := []projections.MetricsRow{*row}
		if row.Reports > 1 {
			t, err := exact(*row, name)
			if err != nil {
				return nil, err
			}
			rows = t.Rows
		}
		var found *projections.MetricValue
		for _, r := range rows {
			if s, has := r.Metrics[name]; has && !r.Hidden && is(s.Last) {
				found = &projections.MetricValue{Value: s.Last, Iteration: r.Iteration, Step: r.Step}
			}
		}
		return found, nil
	}
	equals := func(want float64) func(any) bool {
		return func(v any) bool { n, ok := projections.Number(v); return ok && n == want }
	}
	if h.Last, err = find(last, func(any) bool { return true }); err != nil {
		return h, err
	}
	if h.Min, err = find(least, equals(low)); err != nil {
		return h, err
	}
	h.Max, err = find(most, equals(high))
	return h, err
}

// Span returns the first and the last row of a table in its line. The first is a
// single report: if the row sums up several, Span reads it by exact.
func Span(table projections.MetricsTable, exact Exact) (first, last projections.MetricsRow, err error) {
	first, last = table.Rows[0], table.Rows[0]
	for _, row := range table.Rows {
		if row.UntilIteration >= last.UntilIteration {
			last = row
		}
	}
	if first.Reports > 1 { // its step is that of its last report
		first.UntilIteration = first.Iteration
		one, err := exact(first, "")
		if err != nil {
			return first, last, err
		}
		first = one.Rows[0]
	}
	return first, last, nil
}

// Point is one place on the x axis: a stroke from the least to the greatest value
// there, and a line from the last value to the next point's. A place without
// numbers is a gap.
type Point struct {
	X                float64
	Least, Most, End float64
	Gap              bool
}

// Series is a line of points in the order of x.
type Series struct {
	Points []Point
	Dim    bool // drawn behind the others
}

// Drawing is the drawable part of a metric, with the counts of the values that
// cannot be drawn.
type Drawing struct {
	Lines       []Series
	NotFinite   int // NaN or infinite
	NotPositive int // not above zero, on a logarithmic axis
	NotNumbers  int // no numbers
}

// Lines returns the line of a metric and, behind it, the reports that a resume
// has hidden. On a logarithmic axis only numbers above zero can be drawn.
func Lines(table projections.MetricsTable, name string, log bool) Drawing {
	var d Drawing
	line, hidden := Series{}, map[int]*Series{}
	var order []int
	for _, row := range table.Rows {
		s, has := row.Metrics[name]
		if !has {
			continue // reported less often than others: no gap
		}
		at := d.point(s, log)
		at.X = (float64(row.Iteration) + float64(row.UntilIteration)) / 2
		if !row.Hidden {
			line.Points = append(line.Points, at)
			continue
		}
		if hidden[row.Attempt] == nil {
			hidden[row.Attempt] = &Series{Dim: true}
			order = append(order, row.Attempt)
		}
		hidden[row.Attempt].Points = append(hidden[row.Attempt].Points, at)
	}
	for _, attempt := range order {
		d.Lines = append(d.Lines, *hidden[attempt])
	}
	d.Lines = append(d.Lines, line)
	return d
}

func (d *Drawing) point(s projections.Summary, log bool) Point {
	least, ok := projections.Number(s.Min)
	most, _ := projections.Number(s.Max)
	end, isNumber := projections.Number(s.Last)
	switch {
	case !ok && s.NaNs == 0:
		d.NotNumbers++
		return Point{Gap: true}
	case !ok || math.IsInf(least, 0) || math.IsInf(most, 0):
		d.NotFinite++
		return Point{Gap: true}
	case log && least <= 0:
		d.NotPositive++
		return Point{Gap: true}
	}
	if s.NaNs > 0 {
		d.NotFinite++
	}
	if !isNumber || math.IsNaN(end) {
		end = most
	}
	return Point{Least: least, Most: most, End: end}
}
