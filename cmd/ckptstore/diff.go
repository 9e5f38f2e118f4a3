package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

func (a *app) diffCommand() *cobra.Command {
	var metrics []string
	var exitCode bool
	var asOf *string
	c := &cobra.Command{
		Use: "diff RUN|REF RUN|REF", Short: "Compare two runs, or two checkpoints", Args: console.Args(cobra.ExactArgs(2)),
		Long: `Compare two trials, named by RUN or RUN/TRIAL, or two checkpoints, named by any other
reference, such as RUN@latest.

For trials, compare the configuration key by key (nested keys with dots), and the last
and best metrics of their current lines. For each metric, show the first step at which
both reported different values. Also show the newest checkpoint from which both descend.
The origin and the length of a trial do not count as differences.

For checkpoints, list the tensors and values that one lacks, or that differ in dtype,
shape or content. Contents are compared by the digests in the indexes, without reading
data. Tensors in different chunks, as saved by another number of ranks, cannot be
compared that way, nor can files that were imported in place and never read: they are
listed as "chunks" and "unknown".

With --exit-code, exit with code 6 if there are differences.`,
		Example: "  ckptstore diff bert bert-lr2 --metric loss\n  ckptstore diff bert@step-1000 bert@latest --exit-code\n  ckptstore diff sweep/a sweep/b --json",
		RunE: func(c *cobra.Command, refs []string) error {
			then, err := parseMoment("as-of", *asOf)
			if err != nil {
				return err
			}
			return a.read(c.Context(), func(s *store.Store) error {
				views, err := answer.Past(c.Context(), s, then)
				if err != nil {
					return err
				}
				d, err := answer.Compare(c.Context(), s, views, [2]string(refs), metrics)
				if err != nil {
					return err
				}
				if err := a.printDiff(d); err != nil {
					return err
				}
				if exitCode && !d.Equal {
					return errFindings
				}
				return nil
			})
		},
	}
	c.Flags().StringArrayVar(&metrics, "metric", nil, "for trials: compare only this metric (repeatable)")
	c.Flags().BoolVar(&exitCode, "exit-code", false, "exit with code 6 if there are differences")
	asOf = asOfFlag(c)
	return c
}

func (a *app) printDiff(d insight.Diff) error {
	err := console.Emit(a.Console, d, d.Differences, func(w *tabwriter.Writer, wide bool) {
		printHead(w, d)
		if d.Of == "trials" {
			printTrials(w, d, wide)
		} else {
			printCheckpoints(w, d)
		}
	})
	if err == nil && d.Equal && !a.Quiet {
		fmt.Fprintln(a.Err, "no differences")
	}
	return err
}

func printHead(w *tabwriter.Writer, d insight.Diff) {
	console.Row(w, "WHAT", "A", "B")
	console.Row(w, "trial", d.A.Run+"/"+d.A.Trial, d.B.Run+"/"+d.B.Trial)
	if d.Of == "trials" {
		console.Row(w, "status", d.A.Status, d.B.Status)
	}
	console.Row(w, "checkpoint", d.A.Checkpoint, d.B.Checkpoint)
	console.Row(w, "step", d.A.Step, d.B.Step)
	console.Row(w, "attempt", d.A.Attempt, d.B.Attempt)
	console.Row(w, "ranks", d.A.WorldSize, d.B.WorldSize)
	if d.Of == "trials" {
		console.Row(w, "iterations", d.A.Iterations, d.B.Iterations)
	} else {
		console.Row(w, "size", bytesize.Text(d.A.Bytes), bytesize.Text(d.B.Bytes))
		console.Row(w, "manifest", console.Short(d.A.Manifest), console.Short(d.B.Manifest))
		console.Row(w, "continues", d.A.Parent, d.B.Parent)
	}
	if d.A.ForkedFrom != "" || d.B.ForkedFrom != "" {
		console.Row(w, "forked from", d.A.ForkedFrom, d.B.ForkedFrom)
	}
	console.Row(w, "both from", d.CommonAncestor)
}

func printTrials(w *tabwriter.Writer, d insight.Diff, wide bool) {
	first := true
	for _, one := range d.Differences {
		if one.Kind != "config" {
			continue
		}
		if first {
			fmt.Fprintln(w)
			console.Row(w, "CONFIG", "A", "B")
			first = false
		}
		console.Row(w, one.Name, configText(one, insight.Added, one.A), configText(one, insight.Removed, one.B))
	}
	if len(d.Metrics) == 0 {
		return
	}
	fmt.Fprintln(w)
	head := []any{"METRIC", "LAST A", "LAST B", "BEST:MIN A", "BEST:MIN B"}
	if wide {
		head = append(head, "BEST:MAX A", "BEST:MAX B", "REPORTS A", "REPORTS B", "COMMON STEPS")
	}
	console.Row(w, append(head, "DIFFERS")...)
	text := valueAt
	if !wide {
		text = shortValueAt
	}
	for _, m := range d.Metrics {
		x, y := m.A, m.B
		if x == nil {
			x = &projections.MetricEnds{}
		}
		if y == nil {
			y = &projections.MetricEnds{}
		}
		cells := []any{m.Name, text(x.Last), text(y.Last), text(x.Min), text(y.Min)}
		if wide {
			cells = append(cells, text(x.Max), text(y.Max), x.Reports, y.Reports, m.CommonSteps)
		}
		console.Row(w, append(cells, differs(m, wide))...)
	}
}

// shortValueAt is valueAt with long numbers cut off.
func shortValueAt(v *projections.MetricValue) string {
	if v == nil {
		return ""
	}
	return fmt.Sprintf("%s (step %d)", shortText(console.Number(v.Value)), v.Step)
}

// longestNumber is the length above which shortText cuts.
const longestNumber = 24

func shortText(text string) string {
	runes := []rune(text)
	if len(runes) <= longestNumber {
		return text
	}
	return string(runes[:12]) + "…"
}

// configText formats a value of a configuration; empty on the side that lacks it.
func configText(d insight.Difference, absent string, value any) string {
	if slices.Contains(d.Changes, absent) {
		return ""
	}
	text, err := json.Marshal(value)
	if err != nil { // it came from JSON
		return fmt.Sprint(value)
	}
	return string(text)
}

// differs describes where a metric first differs.
func differs(m projections.MetricComparison, wide bool) string {
	switch {
	case m.Equal:
		return "no"
	case m.A == nil:
		return "only B has it"
	case m.B == nil:
		return "only A has it"
	case m.FirstDifference != nil:
		a, b := console.Number(m.FirstDifference.A), console.Number(m.FirstDifference.B)
		if !wide {
			a, b = shortText(a), shortText(b)
		}
		return fmt.Sprintf("from step %d: %s, %s", m.FirstDifference.Step, a, b)
	}
	return fmt.Sprintf("not at the %d common steps", m.CommonSteps)
}

// partText formats one side of a difference.
func partText(side any) string {
	p, ok := side.(*insight.Part)
	if !ok {
		return ""
	}
	text := bytesize.Text(p.Bytes)
	if p.DType != 0 {
		text = fmt.Sprintf("%s %v, %s", p.DType, p.Shape, text)
	}
	if p.Chunks > 1 {
		text += fmt.Sprintf(" in %d chunks", p.Chunks)
	}
	if p.Digest != "" {
		text += ", " + console.Short(p.Digest)
	}
	return text
}

func printCheckpoints(w *tabwriter.Writer, d insight.Diff) {
	fmt.Fprintln(w)
	fmt.Fprintf(w, "%d tensors and %d values, %s, are the same\n", d.Same.Tensors, d.Same.Values, bytesize.Text(d.Same.Bytes))
	if len(d.Differences) == 0 {
		return
	}
	fmt.Fprintln(w)
	console.Row(w, "KIND", "NAME", "DIFFERS IN", "A", "B")
	for _, one := range d.Differences {
		console.Row(w, one.Kind, one.Name, strings.Join(one.Changes, ", "), partText(one.A), partText(one.B))
	}
}
