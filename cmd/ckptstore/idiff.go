package main

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/projections"
)

// compared is `diff --json`.
type compared struct {
	Store          string                         `json:"store"`
	Of             string                         `json:"of"` // "trials" or "checkpoints"
	A              comparedSide                   `json:"a"`
	B              comparedSide                   `json:"b"`
	Equal          bool                           `json:"equal"`
	CommonAncestor string                         `json:"common_ancestor,omitempty"` // the newest checkpoint that both descend from
	Differences    []difference                   `json:"differences"`
	Metrics        []projections.MetricComparison `json:"metrics,omitempty"` // of trials
	Same           *sameParts                     `json:"same,omitempty"`    // of checkpoints
}

// comparedSide is one of the two.
type comparedSide struct {
	Run        string `json:"run"`
	Trial      string `json:"trial"`
	Checkpoint string `json:"checkpoint"` // of a trial, the head of its line
	Step       int64  `json:"step"`       // of the checkpoint
	Status     string `json:"status"`     // of the trial; "committed" of a checkpoint
	Attempt    int    `json:"attempt"`    // the newest, or the checkpoint's
	Iterations int    `json:"iterations"`
	WorldSize  int    `json:"world_size"`
	Bytes      int64  `json:"bytes"`
	Manifest   string `json:"manifest,omitempty"`
	ForkedFrom string `json:"forked_from,omitempty"` // RUN/TRIAL@ID
	Parent     string `json:"parent,omitempty"`      // the checkpoint that it continues
}

// difference is one thing that is not the same.
type difference struct {
	Kind    string   `json:"kind"` // config, metric, tensor or value
	Name    string   `json:"name"`
	Changes []string `json:"changes"` // added, removed, changed, steps, dtype, shape, size, chunks, content, unknown
	Step    *int64   `json:"step,omitempty"`
	A       any      `json:"a"`
	B       any      `json:"b"`
}

// Changes.
const (
	isAdded   = "added"   // B alone has it
	isRemoved = "removed" // A alone has it
	isChanged = "changed" // another value
	isSteps   = "steps"   // equal where both were reported, which is not everywhere
	isDType   = "dtype"
	isShape   = "shape"
	isSize    = "size"
	isContent = "content" // other bytes
	isChunks  = "chunks"  // cut differently, so that no digests can be compared
	isUnknown = "unknown" // in place, and never read: its digest is not known
)

// trialRows are the rows of a trial that a comparison reads.
type trialRows struct {
	trial   projections.Trial
	head    projections.Checkpoint // of its line; the zero one if it has none
	reports []projections.Report
}

// compareTrials compares two trials: their configurations, and their metrics or those
// named. It returns a NotFoundError for a name that neither has reported.
func compareTrials(x, y trialRows, metrics []string) (compared, error) {
	d := compared{Of: "trials", A: x.side(), B: y.side(), Differences: []difference{}, Metrics: []projections.MetricComparison{}}
	d.config(x.trial.Config, y.trial.Config)
	var names []string
	for _, m := range projections.CompareReports(x.reports, y.reports) {
		names = append(names, m.Name)
		if len(metrics) == 0 || slices.Contains(metrics, m.Name) {
			d.Metrics = append(d.Metrics, m)
		}
	}
	for _, name := range metrics {
		if !slices.Contains(names, name) {
			return d, &projections.NotFoundError{What: "metric", Ref: name, Hint: fmt.Sprintf("neither trial has reported it; they have reported %q", names)}
		}
	}
	for _, m := range d.Metrics {
		if !m.Equal {
			d.Differences = append(d.Differences, metricDifference(m))
		}
	}
	d.Equal = len(d.Differences) == 0
	return d, nil
}

func (r trialRows) side() comparedSide {
	t, c := r.trial, r.head
	s := comparedSide{
		Run: t.Run, Trial: t.Name, Checkpoint: t.Head, Status: string(t.Status),
		Attempt: t.Attempt, Iterations: t.Iterations, WorldSize: t.WorldSize,
		Step: c.Step, Bytes: c.Bytes, Manifest: c.Manifest, Parent: c.Parent,
	}
	if t.Parent != nil {
		s.ForkedFrom = t.Parent.Run + "/" + t.Parent.Trial + "@" + t.Parent.Checkpoint
	}
	return s
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
