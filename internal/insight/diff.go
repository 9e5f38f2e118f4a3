// Package insight draws conclusions from rows: whether a job runs or is lost, how
// two trials or checkpoints differ, where a metric ended and was best, which
// values a group of another size would lack. The functions are pure: commands,
// APIs and alerts read rows, call them, and show their results.
package insight

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/projections"
)

// Diff is the comparison of two trials or of two checkpoints. It is the output of
// `diff --json`. The caller fills in Store and CommonAncestor.
type Diff struct {
	Store          string                         `json:"store"`
	Of             string                         `json:"of"` // "trials" or "checkpoints"
	A              DiffSide                       `json:"a"`
	B              DiffSide                       `json:"b"`
	Equal          bool                           `json:"equal"`
	CommonAncestor string                         `json:"common_ancestor,omitempty"` // the newest checkpoint that both descend from
	Differences    []Difference                   `json:"differences"`
	Metrics        []projections.MetricComparison `json:"metrics,omitempty"` // of trials
	Same           *SameParts                     `json:"same,omitempty"`    // of checkpoints
}

// DiffSide describes one side of a Diff.
type DiffSide struct {
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

// Difference is one difference between the sides.
type Difference struct {
	Kind    string   `json:"kind"` // config, metric, tensor or value
	Name    string   `json:"name"`
	Changes []string `json:"changes"` // added, removed, changed, steps, dtype, shape, size, chunks, content, unknown
	Step    *int64   `json:"step,omitempty"`
	A       any      `json:"a"`
	B       any      `json:"b"`
}

// Changes of a [Difference].
const (
	Added          = "added"   // B alone has it
	Removed        = "removed" // A alone has it
	Changed        = "changed" // another value
	StepsDiffer    = "steps"   // equal where both were reported, but not reported everywhere
	DTypeDiffers   = "dtype"
	ShapeDiffers   = "shape"
	SizeDiffers    = "size"
	ContentDiffers = "content" // other bytes
	ChunksDiffer   = "chunks"  // cut differently, so that digests cannot be compared
	UnknownContent = "unknown" // in place, and never read: its digest is unknown
)

// TrialRows are the rows of a trial that a comparison reads.
type TrialRows struct {
	Trial   projections.Trial
	Head    projections.Checkpoint // of its line; zero if there is none
	Reports []projections.Report
}

// CompareTrials compares two trials: their configurations, and all metrics or the
// named ones. It returns a NotFoundError for a name that neither has reported.
func CompareTrials(x, y TrialRows, metrics []string) (Diff, error) {
	d := Diff{Of: "trials", A: x.side(), B: y.side(), Differences: []Difference{}, Metrics: []projections.MetricComparison{}}
	d.config(x.Trial.Config, y.Trial.Config)
	var names []string
	for _, m := range projections.CompareReports(x.Reports, y.Reports) {
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

func (r TrialRows) side() DiffSide {
	t, c := r.Trial, r.Head
	s := DiffSide{
		Run: t.Run, Trial: t.Name, Checkpoint: t.Head, Status: string(t.Status),
		Attempt: t.Attempt, Iterations: t.Iterations, WorldSize: t.WorldSize,
		Step: c.Step, Bytes: c.Bytes, Manifest: c.Manifest, Parent: c.Parent,
	}
	if t.Parent != nil {
		s.ForkedFrom = t.Parent.Run + "/" + t.Parent.Trial + "@" + t.Parent.Checkpoint
	}
	return s
}

func metricDifference(m projections.MetricComparison) Difference {
	out := Difference{Kind: "metric", Name: m.Name, Changes: []string{StepsDiffer}}
	switch {
	case m.A == nil:
		out.Changes, out.B = []string{Added}, m.B.Last.Value
	case m.B == nil:
		out.Changes, out.A = []string{Removed}, m.A.Last.Value
	case m.FirstDifference != nil:
		at := m.FirstDifference
		out.Changes, out.Step, out.A, out.B = []string{Changed}, &at.Step, at.A, at.B
	default:
		out.A, out.B = m.A.Last.Value, m.B.Last.Value
	}
	return out
}

// ConfigChanges returns the differences of two configurations by key; a is the first.
func ConfigChanges(a, b map[string]any) []Difference {
	d := Diff{Differences: []Difference{}}
	d.config(a, b)
	return d.Differences
}

// config compares two configurations, key by key.
func (d *Diff) config(x, y map[string]any) {
	left, right := map[string]any{}, map[string]any{}
	flatten(left, "", x)
	flatten(right, "", y)
	keys := maps.Clone(left)
	maps.Copy(keys, right)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		a, inA := left[key]
		b, inB := right[key]
		change := Changed
		switch {
		case !inA:
			change = Added
		case !inB:
			change = Removed
		case reflect.DeepEqual(a, b):
			continue
		}
		d.Differences = append(d.Differences, Difference{Kind: "config", Name: key, Changes: []string{change}, A: a, B: b})
	}
}

// flatten puts the leaves of nested objects under their keys, joined by dots. A
// key that contains a dot, or is empty, is quoted. Lists and empty objects are
// leaves.
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

// ChooseTrial returns the trial that a run's name alone stands for: its default
// trial, or its only one. If there is neither, the user has to name one.
func ChooseTrial(trials []projections.Trial) (t projections.Trial, ok bool) {
	for _, t := range trials {
		if t.Name == projections.DefaultTrial || len(trials) == 1 {
			return t, true
		}
	}
	return t, false
}
