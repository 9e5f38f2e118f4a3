package api

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

const metricsText = `The metrics of a run along its current line, as in ` + "`ckptstore metrics RUN --json`" + `, in columns.
Each row summarizes consecutive iterations, at least width of them, by the least and the greatest finite value and the last
one, so spikes stay visible. Numbers have 6 significant digits. null stands for a last value that is not finite, and for the
least and the greatest of none; nonfinite counts the reports with NaN or an infinity.`

// OfMetrics selects metrics.
type OfMetrics struct {
	Moment
	Run    string   `path:"run"`
	Trial  string   `query:"trial" doc:"Of the run, if it has several"`
	Metric []string `query:"metric,explode" doc:"Only this metric; repeatable"`
	From   int      `query:"from" minimum:"1" doc:"First iteration along the line"`
	Until  int      `query:"until" minimum:"1" doc:"Last iteration along the line"`
	Points int      `query:"points" minimum:"1" maximum:"5000" default:"800" doc:"Most rows of the line, and of each superseded stretch of an attempt"`
	All    bool     `query:"all" doc:"Also reports that a resume superseded"`
}

// Digits is a number with 6 significant digits; null if it is not finite.
type Digits float64

// MarshalJSON implements [json.Marshaler].
func (d Digits) MarshalJSON() ([]byte, error) {
	v := float64(d)
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return []byte("null"), nil
	}
	return strconv.AppendFloat(nil, v, 'g', 6, 64), nil
}

var _ huma.SchemaProvider = Digits(0)

// Schema implements [huma.SchemaProvider].
func (Digits) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{Type: huma.TypeNumber, Nullable: true}
}

// Columns are the metrics of a trial.
type Columns struct {
	Run        string   `json:"run"`
	Trial      string   `json:"trial"`
	Iterations int      `json:"iterations"` // of the whole line
	Width      int      `json:"width"`      // least number of iterations that a row stands for
	Names      []string `json:"names"`      // of all metrics in the range, sorted
	Lines      []Line   `json:"lines"`      // the current line first, then what resumes superseded, by attempt
}

// Line is the current line, or the part of an attempt that a resume superseded.
type Line struct {
	Hidden  bool               `json:"hidden"`  // superseded
	Attempt int                `json:"attempt"` // of the last report
	Metrics map[string]*Column `json:"metrics"` // numbers, by name
	Texts   map[string]*Text   `json:"texts"`   // metrics that are no numbers, by name
}

// Column is a metric of a line. Its members have one value for each row that has the metric.
type Column struct {
	X         []int    `json:"x"`       // iteration of the row's last report
	Step      []int64  `json:"step"`    // of the row's last report
	Attempt   []int    `json:"attempt"` // of the row's last report
	Min       []Digits `json:"min"`     // of the finite numbers; null without one
	Max       []Digits `json:"max"`
	Last      []Digits `json:"last"`      // the last number; null if it is not finite
	NonFinite []int    `json:"nonfinite"` // reports with NaN or an infinity
}

// Text is a metric of a line that is no number, such as a digest.
type Text struct {
	X    []int   `json:"x"`
	Step []int64 `json:"step"`
	Last []any   `json:"last"`
}

func (h *Handler) metrics(ctx context.Context, from *at, in *OfMetrics) (Columns, error) {
	done, err := h.reading(ctx)
	if err != nil {
		return Columns{}, err
	}
	defer done()
	if in.Until > 0 && in.From > in.Until {
		return Columns{}, problem.Errorf(problem.NotFound, "from %d until %d: there are no such iterations: until is not before from", in.From, in.Until)
	}
	p := query.Params{
		Run: in.Run, Trial: in.Trial, Metrics: in.Metric, From: in.From, Until: in.Until, Points: in.Points, All: in.All,
	}
	if p.Trial, err = answer.TrialOf(ctx, from.Views, in.Run, in.Trial); err != nil {
		return Columns{}, err
	}
	table, err := query.Ask(ctx, from.Views, query.Points, p)
	if err != nil {
		return Columns{}, err
	}
	for _, name := range in.Metric {
		if !slices.Contains(table.Names, name) {
			return Columns{}, &projections.NotFoundError{
				What: "metric", Ref: name,
				Hint: fmt.Sprintf("metrics of these iterations: %q", table.Names),
			}
		}
	}
	var texts []projections.MetricsRow
	if len(table.Texts) > 0 { // rollups only count them
		p.Metrics = table.Texts
		rows, err := query.Ask(ctx, from.Views, query.Metrics, p)
		if err != nil {
			return Columns{}, err
		}
		texts = rows.Rows
	}
	return columnsOf(table, texts), nil
}

// columnsOf turns points into columns, and the rows of metrics that are no numbers.
func columnsOf(table projections.PointsTable, texts []projections.MetricsRow) Columns {
	out := Columns{Run: table.Run, Trial: table.Trial, Iterations: table.Iterations, Width: table.Width, Names: table.Names, Lines: []Line{newLine(false, 0)}}
	for _, points := range table.Lines {
		l := out.line(points.Hidden, points.Attempt)
		for name, c := range points.Metrics {
			l.add(name, c)
		}
	}
	last := 0 // iteration of the line's last row
	for _, c := range out.Lines[0].Metrics {
		for i, x := range c.X {
			if x > last {
				last, out.Lines[0].Attempt = x, c.Attempt[i]
			}
		}
	}
	for _, row := range texts {
		l := out.line(row.Hidden, row.Attempt)
		for name, s := range row.Metrics {
			l.addText(row, name, s)
		}
		if !row.Hidden && row.UntilIteration > last {
			last, l.Attempt = row.UntilIteration, row.Attempt
		}
	}
	slices.SortStableFunc(out.Lines[1:], func(a, b Line) int { return cmp.Compare(a.Attempt, b.Attempt) })
	return out
}

// line returns the current line, or the part of an attempt that a resume superseded, until the
// next call.
func (c *Columns) line(hidden bool, attempt int) *Line {
	if !hidden {
		return &c.Lines[0]
	}
	for i := range c.Lines[1:] {
		if l := &c.Lines[i+1]; l.Attempt == attempt {
			return l
		}
	}
	c.Lines = append(c.Lines, newLine(true, attempt))
	return &c.Lines[len(c.Lines)-1]
}

func newLine(hidden bool, attempt int) Line {
	return Line{Hidden: hidden, Attempt: attempt, Metrics: map[string]*Column{}, Texts: map[string]*Text{}}
}

// add adds the points of a metric. Several resumes may have superseded stretches of an attempt:
// their points are put in the order of iterations.
func (l *Line) add(name string, p *projections.PointsColumns) {
	c := l.Metrics[name]
	if c == nil {
		c = &Column{}
		l.Metrics[name] = c
	}
	for i, x := range p.Until {
		at := len(c.X)
		for at > 0 && c.X[at-1] > x {
			at--
		}
		c.X, c.Step, c.Attempt = slices.Insert(c.X, at, x), slices.Insert(c.Step, at, p.Step[i]), slices.Insert(c.Attempt, at, p.Attempt[i])
		c.Min, c.Max = slices.Insert(c.Min, at, digits(p.Min[i])), slices.Insert(c.Max, at, digits(p.Max[i]))
		c.Last, c.NonFinite = slices.Insert(c.Last, at, digits(p.Last[i])), slices.Insert(c.NonFinite, at, p.NonFinite[i])
	}
}

// digits is a number, or what is written as null.
func digits(v *float64) Digits {
	if v == nil {
		return Digits(math.NaN())
	}
	return Digits(*v)
}

// addText adds a row of a metric, unless the row has a number.
func (l *Line) addText(row projections.MetricsRow, name string, s projections.Summary) {
	_, number := projections.Number(s.Last)
	if _, some := projections.Number(s.Min); number || some {
		return
	}
	t := l.Texts[name]
	if t == nil {
		t = &Text{X: []int{}, Step: []int64{}, Last: []any{}}
		l.Texts[name] = t
	}
	t.X, t.Step, t.Last = append(t.X, row.UntilIteration), append(t.Step, row.Step), append(t.Last, s.Last)
}
