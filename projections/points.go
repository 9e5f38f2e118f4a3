package projections

import (
	"fmt"
	"maps"
	"math"
	"slices"
)

// PointsRange selects the points of a chart: numbers of metrics over the iterations of a
// trial. Iterations count as in a [MetricsRange].
type PointsRange struct {
	Run, Trial string
	Names      []string // metrics; empty: all
	From       int      // first iteration; 0: the first
	Until      int      // last iteration; 0: the last
	Points     int      // most points of each line, at least 1
	Attempt    int      // only reports of this attempt, hidden or not; 0: of all
	All        bool     // include lines of reports that a resume has hidden
}

// PointsTable is the answer to a [PointsRange].
type PointsTable struct {
	Run        string       `json:"run"`
	Trial      string       `json:"trial"`
	Iterations int          `json:"iterations"` // of the whole line
	Width      int          `json:"width"`      // least number of iterations that a point but the last stands for
	Names      []string     `json:"names"`      // of all metrics in what was read, sorted; strings too
	Texts      []string     `json:"texts"`      // of those asked for that have a value which is no number, sorted
	Lines      []PointsLine `json:"lines"`      // the trial's line, then hidden stretches, the oldest attempt first
}

// PointsLine are the points of one line. A stretch of reports that a resume has hidden is a
// line of its own, of one attempt.
type PointsLine struct {
	Attempt int                       `json:"attempt,omitempty"` // of a hidden line, or of the line if one attempt was asked for
	Hidden  bool                      `json:"hidden,omitempty"`
	Metrics map[string]*PointsColumns `json:"metrics"`
}

// PointsColumns are the points of one metric, a value of each column for each point, in the
// order of iterations. A point summarizes the reports of consecutive iterations exactly: no
// value is left out or interpolated. Min, max and mean are over the finite numbers; each is
// nil if there is none.
type PointsColumns struct {
	X         []int      `json:"x"`       // last iteration of the point that has the metric
	Until     []int      `json:"until"`   // iteration of the last report of the point
	Step      []int64    `json:"step"`    // of that report
	Attempt   []int      `json:"attempt"` // of that report
	Min       []*float64 `json:"min"`
	Max       []*float64 `json:"max"`
	Mean      []*float64 `json:"mean"`
	Last      []*float64 `json:"last"`      // nil if the last number is not finite
	AtMin     []int      `json:"argmin"`    // iteration of min, the first of equals; 0 without one
	AtMax     []int      `json:"argmax"`    // iteration of max
	Count     []int      `json:"count"`     // reports with a number
	NonFinite []int      `json:"nonfinite"` // NaN and infinite numbers among them
}

// Points returns the numbers of a chart. Its cost follows from the number of points, not
// from the number of reports: it reads rollups, and reports only at the edges of the range
// and of what has been reported.
func Points(r Reader, q PointsRange) (PointsTable, error) {
	out := PointsTable{Run: q.Run, Trial: q.Trial, Width: 1, Names: []string{}, Texts: []string{}, Lines: []PointsLine{}}
	if q.From < 0 || q.Until < 0 || q.Points < 1 || q.Attempt < 0 || q.Until != 0 && q.Until < q.From {
		return out, fmt.Errorf("%w: points from iteration %d until %d in %d points: want no number below 0, a point at least, and an end that is not before the start", ErrReference, q.From, q.Until, q.Points)
	}
	t, err := GetTrial(r, q.Run, q.Trial)
	if err != nil {
		return out, err
	}
	out.Iterations = t.Iterations
	line, err := lineBranches(r, t)
	if err != nil {
		return out, err
	}
	slices.Reverse(line) // the oldest first
	var hidden []branch
	if q.All || q.Attempt > 0 {
		if hidden, err = hiddenBranches(r, t, line); err != nil {
			return out, err
		}
	}
	others := func(b branch) bool { return q.Attempt > 0 && b.attempt != q.Attempt }
	line, hidden = slices.DeleteFunc(line, others), slices.DeleteFunc(hidden, others)
	lo, hi := max(q.From, 1), 0
	for _, b := range slices.Concat(line, hidden) {
		hi = max(hi, b.base+b.to-b.from)
	}
	if q.Until != 0 {
		hi = min(hi, q.Until)
	}
	if hi < lo {
		hi = lo - 1
	}
	out.Width = max(1, (hi-lo+q.Points)/q.Points)
	p := pointing{r: r, t: t, lo: lo, hi: hi, width: out.Width, names: map[string]bool{}, texts: map[string]bool{}}
	if len(q.Names) > 0 {
		wanted := map[string]bool{}
		for _, name := range q.Names {
			wanted[name] = true
		}
		p.want = func(name []byte) bool { return wanted[string(name)] }
	}
	own, err := p.line(line)
	if err != nil {
		return out, err
	}
	own.Attempt = q.Attempt
	out.Lines = append(out.Lines, own)
	for _, b := range hidden {
		one, err := p.line([]branch{b})
		if err != nil {
			return out, err
		}
		if one.Attempt, one.Hidden = b.attempt, true; len(one.Metrics) > 0 {
			out.Lines = append(out.Lines, one)
		}
	}
	out.Names = slices.AppendSeq(out.Names, maps.Keys(p.names))
	out.Texts = slices.AppendSeq(out.Texts, maps.Keys(p.texts))
	slices.Sort(out.Names)
	slices.Sort(out.Texts)
	return out, nil
}

// pointing reads the points of one table.
type pointing struct {
	r      Reader
	t      Trial
	lo, hi int // iterations of the line
	width  int
	want   func(name []byte) bool // nil: all
	names  map[string]bool
	texts  map[string]bool

	// Of the line that is read.
	out   PointsLine
	shift int // from an iteration of the attempt to that of the line
	at    int // attempt
	begin int // first iteration of the open point; 0: none is open
	open  tallies
	until int // of the line, like step and attempt of the last report that was added
	step  int64
	of    int
}

// line reads branches that follow each other, the oldest first.
func (p *pointing) line(branches []branch) (PointsLine, error) {
	p.out = PointsLine{Metrics: map[string]*PointsColumns{}}
	for _, b := range branches {
		p.at, p.shift = b.attempt, b.base-b.from
		first, last := max(b.from+1, p.lo-p.shift), min(b.to, p.hi-p.shift)
		if first > last {
			continue
		}
		if err := p.read(levelFor(p.width), first, last); err != nil {
			return p.out, err
		}
	}
	p.close()
	return p.out, nil
}

// levelFor returns the level of rollups that points of a width are made of. There may be up
// to half as many points as were asked for, of rows whose number is at most 8 times that.
func levelFor(width int) int {
	level := 0
	for level < topLevel && spanOf(level+1) <= 2*width {
		level++
	}
	return level
}

// read adds the iterations from first to last, in order. Where a rollup of the level is
// missing, or covers other iterations too, it reads the level below.
func (p *pointing) read(level, first, last int) error {
	if first > last {
		return nil
	}
	if level == 0 {
		return p.readReports(first, last)
	}
	span := spanOf(level)
	from, until := (first-1+span-1)/span, last/span // buckets that lie within
	if from >= until {
		return p.read(level-1, first, last)
	}
	next := first
	lo, hi := rollupKey(p.t.Run, p.t.Name, p.at, level, from), rollupKey(p.t.Run, p.t.Name, p.at, level, until)
	err := p.r.Scan(lo, hi, func(k, value []byte) error {
		u, err := decodeRollup(k, value, p.filter)
		if err != nil {
			return err
		}
		if err := p.read(level-1, next, u.first-1); err != nil {
			return err
		}
		next = u.last + 1
		p.add(u.first, u.last, u.steps[1], u.metrics)
		return nil
	})
	if err != nil {
		return err
	}
	return p.read(level-1, next, last)
}

// filter notes a metric, and reports whether it is wanted.
func (p *pointing) filter(name []byte) bool {
	if !p.names[string(name)] {
		p.names[string(name)] = true
	}
	return p.want == nil || p.want(name)
}

// readReports adds reports, whose rows come the newest first.
func (p *pointing) readReports(first, last int) error {
	type one struct {
		iteration int
		step      int64
		metrics   tallies
	}
	var found []one
	var raw rawReport
	lo, hi := reportKey(p.t.Run, p.t.Name, p.at, last), reportKey(p.t.Run, p.t.Name, p.at, first-1)
	err := p.r.Scan(lo, hi, func(k, value []byte) error {
		if err := raw.read(value); err != nil {
			return err
		}
		o := one{iteration: iterationOf(k), step: raw.step}
		for _, v := range raw.values {
			if p.filter(v.name) {
				t := &tally{name: string(v.name)}
				t.add(o.iteration, v.value, v.number)
				o.metrics = append(o.metrics, t)
			}
		}
		found = append(found, o)
		return nil
	})
	for _, o := range slices.Backward(found) {
		p.add(o.iteration, o.iteration, o.step, o.metrics)
	}
	return err
}

// add adds later iterations of the attempt to the open point, and closes it once it is wide
// enough. Points close at the width, so there are at most as many as were asked for.
func (p *pointing) add(first, last int, step int64, metrics tallies) {
	if p.begin == 0 {
		p.begin = first + p.shift
	}
	for i, t := range metrics {
		into := p.open.of([]byte(t.name), i)
		shifted := *t
		shifted.atMin, shifted.atMax, shifted.atLast = t.atMin+p.shift, t.atMax+p.shift, t.atLast+p.shift
		into.merge(&shifted)
	}
	p.until, p.step, p.of = last+p.shift, step, p.at
	if last+p.shift-p.begin+1 >= p.width {
		p.close()
	}
}

// close ends the open point.
func (p *pointing) close() {
	for _, t := range p.open {
		if t.numbers > 0 {
			p.column(t)
		}
		if t.others > 0 {
			p.texts[t.name] = true
		}
	}
	p.begin, p.open = 0, nil
}

// column adds the open point to the columns of a metric.
func (p *pointing) column(t *tally) {
	c := p.out.Metrics[t.name]
	if c == nil {
		c = &PointsColumns{}
		p.out.Metrics[t.name] = c
	}
	c.X, c.Until = append(c.X, t.atLast), append(c.Until, p.until)
	c.Step, c.Attempt = append(c.Step, p.step), append(c.Attempt, p.of)
	c.Count, c.NonFinite = append(c.Count, t.numbers), append(c.NonFinite, t.nan+t.inf+t.neg)
	var least, most, mean, last *float64
	atMin, atMax := 0, 0
	if n := t.finite(); n > 0 {
		average := t.sum / float64(n)
		least, most, mean, atMin, atMax = &t.min, &t.max, finite(average), t.atMin, t.atMax
	}
	last = finite(t.value)
	c.Min, c.Max, c.Mean, c.Last = append(c.Min, least), append(c.Max, most), append(c.Mean, mean), append(c.Last, last)
	c.AtMin, c.AtMax = append(c.AtMin, atMin), append(c.AtMax, atMax)
}

// finite returns a number, or nil if it is not finite.
func finite(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}
