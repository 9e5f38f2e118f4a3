package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// trials compares two trials.
func (d *compared) trials(ctx context.Context, views query.Source, x, y projections.Trial, metrics []string) error {
	d.Of = "trials"
	var err error
	if d.A, err = trialSide(ctx, views, x); err != nil {
		return err
	}
	if d.B, err = trialSide(ctx, views, y); err != nil {
		return err
	}
	d.config(x.Config, y.Config)
	var reports [2][]projections.Report
	for i, t := range []projections.Trial{x, y} {
		if reports[i], err = query.Ask(ctx, views, query.Reports, query.Params{Run: t.Run, Trial: t.Name}); err != nil {
			return err
		}
	}
	all := projections.CompareReports(reports[0], reports[1])
	d.Metrics = []projections.MetricComparison{}
	var names []string
	for _, m := range all {
		names = append(names, m.Name)
		if len(metrics) == 0 || slices.Contains(metrics, m.Name) {
			d.Metrics = append(d.Metrics, m)
		}
	}
	for _, name := range metrics {
		if !slices.Contains(names, name) {
			return &projections.NotFoundError{What: "metric", Ref: name, Hint: fmt.Sprintf("neither trial has reported it; they have reported %q", names)}
		}
	}
	for _, m := range d.Metrics {
		if !m.Equal {
			d.Differences = append(d.Differences, metricDifference(m))
		}
	}
	return nil
}

func trialSide(ctx context.Context, views query.Source, t projections.Trial) (comparedSide, error) {
	s := comparedSide{
		Run: t.Run, Trial: t.Name, Checkpoint: t.Head, Status: string(t.Status),
		Attempt: t.Attempt, Iterations: t.Iterations, WorldSize: t.WorldSize,
	}
	if t.Parent != nil {
		s.ForkedFrom = t.Parent.Run + "/" + t.Parent.Trial + "@" + t.Parent.Checkpoint
	}
	if t.HeadSeq == 0 {
		return s, nil
	}
	c, err := query.Ask(ctx, views, query.Resolve, query.Params{Ref: t.Run + "/" + t.Name + "@" + t.Head})
	s.Step, s.Bytes, s.Manifest, s.Parent = c.Step, c.Bytes, c.Manifest, c.Parent
	return s, err
}

func metricDifference(m projections.MetricComparison) difference {
	out := difference{Kind: "metric", Name: m.Name, Changes: []string{isSteps}}
	switch {
	case m.A == nil:
		out.Changes, out.B = []string{isAdded}, m.B.Last.Value
	case m.B == nil:
		out.Changes, out.A = []string{isRemoved}, m.A.Last.Value
	case m.FirstDifference != nil:
		at := m.FirstDifference
		out.Changes, out.Step, out.A, out.B = []string{isChanged}, &at.Step, at.A, at.B
	default:
		out.A, out.B = m.A.Last.Value, m.B.Last.Value
	}
	return out
}

// config compares two configurations, key by key.
func (d *compared) config(x, y map[string]any) {
	left, right := map[string]any{}, map[string]any{}
	flatten(left, "", x)
	flatten(right, "", y)
	keys := maps.Clone(left)
	maps.Copy(keys, right)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		a, inA := left[key]
		b, inB := right[key]
		change := isChanged
		switch {
		case !inA:
			change = isAdded
		case !inB:
			change = isRemoved
		case reflect.DeepEqual(a, b):
			continue
		}
		d.Differences = append(d.Differences, difference{Kind: "config", Name: key, Changes: []string{change}, A: a, B: b})
	}
}

// flatten puts the leaves of nested objects under their keys, with dots
// between. A key that has a dot of its own, or is empty, is quoted. Lists and
// empty objects are leaves.
func flatten(into map[string]any, prefix string, from map[string]any) {
	for key, value := range from {
		if key == "" || strings.ContainsAny(key, `."`) {
			key = strconv.Quote(key)
		}
		if inner, ok := value.(map[string]any); ok && len(inner) > 0 {
			flatten(into, prefix+key+".", inner)
			continue
		}
		into[prefix+key] = value
	}
}

func (d compared) printTrials(w *tabwriter.Writer, wide bool) {
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
		console.Row(w, one.Name, configText(one, isAdded, one.A), configText(one, isRemoved, one.B))
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

// shortValueAt is valueAt with the beginning of a long text; "wide" has all.
func shortValueAt(v *projections.MetricValue) string {
	if v == nil {
		return ""
	}
	return fmt.Sprintf("%s (step %d)", shortText(console.Number(v.Value)), v.Step)
}

// longestNumber is how long the text of a number can be.
const longestNumber = 24

func shortText(text string) string {
	runes := []rune(text)
	if len(runes) <= longestNumber {
		return text
	}
	return string(runes[:12]) + "…"
}

// configText is a value of a configuration, empty on the side that lacks it.
func configText(d difference, absent string, value any) string {
	if slices.Contains(d.Changes, absent) {
		return ""
	}
	text, err := json.Marshal(value)
	if err != nil { // it came from JSON
		return fmt.Sprint(value)
	}
	return string(text)
}

// differs says where a metric first differs.
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
	return fmt.Sprintf("not at the %d steps of both", m.CommonSteps)
}
