package main

import (
	"math"

	"github.com/ckptstore/ckptstore/projections"
)

// exactly asks for the reports of a row, of one metric or, if it is "", of all.
type exactly func(row projections.MetricsRow, name string) (projections.MetricsTable, error)

// highlights finds the ends of a metric in the line. A row that sums up several reports knows neither the
// step of its least value nor, if it lacks the metric in the end, that of its
// last: exact asks for the reports of such a row.
func highlights(table projections.MetricsTable, name string, exact exactly) (h projections.MetricEnds, err error) {
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

// span returns the first and the last row of a table in its line. The first is a
// single report: exact asks for it where the row sums up several.
func span(table projections.MetricsTable, exact exactly) (first, last projections.MetricsRow, err error) {
	first, last = table.Rows[0], table.Rows[0]
	for _, row := range table.Rows {
		if row.UntilIteration >= last.UntilIteration {
			last = row
		}
	}
	if first.Reports > 1 { // its step is that of its last one
		first.UntilIteration = first.Iteration
		one, err := exact(first, "")
		if err != nil {
			return first, last, err
		}
		first = one.Rows[0]
	}
	return first, last, nil
}

// point is what is drawn of one place on the x axis: a stroke from the least
// to the greatest value there, and a line from the last value to the next
// point's. A place without numbers is a gap.
type point struct {
	x                float64
	least, most, end float64
	gap              bool
}

// series is a line of points in the order of x.
type series struct {
	points []point
	dim    bool // drawn behind the others
}

// drawing is what can be drawn of a metric, and how many places have numbers
// that cannot.
type drawing struct {
	lines      []series
	unfinished int // NaN or infinite
	negative   int // not above zero, on a logarithmic axis
	other      int // no numbers
}

// lines are the line of a metric and, behind it, what a resume has hidden.
func lines(table projections.MetricsTable, name string, log bool) drawing {
	var d drawing
	line, hidden := series{}, map[int]*series{}
	var order []int
	for _, row := range table.Rows {
		s, has := row.Metrics[name]
		if !has {
			continue // reported less often than others: no gap
		}
		at := d.point(s, log)
		at.x = (float64(row.Iteration) + float64(row.UntilIteration)) / 2
		if !row.Hidden {
			line.points = append(line.points, at)
			continue
		}
		if hidden[row.Attempt] == nil {
			hidden[row.Attempt] = &series{dim: true}
			order = append(order, row.Attempt)
		}
		hidden[row.Attempt].points = append(hidden[row.Attempt].points, at)
	}
	for _, attempt := range order {
		d.lines = append(d.lines, *hidden[attempt])
	}
	d.lines = append(d.lines, line)
	return d
}

func (d *drawing) point(s projections.Summary, log bool) point {
	least, ok := projections.Number(s.Min)
	most, _ := projections.Number(s.Max)
	end, isNumber := projections.Number(s.Last)
	switch {
	case !ok && s.NaNs == 0:
		d.other++
		return point{gap: true}
	case !ok || math.IsInf(least, 0) || math.IsInf(most, 0):
		d.unfinished++
		return point{gap: true}
	case log && least <= 0:
		d.negative++
		return point{gap: true}
	}
	if s.NaNs > 0 {
		d.unfinished++
	}
	if !isNumber || math.IsNaN(end) {
		end = most
	}
	return point{least: least, most: most, end: end}
}
