package main

import (
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/plot"
	"github.com/ckptstore/ckptstore/projections"
)

var updatePlots = flag.Bool("update-plots", false, "rewrite testdata/golden-plots.txt")

// reported makes a table of one metric, with a row for each value.
func reported(values ...any) projections.MetricsTable {
	t := projections.MetricsTable{Width: 1, Names: []string{"loss"}}
	for i, v := range values {
		row := projections.MetricsRow{
			Attempt: 1, Iteration: i + 1, UntilIteration: i + 1, Step: int64(10 * i), Time: time.Unix(0, 0), Reports: 1,
			Metrics: map[string]projections.Summary{},
		}
		if v != nil {
			s := projections.Summary{Count: 1, Last: v}
			if n, ok := projections.Number(v); ok && math.IsNaN(n) {
				s.NaNs = 1
			} else if ok {
				s.Min, s.Max = v, v
			}
			row.Metrics["loss"] = s
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

func many(n int, f func(i float64) any) (values []any) {
	for i := range n {
		values = append(values, f(float64(i)))
	}
	return values
}

// Plots look as recorded in the golden file.
func TestGoldenPlots(t *testing.T) {
	decay := func(i float64) any { return 2.3*math.Exp(-i/40) + 0.02 + 0.05*math.Sin(i)*math.Exp(-i/80) }
	resumed := reported(many(120, decay)...)
	for i, v := range many(30, func(i float64) any { return 1.2 + i/50 }) {
		row := resumed.Rows[i+60]
		row.Attempt, row.Hidden = 0, true
		row.Metrics = map[string]projections.Summary{"loss": {Count: 1, Min: v, Max: v, Last: v}}
		resumed.Rows = append(resumed.Rows, row)
	}
	wide := reported(many(10, func(i float64) any { return i })...)
	wide.Rows[4].Metrics["loss"] = projections.Summary{Count: 9, Min: 0.0, Max: 20.0, Last: 4.0, NaNs: 1}
	wide.Rows[4].Reports = 9
	inside := reported(20.0, 0.0, "NaN", 4.0)
	var got strings.Builder
	for _, c := range []struct {
		name  string
		table projections.MetricsTable
		plot  plot.Plot
	}{
		{"decaying", reported(many(120, decay)...), plot.Plot{Width: 80}},
		{"the same, logarithmic", reported(many(120, decay)...), plot.Plot{Width: 80, Log: true}},
		{"what a resume has hidden, in colors", resumed, plot.Plot{Width: 60, Color: true}},
		{"gaps", reported(1.0, 2.0, "NaN", 3.0, "Infinity", nil, 2.0, 2.5, "NaN", 1.0), plot.Plot{Width: 40}},
		{"a spike in a row of several reports", wide, plot.Plot{Width: 40}},
		{"one value", reported(nil, nil, nil, 0.25), plot.Plot{Width: 40}},
		{"constant", reported(-3.0, -3.0, -3.0), plot.Plot{Width: 40}},
		{"not above zero on a logarithmic axis", reported(100.0, 10.0, 0.0, -1.0, 1.0, 0.1), plot.Plot{Width: 40, Log: true}},
		{"greatest and least float", reported(-math.MaxFloat64, math.MaxFloat64), plot.Plot{Width: 40}},
		{"no numbers", reported("warm-up", "NaN", true), plot.Plot{Width: 40}},
		{"narrow", reported(many(120, decay)...), plot.Plot{Width: 1}},
	} {
		c.plot.Height = plot.Height
		exact := func(projections.MetricsRow, string) (projections.MetricsTable, error) { return inside, nil }
		h, err := insight.Highlights(c.table, "loss", exact)
		if err == nil {
			err = along(&c.plot, c.table, exact)
		}
		if err != nil {
			t.Fatal(err)
		}
		d := insight.Lines(c.table, "loss", c.plot.Log)
		fmt.Fprintf(&got, "# %s\n%s%s\n%s\n", c.name, highlightsText("loss", h), noteText(d), strings.ReplaceAll(c.plot.Draw(d.Lines), "\x1b", "␛"))
	}
	file := filepath.Join("testdata", "golden-plots.txt")
	if *updatePlots {
		if err := os.WriteFile(file, []byte(got.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("plots are\n%s\nwant\n%s", got.String(), want)
	}
}

// The best values are the newest of equal ones, only from the line, and never NaN.
func TestHighlights(t *testing.T) {
	table := reported(2.0, 1.0, "NaN", 1.0, "Infinity", 5.0)
	hidden := table.Rows[5]
	hidden.Hidden, hidden.Metrics = true, map[string]projections.Summary{"loss": {Count: 1, Min: 0.5, Max: 0.5, Last: 0.5}}
	table.Rows = append(table.Rows, hidden)
	h, err := insight.Highlights(table, "loss", nil)
	const want = "loss  last 5 (step 50)  best:min 1 (step 30)  best:max Infinity (step 40)"
	if err != nil || highlightsText("loss", h) != want {
		t.Errorf("highlights %q (%v), want %q", highlightsText("loss", h), err, want)
	}
}
