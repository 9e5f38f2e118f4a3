package main

import (
	"context"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
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

func (a *app) diffCommand() *cobra.Command {
	var metrics []string
	var exitCode bool
	var asOf *string
	c := &cobra.Command{
		Use: "diff RUN|REF RUN|REF", Short: "Compare two runs, or two checkpoints", Args: console.Args(cobra.ExactArgs(2)),
		Long: `Compare two trials, named by RUN or RUN/TRIAL, or two checkpoints, named by any
other reference, such as RUN@latest.

Of trials: the configuration, key by key, nested ones with dots; the metrics of
their present lines, last and best, and the first step at which both reported a
metric and not the same; and the newest checkpoint that both descend from. Where
a trial comes from, and how long it is, counts as no difference by itself.

Of checkpoints: the tensors and values that one lacks, or that have another
dtype, shape or content. Contents are compared by the digests in the indexes,
so that no data is read; of tensors that are cut into other chunks, as by another
number of ranks, and of what was imported in place and never read, it is not
known whether they differ, and they are listed as "chunks" and "unknown".

With --exit-code the exit code is 6 when there is any difference.`,
		Example: "  ckptstore diff bert bert-lr2 --metric loss\n  ckptstore diff bert@step-1000 bert@latest --exit-code\n  ckptstore diff sweep/a sweep/b --json",
		RunE: func(c *cobra.Command, refs []string) error {
			then, err := parseMoment("as-of", *asOf)
			if err != nil {
				return err
			}
			return a.read(c.Context(), func(s *store.Store) error {
				d, err := a.diff(c.Context(), s, then, refs, metrics)
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
	c.Flags().StringArrayVar(&metrics, "metric", nil, "of trials, only this metric; may be given several times")
	c.Flags().BoolVar(&exitCode, "exit-code", false, "exit with 6 when there are differences")
	asOf = asOfFlag(c)
	return c
}

func (a *app) diff(ctx context.Context, s *store.Store, then moment, refs, metrics []string) (compared, error) {
	d := compared{Store: s.ID, Differences: []difference{}}
	views, err := past(ctx, s, then)
	if err != nil {
		return d, err
	}
	var sides [2]subject
	for i, ref := range refs {
		if sides[i], err = subjectOf(ctx, views, ref); err != nil {
			return d, err
		}
	}
	x, y := sides[0], sides[1]
	switch {
	case (x.trial == nil) != (y.trial == nil):
		return d, console.Usagef("%s is %s and %s is %s: compare two of a kind; RUN@latest is the newest checkpoint of a run", refs[0], x, refs[1], y)
	case x.trial == nil && len(metrics) > 0:
		return d, console.Usagef("--metric is for trials, and %s is a checkpoint", refs[0])
	case x.trial != nil:
		err = d.trials(ctx, views, *x.trial, *y.trial, metrics)
	default:
		err = d.checkpoints(ctx, s, x.checkpoint, y.checkpoint)
	}
	if err == nil {
		err = d.descent(ctx, views, x.checkpoint, y.checkpoint)
	}
	d.Equal = len(d.Differences) == 0
	return d, err
}

// subject is what an argument stands for: a trial with the head of its line,
// if there is one, or a checkpoint.
type subject struct {
	trial      *projections.Trial
	checkpoint projections.Checkpoint
}

// String is what kind it is.
func (s subject) String() string {
	if s.trial != nil {
		return "a run"
	}
	return "a checkpoint"
}

// subjectOf looks for RUN, RUN/TRIAL and then for a checkpoint.
func subjectOf(ctx context.Context, views query.Source, ref string) (subject, error) {
	runs, err := query.Ask(ctx, views, query.Runs, query.Params{})
	if err != nil {
		return subject{}, err
	}
	for _, run := range runs {
		rest, inside := strings.CutPrefix(ref, run.Name+"/")
		if ref != run.Name && !inside {
			continue
		}
		trials, err := query.Ask(ctx, views, query.Trials, query.Params{Run: run.Name})
		if err != nil {
			return subject{}, err
		}
		var names []string
		for _, t := range trials {
			names = append(names, run.Name+"/"+t.Name)
			if inside && t.Name == rest || !inside && (t.Name == projections.DefaultTrial || len(trials) == 1) {
				return trialSubject(ctx, views, t)
			}
		}
		switch {
		case !inside && len(trials) == 0:
			return subject{}, &projections.NotFoundError{What: "trial of run", Ref: ref, Hint: "there is none yet"}
		case !inside:
			return subject{}, console.Usagef("run %q has several trials: choose one of %q", ref, names)
		}
	}
	c, err := query.Ask(ctx, views, query.Resolve, query.Params{Ref: ref})
	if err == nil && c.State != projections.Committed {
		err = fmt.Errorf("%w: checkpoint %s@%s is %s: nothing of it can be compared", projections.ErrNotFound, c.Run, c.ID, c.State)
	}
	return subject{checkpoint: c}, err
}

func trialSubject(ctx context.Context, views query.Source, t projections.Trial) (subject, error) {
	s := subject{trial: &t}
	if t.Head == "" || t.HeadSeq == 0 { // none of its own
		return s, nil
	}
	var err error
	s.checkpoint, err = query.Ask(ctx, views, query.Resolve, query.Params{Ref: t.Run + "/" + t.Name + "@" + t.Head})
	return s, err
}

// descent finds the newest checkpoint that both descend from.
func (d *compared) descent(ctx context.Context, views query.Source, x, y projections.Checkpoint) error {
	if x.ID == "" || y.ID == "" {
		return nil
	}
	var known []projections.Checkpoint
	var trials []projections.Trial
	asked := map[string]bool{}
	for wanted := []string{x.Run, y.Run}; len(wanted) > 0; wanted = wanted[1:] {
		if asked[wanted[0]] {
			continue
		}
		asked[wanted[0]] = true
		rows, err := query.Ask(ctx, views, query.Checkpoints, query.Params{Run: wanted[0], All: true})
		if err != nil {
			return err
		}
		of, err := query.Ask(ctx, views, query.Trials, query.Params{Run: wanted[0]})
		if err != nil {
			return err
		}
		for _, t := range of {
			if t.Parent != nil {
				wanted = append(wanted, t.Parent.Run)
			}
		}
		known, trials = append(known, rows...), append(trials, of...)
	}
	if c, found := projections.CommonAncestor(x, y, known, trials); found {
		d.CommonAncestor = c.Run + "/" + c.Trial + "@" + c.ID
	}
	return nil
}

func (a *app) printDiff(d compared) error {
	err := console.Emit(a.Console, d, d.Differences, func(w *tabwriter.Writer, wide bool) {
		d.printHead(w)
		if d.Of == "trials" {
			d.printTrials(w, wide)
		} else {
			d.printCheckpoints(w, wide)
		}
	})
	if err == nil && d.Equal && !a.Quiet {
		fmt.Fprintln(a.Err, "no differences")
	}
	return err
}

func (d compared) printHead(w *tabwriter.Writer) {
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
