package projections

import (
	"maps"
	"math"
	"reflect"
	"slices"
)

// MetricValue is one value of a metric, and where it was reported.
type MetricValue struct {
	Value     any   `json:"value"`
	Iteration int   `json:"iteration"` // along the line
	Step      int64 `json:"step"`
}

// MetricEnds are the last, the least and the greatest value of a metric. Min and Max
// are nil if all values are NaN; the newer value wins a tie.
type MetricEnds struct {
	Reports int          `json:"reports"` // number of reports that have the metric
	Last    *MetricValue `json:"last"`
	Min     *MetricValue `json:"min,omitempty"`
	Max     *MetricValue `json:"max,omitempty"`
}

// MetricComparison compares a metric in two lines. A or B is nil if that line never
// reported the metric.
type MetricComparison struct {
	Name  string      `json:"name"`
	Equal bool        `json:"equal"` // the same values at the same steps
	A     *MetricEnds `json:"a,omitempty"`
	B     *MetricEnds `json:"b,omitempty"`
	// CommonSteps counts the steps for which both lines reported the metric.
	// FirstDifference is the first of them with different values.
	CommonSteps     int                `json:"common_steps"`
	FirstDifference *MetricDifferences `json:"first_difference,omitempty"`
}

// MetricDifferences are two values of a metric at one step.
type MetricDifferences struct {
	Step int64 `json:"step"`
	A    any   `json:"a"`
	B    any   `json:"b"`
}

// CompareReports compares the metrics of two lines. Each is ordered from the oldest
// report, as [Reports] returns them. Of several reports of one step the last one
// counts. The metrics are sorted by name.
func CompareReports(a, b []Report) []MetricComparison {
	left, right := endsOf(a), endsOf(b)
	names := map[string]bool{}
	for name := range left {
		names[name] = true
	}
	for name := range right {
		names[name] = true
	}
	var out []MetricComparison
	for _, name := range slices.Sorted(maps.Keys(names)) {
		c := MetricComparison{Name: name, A: left[name], B: right[name]}
		in, other := bySteps(a, name), bySteps(b, name)
		c.Equal = len(in) == len(other)
		for _, step := range slices.Sorted(maps.Keys(in)) {
			value, has := other[step]
			if !has {
				c.Equal = false
				continue
			}
			c.CommonSteps++
			if !reflect.DeepEqual(in[step], value) && c.FirstDifference == nil {
				c.Equal, c.FirstDifference = false, &MetricDifferences{step, in[step], value}
			}
		}
		out = append(out, c)
	}
	return out
}

func bySteps(reports []Report, name string) map[int64]any {
	values := map[int64]any{}
	for _, r := range reports {
		if v, has := r.Metrics[name]; has {
			values[r.Step] = v
		}
	}
	return values
}

func endsOf(reports []Report) map[string]*MetricEnds {
	ends := map[string]*MetricEnds{}
	for _, r := range reports {
		for name, value := range r.Metrics {
			e := ends[name]
			if e == nil {
				e = &MetricEnds{}
				ends[name] = e
			}
			e.add(MetricValue{value, r.LineIteration, r.Step})
		}
	}
	return ends
}

// add takes a newer value.
func (e *MetricEnds) add(at MetricValue) {
	e.Reports++
	e.Last = &at
	v, ok := asNumber(at.Value)
	if !ok || math.IsNaN(v) {
		return
	}
	if e.Min == nil {
		e.Min, e.Max = &at, &at
		return
	}
	if least, _ := asNumber(e.Min.Value); v <= least {
		e.Min = &at
	}
	if most, _ := asNumber(e.Max.Value); v >= most {
		e.Max = &at
	}
}

// CommonAncestor returns the newest checkpoint in the lines of descent of both, which
// include the checkpoints themselves. known holds the checkpoints of the trials that
// may be searched, and trials holds those trials: a fork continues another trial's
// checkpoint.
func CommonAncestor(a, b Checkpoint, known []Checkpoint, trials []Trial) (Checkpoint, bool) {
	type id struct{ run, trial, id string }
	rows := map[id]Checkpoint{}
	for _, c := range known {
		rows[id{c.Run, c.Trial, c.ID}] = c
	}
	above := func(c Checkpoint) (Checkpoint, bool) {
		at := id{c.Run, c.Trial, c.Parent}
		if c.ParentSeq == 0 {
			i := slices.IndexFunc(trials, func(t Trial) bool { return t.Run == c.Run && t.Name == c.Trial })
			if i < 0 || trials[i].Parent == nil {
				return Checkpoint{}, false
			}
			p := trials[i].Parent
			at = id{p.Run, p.Trial, p.Checkpoint}
		}
		up, found := rows[at]
		return up, found
	}
	line := map[id]bool{}
	for c, found := a, true; found && !line[id{c.Run, c.Trial, c.ID}]; c, found = above(c) {
		line[id{c.Run, c.Trial, c.ID}] = true
	}
	seen := map[id]bool{}
	for c, found := b, true; found; c, found = above(c) {
		at := id{c.Run, c.Trial, c.ID}
		if line[at] {
			return c, true
		}
		if seen[at] {
			break // no log contains this cycle, and this loop must end
		}
		seen[at] = true
	}
	return Checkpoint{}, false
}
