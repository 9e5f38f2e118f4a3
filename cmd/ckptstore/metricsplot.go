package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/console"
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
		h, err := highlightsOf(table, name, exact)
		if err != nil {
			return err
		}
		if i > 0 {
			fmt.Fprintln(a.Out)
		}
		drawn := lines(table, name, o.logScale)
		fmt.Fprintln(a.Out, h.String()+drawn.note())
		fmt.Fprint(a.Raw, pl.draw(drawn.lines)) // in colours
	}
	return nil
}

// along makes the rows of a table the x axis.
func (p *plot) along(table projections.MetricsTable, exact exactly) error {
	first, last := table.Rows[0], table.Rows[0]
	for _, row := range table.Rows {
		if row.UntilIteration >= last.UntilIteration {
			last = row
		}
	}
	if first.Reports > 1 { // its step is that of its last one
		first.UntilIteration = first.Iteration
		one, err := exact(first, "")
		if err != nil {
			return err
		}
		first = one.Rows[0]
	}
	p.left, p.right = float64(first.Iteration), float64(last.UntilIteration)
	p.from = fmt.Sprintf("iteration %d, step %d", first.Iteration, first.Step)
	p.to = fmt.Sprintf("iteration %d, step %d", last.UntilIteration, last.Step)
	p.less = [2]string{fmt.Sprint("step ", first.Step), fmt.Sprint("step ", last.Step)}
	return nil
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

// note says what is not drawn.
func (d drawing) note() string {
	var notes []string
	if !slices.ContainsFunc(d.lines, func(s series) bool {
		return slices.ContainsFunc(s.points, func(at point) bool { return !at.gap })
	}) {
		return "  (nothing to draw)"
	}
	for _, n := range []struct {
		count int
		what  string
	}{{d.unfinished, "NaN or infinite"}, {d.negative, "not above zero"}, {d.other, "no number"}} {
		if n.count > 0 {
			notes = append(notes, fmt.Sprintf("%s: %d", n.what, n.count))
		}
	}
	if len(notes) == 0 {
		return ""
	}
	return "  (not drawn: " + strings.Join(notes, ", ") + ")"
}
