package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// plotOptions say how metrics are drawn.
type plotOptions struct {
	plot, logScale bool
}

func (o *plotOptions) flags(f *pflag.FlagSet) {
	f.BoolVar(&o.plot, "plot", false, "draw each metric over the iterations, with its last and best values")
	f.BoolVar(&o.logScale, "log-scale", false, "with --plot: a logarithmic y axis")
}

func (o plotOptions) check(a *app, f *pflag.FlagSet, csv bool) error {
	switch {
	case o.logScale && !o.plot:
		return console.Usagef("--log-scale is for --plot")
	case o.plot && (csv || a.JSON || f.Changed("output")):
		return console.Usagef("--plot, --csv, --json and --output: give one of them")
	case o.plot && f.Changed("points"):
		return console.Usagef("--plot has as many points as the terminal is wide: leave out --points")
	}
	return nil
}

// Widths of a plot, in characters.
const (
	maxPlotWidth  = 100
	plotWidthElse = 80 // where there is no terminal
)

// plotWidth is that of the terminal that out is, and whether it takes colors.
func plotWidth(out io.Writer) (width int, color bool) {
	f, ok := out.(*os.File)
	if !ok {
		return plotWidthElse, false
	}
	window, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return plotWidthElse, false // no terminal
	}
	width = min(int(window.Col), maxPlotWidth)
	if width == 0 { // one that does not say
		width = plotWidthElse
	}
	return width, console.Colours(out)
}

// plotMetrics draws what p asks for.
func (a *app) plotMetrics(ctx context.Context, views query.Source, p query.Params, o plotOptions) error {
	width, color := plotWidth(a.Raw)
	p.Points = 2 * width // a row for each column of dots, or more
	table, err := askMetrics(ctx, views, p)
	if err != nil {
		return err
	}
	if len(table.Rows) == 0 {
		if !a.Quiet {
			fmt.Fprintln(a.Err, "no reports in these iterations")
		}
		return nil
	}
	exact := func(row projections.MetricsRow, name string) (projections.MetricsTable, error) {
		q := p
		q.Trial, q.From, q.Until, q.Points, q.Metrics = table.Trial, row.Iteration, row.UntilIteration, 0, nil
		if name != "" {
			q.Metrics = []string{name}
		}
		return query.Ask(ctx, views, query.Metrics, q)
	}
	pl := plot{width: width, height: plotHeight, log: o.logScale, color: color}
	if err := pl.along(table, exact); err != nil {
		return err
	}
	for i, name := range columns(table, p.Metrics) {
		h, err := insight.Highlights(table, name, exact)
		if err != nil {
			return err
		}
		if i > 0 {
			fmt.Fprintln(a.Out)
		}
		drawn := insight.Lines(table, name, o.logScale)
		fmt.Fprintln(a.Out, highlightsText(name, h)+noteText(drawn))
		fmt.Fprint(a.Raw, pl.draw(drawn.Lines)) // in colours
	}
	return nil
}

// along makes the rows of a table the x axis.
func (p *plot) along(table projections.MetricsTable, exact insight.Exact) error {
	first, last, err := insight.Span(table, exact)
	if err != nil {
		return err
	}
	p.left, p.right = float64(first.Iteration), float64(last.UntilIteration)
	p.from = fmt.Sprintf("iteration %d, step %d", first.Iteration, first.Step)
	p.to = fmt.Sprintf("iteration %d, step %d", last.UntilIteration, last.Step)
	p.less = [2]string{fmt.Sprint("step ", first.Step), fmt.Sprint("step ", last.Step)}
	return nil
}

// noteText says what is not drawn.
func noteText(d insight.Drawing) string {
	var notes []string
	if !slices.ContainsFunc(d.Lines, func(s insight.Series) bool {
		return slices.ContainsFunc(s.Points, func(at insight.Point) bool { return !at.Gap })
	}) {
		return "  (nothing to draw)"
	}
	for _, n := range []struct {
		count int
		what  string
	}{{d.NotFinite, "NaN or infinite"}, {d.NotPositive, "not above zero"}, {d.NotNumbers, "no number"}} {
		if n.count > 0 {
			notes = append(notes, fmt.Sprintf("%s: %d", n.what, n.count))
		}
	}
	if len(notes) == 0 {
		return ""
	}
	return "  (not drawn: " + strings.Join(notes, ", ") + ")"
}

// valueAt is a value and where it was reported.
func valueAt(v *projections.MetricValue) string {
	if v == nil {
		return ""
	}
	return fmt.Sprintf("%s (step %d)", console.Number(v.Value), v.Step)
}

// highlightsText is the line above a plot.
func highlightsText(name string, h projections.MetricEnds) string {
	text := name
	if h.Last != nil {
		text += "  last " + valueAt(h.Last)
	}
	if h.Min != nil && h.Max != nil {
		text += "  best:min " + valueAt(h.Min) + "  best:max " + valueAt(h.Max)
	}
	return text
}
