package api

import (
	"context"
	"math"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

const metricsText = `The metrics of a run along its current line, as in ` + "`ckptstore metrics RUN --json`" + `, in columns.
Each row summarizes the same number of iterations by the least, the greatest and the last value, so spikes stay visible.
Numbers have 6 significant digits. null stands for a value that is not finite; nonfinite counts the reports with such a value.`

// OfMetrics selects metrics.
type OfMetrics struct {
	Moment
	Run    string   `path:"run"`
	Trial  string   `query:"trial" doc:"Of the run, if it has several"`
	Metric []string `query:"metric,explode" doc:"Only this metric; repeatable"`
	From   int      `query:"from" minimum:"1" doc:"First iteration along the line"`
	Until  int      `query:"until" minimum:"1" doc:"Last iteration along the line"`
	Points int      `query:"points" minimum:"1" maximum:"5000" default:"800" doc:"Most rows of the line, and of each superseded attempt"`
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
	Width      int      `json:"width"`      // iterations that a row stands for
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
	Min       []Digits `json:"min"`
	Max       []Digits `json:"max"`
	Last      []Digits `json:"last"`
	NonFinite []int    `json:"nonfinite"`
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
	table, err := answer.Metrics(ctx, from.Views, query.Params{
		Run: in.Run, Trial: in.Trial, Metrics: in.Metric, From: in.From, Until: in.Until, Points: in.Points, All: in.All,
	})
	if err != nil {
		return Columns{}, err
	}
	return columnsOf(table), nil
}

// columnsOf turns the rows of a table into columns.
func columnsOf(table projections.MetricsTable) Columns {
	out := Columns{Run: table.Run, Trial: table.Trial, Iterations: table.Iterations, Width: table.Width, Names: table.Names, Lines: []Line{newLine(false, 0)}}
	hidden := map[int]int{} // by attempt: its line
	for _, row := range table.Rows {
		i := 0
		if row.Hidden {
			var known bool
			if i, known = hidden[row.Attempt]; !known {
				i = len(out.Lines)
				hidden[row.Attempt] = i
				out.Lines = append(out.Lines, newLine(true, row.Attempt))
			}
		}
		l := &out.Lines[i]
		l.Attempt = row.Attempt
		for name, s := range row.Metrics {
			l.add(row, name, s)
		}
	}
	return out
}

func newLine(hidden bool, attempt int) Line {
	return Line{Hidden: hidden, Attempt: attempt, Metrics: map[string]*Column{}, Texts: map[string]*Text{}}
}

// add adds the values of a metric in a row.
func (l *Line) add(row projections.MetricsRow, name string, s projections.Summary) {
	last, number := projections.Number(s.Last)
	least, some := projections.Number(s.Min)
	most, _ := projections.Number(s.Max)
	if !number && !some {
		t := l.Texts[name]
		if t == nil {
			t = &Text{X: []int{}, Step: []int64{}, Last: []any{}}
			l.Texts[name] = t
		}
		t.X, t.Step, t.Last = append(t.X, row.UntilIteration), append(t.Step, row.Step), append(t.Last, s.Last)
		return
	}
	c := l.Metrics[name]
	if c == nil {
		c = &Column{X: []int{}, Step: []int64{}, Attempt: []int{}, Min: []Digits{}, Max: []Digits{}, Last: []Digits{}, NonFinite: []int{}}
		l.Metrics[name] = c
	}
	if !number { // the last report of several has a text
		last = math.NaN()
	}
	if !some { // only NaN
		least, most = math.NaN(), math.NaN()
	}
	bad := s.NaNs
	if math.IsInf(least, -1) || math.IsInf(least, 1) {
		bad++
	}
	if math.IsInf(most, 1) && most != least {
		bad++
	}
	c.X, c.Step, c.Attempt = append(c.X, row.UntilIteration), append(c.Step, row.Step), append(c.Attempt, row.Attempt)
	c.Min, c.Max, c.Last = append(c.Min, Digits(least)), append(c.Max, Digits(most)), append(c.Last, Digits(last))
	c.NonFinite = append(c.NonFinite, bad)
}
