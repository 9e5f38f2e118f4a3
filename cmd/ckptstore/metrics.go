package main

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/plot"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

func (a *app) metricsCommand() *cobra.Command {
	var p query.Params
	var asCSV bool
	var drawn plotOptions
	var asOf *string
	c := &cobra.Command{
		Use: "metrics RUN[/TRIAL]", Short: "Print or plot the metrics of a run", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Print the metrics of a run along its current line: those of each attempt up to where the
next one resumed. Iterations are numbered along the line. --all also prints the reports
that a resume superseded, with their attempt; reports are never deleted.

With --points N, print at most N rows, and with --all as many again for each superseded
attempt. Each row summarizes the same number of iterations by the minimum, maximum and
last value of each metric, so spikes stay visible. Numbers that are not finite are
printed as NaN, Infinity and -Infinity. Only the reports of the selected iterations are
read.

--plot draws each metric as wide as the terminal (at most 100 characters), and prints its
last value and its best ones: best:min and best:max, as in references. Values that are
not finite are gaps. NO_COLOR turns off colors.`,
		Example: `  ckptstore metrics bert --metric loss --points 100
  ckptstore metrics bert --from-iteration 900 --until-iteration 1000 --all
  ckptstore metrics bert --metric loss --metric lr --csv > bert.csv
  ckptstore metrics bert --metric loss --plot --log-scale
  ckptstore metrics bert --as-of 1200 --json`,
		RunE: func(c *cobra.Command, runs []string) error {
			given := c.Flags().Changed
			switch {
			case given("from-iteration") && p.From == 0, given("until-iteration") && p.Until == 0, given("points") && p.Points == 0,
				p.From < 0, p.Until < 0, p.Points < 0:
				return console.Usagef("--from-iteration, --until-iteration and --points: want numbers of 1 or more")
			case p.Until != 0 && p.Until < p.From:
				return console.Usagef("--until-iteration %d is before --from-iteration %d", p.Until, p.From)
			case asCSV && c.Flags().Changed("output") || asCSV && a.JSON:
				return console.Usagef("--csv, --json and --output: give one of them")
			}
			if err := drawn.check(a, c.Flags(), asCSV); err != nil {
				return err
			}
			then, err := parseMoment("as-of", *asOf)
			if err != nil {
				return err
			}
			return a.read(c.Context(), func(s *store.Store) error {
				views, err := answer.Past(c.Context(), s, then)
				if err != nil {
					return err
				}
				if p.Run, p.Trial, err = runOf(c.Context(), views, runs[0], p.Trial); err != nil {
					return err
				}
				if drawn.plot {
					return a.plotMetrics(c.Context(), views, p, drawn)
				}
				table, err := answer.Metrics(c.Context(), views, p)
				if err != nil {
					return err
				}
				if asCSV {
					return a.metricsCSV(table, p.Metrics)
				}
				return a.metricsTable(table, p.Metrics)
			})
		},
	}
	f := c.Flags()
	f.StringVar(&p.Trial, "trial", "", "trial of the run, if it has several; RUN/TRIAL means the same")
	f.StringArrayVar(&p.Metrics, "metric", nil, "print only this metric (repeatable)")
	f.IntVar(&p.From, "from-iteration", 0, "first iteration to print (default: the first)")
	f.IntVar(&p.Until, "until-iteration", 0, "last iteration to print (default: the last)")
	f.IntVar(&p.Points, "points", 0, "print at most this many rows (default: one per report)")
	f.BoolVarP(&p.All, "all", "a", false, "include reports that a resume superseded")
	f.BoolVar(&asCSV, "csv", false, "print comma-separated values")
	drawn.flags(f)
	asOf = asOfFlag(c)
	return c
}

// columns returns the metrics to print, in the requested order.
func columns(table projections.MetricsTable, asked []string) []string {
	if len(asked) > 0 {
		return asked
	}
	return table.Names
}

func (a *app) metricsTable(table projections.MetricsTable, asked []string) error {
	return console.Emit(a.Console, table, table.Rows, func(w *tabwriter.Writer, wide bool) {
		head := []any{"ITERATION", "ATTEMPT", "STEP"}
		if wide {
			head = append(head, "TIME", "SECONDS", "REPORTS")
		}
		names := columns(table, asked)
		for _, name := range names {
			head = append(head, name)
		}
		console.Row(w, head...)
		for _, r := range table.Rows {
			iterations := strconv.Itoa(r.Iteration)
			if table.Width > 1 {
				iterations += "–" + strconv.Itoa(r.UntilIteration)
			}
			attempt := strconv.Itoa(r.Attempt)
			if r.Hidden {
				attempt += " (hidden)"
			}
			cells := []any{iterations, attempt, r.Step}
			if wide {
				cells = append(cells, console.When(r.Time), console.Number(r.Seconds), r.Reports)
			}
			for _, name := range names {
				cells = append(cells, summary(r.Metrics[name], table.Width > 1))
			}
			console.Row(w, cells...)
		}
		if len(table.Rows) == 0 && !a.Quiet {
			fmt.Fprintln(a.Err, "no reports in these iterations")
		}
	})
}

// summary formats one cell: the last value and, for several, their bounds.
func summary(s projections.Summary, several bool) string {
	if s.Count == 0 {
		return ""
	}
	text := console.Number(s.Last)
	if several && s.Min != nil {
		text += fmt.Sprintf(" [%s, %s]", console.Number(s.Min), console.Number(s.Max))
	}
	if several && s.NaNs > 0 {
		text += fmt.Sprintf(" %d NaN", s.NaNs)
	}
	return text
}

func (a *app) metricsCSV(table projections.MetricsTable, asked []string) error {
	head := []string{"iteration", "until_iteration", "attempt", "hidden", "step", "time", "seconds", "reports"}
	names := columns(table, asked)
	for _, name := range names {
		if table.Width == 1 {
			head = append(head, name)
		} else {
			head = append(head, name+".min", name+".max", name+".last", name+".nans")
		}
	}
	w := csv.NewWriter(a.Out)
	err := w.Write(head)
	for _, r := range table.Rows {
		cells := []string{
			strconv.Itoa(r.Iteration), strconv.Itoa(r.UntilIteration), strconv.Itoa(r.Attempt), strconv.FormatBool(r.Hidden),
			strconv.FormatInt(r.Step, 10), r.Time.UTC().Format(time.RFC3339Nano), console.Number(r.Seconds), strconv.Itoa(r.Reports),
		}
		for _, name := range names {
			s := r.Metrics[name]
			if table.Width == 1 {
				cells = append(cells, console.Number(s.Last))
			} else {
				cells = append(cells, console.Number(s.Min), console.Number(s.Max), console.Number(s.Last), strconv.Itoa(s.NaNs))
			}
		}
		err = errors.Join(err, w.Write(cells))
	}
	w.Flush()
	if err = errors.Join(err, w.Error()); err != nil {
		return fmt.Errorf("print metrics: %w", err)
	}
	return nil
}

// plotOptions are the options of a plot.
type plotOptions struct {
	plot, logScale bool
}

func (o *plotOptions) flags(f *pflag.FlagSet) {
	f.BoolVar(&o.plot, "plot", false, "draw each metric over the iterations, with its last and best values")
	f.BoolVar(&o.logScale, "log-scale", false, "with --plot: use a logarithmic y axis")
}

func (o plotOptions) check(a *app, f *pflag.FlagSet, csv bool) error {
	switch {
	case o.logScale && !o.plot:
		return console.Usagef("--log-scale needs --plot")
	case o.plot && (csv || a.JSON || f.Changed("output")):
		return console.Usagef("--plot, --csv, --json and --output: give one of them")
	case o.plot && f.Changed("points"):
		return console.Usagef("--plot has as many points as the terminal is wide; omit --points")
	}
	return nil
}

// Widths of a plot, in characters.
const (
	maxPlotWidth  = 100
	plotWidthElse = 80 // without a terminal
)

// plotWidth returns the width for a plot on out, and whether to use colors.
func plotWidth(out io.Writer) (width int, color bool) {
	f, ok := out.(*os.File)
	if !ok {
		return plotWidthElse, false
	}
	window, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return plotWidthElse, false // not a terminal
	}
	width = min(int(window.Col), maxPlotWidth)
	if width == 0 { // the terminal does not report its width
		width = plotWidthElse
	}
	return width, console.Colours(out)
}

// plotMetrics draws the metrics of p.
func (a *app) plotMetrics(ctx context.Context, views query.Source, p query.Params, o plotOptions) error {
	width, color := plotWidth(a.Raw)
	p.Points = 2 * width // a row for each column of dots, or more
	table, err := answer.Metrics(ctx, views, p)
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
	pl := plot.Plot{Width: width, Height: plot.Height, Log: o.logScale, Color: color}
	if err := along(&pl, table, exact); err != nil {
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
		fmt.Fprint(a.Raw, pl.Draw(drawn.Lines)) // in colours
	}
	return nil
}

// along sets the x axis of a plot to the rows of a table.
func along(p *plot.Plot, table projections.MetricsTable, exact insight.Exact) error {
	first, last, err := insight.Span(table, exact)
	if err != nil {
		return err
	}
	p.Left, p.Right = float64(first.Iteration), float64(last.UntilIteration)
	p.From = fmt.Sprintf("iteration %d, step %d", first.Iteration, first.Step)
	p.To = fmt.Sprintf("iteration %d, step %d", last.UntilIteration, last.Step)
	p.Less = [2]string{fmt.Sprint("step ", first.Step), fmt.Sprint("step ", last.Step)}
	return nil
}

// noteText counts the values that are not drawn.
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
	}{{d.NotFinite, "NaN or infinite"}, {d.NotPositive, "not above zero"}, {d.NotNumbers, "not a number"}} {
		if n.count > 0 {
			notes = append(notes, fmt.Sprintf("%s: %d", n.what, n.count))
		}
	}
	if len(notes) == 0 {
		return ""
	}
	return "  (not drawn: " + strings.Join(notes, ", ") + ")"
}

// valueAt formats a value and the step at which it was reported.
func valueAt(v *projections.MetricValue) string {
	if v == nil {
		return ""
	}
	return fmt.Sprintf("%s (step %d)", console.Number(v.Value), v.Step)
}

// highlightsText returns the line above a plot.
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
