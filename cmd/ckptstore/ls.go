package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/tune"
	"github.com/ckptstore/ckptstore/projections"
)

func (a *app) lsCommand() *cobra.Command {
	var all, offline bool
	var asOf *string
	c := &cobra.Command{
		Use: "ls [RUN[/TRIAL]]", Short: "List checkpoints, newest first", Args: console.Args(cobra.MaximumNArgs(1)),
		Long: `List the committed checkpoints in the current line of RUN, of one trial of a search, or
of every run, newest first.

With --offline, list the checkpoints from the receipts in the data directory, without
the lock, the log or the views. Receipts do not record which checkpoints are
superseded, so the list equals "ls --all" without open, aborted and deleted
checkpoints.

For a RUN with a live job, print on stderr what it would cost to kill it now: see
"ckptstore show RUN".

With --as-of, list the checkpoints as of that moment, by folding the log up to it.

WRITTEN and REUSED are the bytes of tensors and values that the save wrote, and those
that were already stored. SHARED and EXCLUSIVE are bytes of files as of now: those
that other checkpoints share, and those that deleting the checkpoint would free. They
are read from the files' metadata, for wide, json and jsonl only. REASON is why a
checkpoint was aborted or deleted. Unknown values are "-", and absent in JSON.`,
		Example: "  ckptstore ls\n  ckptstore ls bert --all\n  ckptstore ls mnist/t03\n  ckptstore ls --as-of 1200\n  ckptstore ls --as-of 2026-11-21T14:05:06Z",
		RunE: func(c *cobra.Command, names []string) error {
			run := ""
			if len(names) == 1 {
				run = names[0]
			}
			then, err := parseMoment("as-of", *asOf)
			if err != nil {
				return err
			}
			if offline && !then.IsEnd() {
				return console.Usagef("--offline does not read the log, --as-of needs it: give one of them")
			}
			if offline || then.IsEnd() && a.byReceipts() {
				return a.lsOffline(c.Context(), run)
			}
			return a.read(c.Context(), func(s *store.Store) error { return a.ls(c.Context(), s, run, all, then) })
		},
	}
	asOf = asOfFlag(c)
	c.Flags().BoolVarP(&all, "all", "a", false, "include superseded, open, aborted and deleted checkpoints")
	c.Flags().BoolVar(&offline, "offline", false, "read only receipts: no lock, no log")
	return c
}

func (a *app) ls(ctx context.Context, s *store.Store, run string, all bool, then answer.Moment) error {
	views, err := answer.Past(ctx, s, then)
	if err != nil {
		return err
	}
	trial := ""
	if run != "" {
		if run, trial, err = answer.Named(ctx, views, run); err != nil {
			return err
		}
	}
	l, unknown, err := answer.List(ctx, views, s.ID, run, all)
	if err != nil {
		return err
	}
	l.Checkpoints = slices.DeleteFunc(l.Checkpoints, func(c answer.Listed) bool { return trial != "" && c.Trial != trial })
	if err := a.measure(ctx, l.Checkpoints, s.Data); err != nil {
		return err
	}
	if run != "" && then.IsEnd() {
		of, err := answer.StandingOf(ctx, answer.Live(s), run)
		if err != nil {
			return err
		}
		l.KilledNow = slices.DeleteFunc(of.KilledNow, func(k insight.KilledNow) bool { return trial != "" && k.Trial != trial })
	}
	if err := errors.Join(unknown, a.printListing(l)); err != nil || a.Quiet {
		return err
	}
	for _, k := range l.KilledNow {
		fmt.Fprintln(a.Err, k.Text)
	}
	return nil
}

func (a *app) lsOffline(ctx context.Context, run string) error {
	root, err := a.data()
	if err != nil {
		return err
	}
	receipts, damaged, err := root.Checkpoints(ctx)
	if err != nil {
		return err
	}
	l := answer.Listing{Offline: true, Checkpoints: []answer.Listed{}}
	var errs []error
	for _, d := range damaged {
		errs = append(errs, d.Problem())
	}
	receipts = slices.DeleteFunc(receipts, func(r checkpoint.Receipt) bool { return run != "" && r.Run != run && r.Run+"/"+r.Trial != run })
	rows, problems := store.RowsOf(ctx, root, receipts)
	for i, r := range receipts {
		if problems[i] != nil {
			errs = append(errs, problems[i])
			continue
		}
		l.Store = r.Store
		l.Checkpoints = append(l.Checkpoints, answer.Listed{
			Run: r.Run, Trial: r.Trial, ID: r.Checkpoint, Name: r.Name, Step: r.Step, Attempt: r.Attempt,
			WorldSize: rows[i].WorldSize, State: string(projections.Committed), Bytes: rows[i].Bytes,
			Manifest: r.Manifest.String(), Sequence: r.Sequence, CommittedAt: r.CommittedAt,
		})
	}
	if run != "" && len(l.Checkpoints) == 0 && len(errs) == 0 {
		return &projections.NotFoundError{What: "run", Ref: run, Hint: "no receipt in " + a.location + " names it"}
	}
	slices.SortFunc(l.Checkpoints, func(x, y answer.Listed) int {
		return cmp.Or(cmp.Compare(x.Run, y.Run), cmp.Compare(y.Sequence, x.Sequence))
	})
	if err := a.measure(ctx, l.Checkpoints, root); err != nil {
		return err
	}
	return errors.Join(append([]error{a.printListing(l)}, errs...)...)
}

// measure fills in the bytes of files if the format prints them: with many checkpoints,
// reading the files' metadata dominates the time.
func (a *app) measure(ctx context.Context, list []answer.Listed, root *data.Root) error {
	if a.Format == "table" {
		return nil
	}
	return answer.Measure(ctx, list, root, a.Warn)
}

func (a *app) printListing(l answer.Listing) error {
	return console.Emit(a.Console, l, l.Checkpoints, func(w *tabwriter.Writer, wide bool) {
		several := slices.ContainsFunc(l.Checkpoints, func(c answer.Listed) bool { return c.Trial != projections.DefaultTrial })
		head := []any{"RUN"}
		if several {
			head = append(head, "TRIAL")
		}
		head = append(head, "CHECKPOINT", "STEP", "STATE", "RANKS", "SIZE", "COMMITTED", "CONTINUES")
		if wide {
			head = append(head, "WRITTEN", "REUSED", "SHARED", "EXCLUSIVE", "SEQUENCE", "MANIFEST", "REASON")
		}
		marked := slices.ContainsFunc(l.Checkpoints, func(c answer.Listed) bool { return marks(c) != "" })
		if marked {
			head = append(head, "MARKS")
		}
		console.Row(w, head...)
		for _, c := range l.Checkpoints {
			state := c.State
			if c.Superseded != nil && *c.Superseded && c.State == string(projections.Committed) {
				state = "superseded"
			}
			cells := []any{c.Run}
			if several {
				cells = append(cells, c.Trial)
			}
			cells = append(cells, c.ID, c.Step, state, c.WorldSize, bytesize.Text(c.Bytes), console.When(c.CommittedAt), c.Parent)
			if wide {
				cells = append(cells, console.MaybeSize(c.Written), console.MaybeSize(c.Reused), console.MaybeSize(c.Shared), console.MaybeSize(c.Exclusive), c.Sequence, console.Short(c.Manifest), c.Reason)
			}
			if marked {
				cells = append(cells, marks(c))
			}
			console.Row(w, cells...)
		}
		if len(l.Checkpoints) == 0 && !a.Quiet {
			fmt.Fprintln(a.Err, "no checkpoints yet")
		}
	})
}

// marks returns the tags of a checkpoint, and "(pinned)" if it is.
func marks(c answer.Listed) string {
	all := slices.Clone(c.Tags)
	if c.Pinned != nil && *c.Pinned {
		all = append([]string{"(pinned)"}, all...)
	}
	return strings.Join(all, ", ")
}

func (a *app) trialsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "trials RUN", Short: "List the trials of a search, and check its decisions", Args: console.Args(cobra.ExactArgs(1)),
		Long: `List the trials of a run that trainer tune trains: their states, how far they are trained,
and the metric on the highest rung that they have reached, with the best one marked. AT has the
step of the report with that value.

A trial is running; due, if it has steps to train or to repeat and no slot; paused, if it waits on its rung and
may be trained further; done, on the last rung; completed, if its workers ended before that;
errored; replaced, by a clone of a better one; or new.

In population-based training, a rung is the end of an interval. t03-1 is the first clone in the
place of t03; FORKED FROM has the checkpoint that it began with, and CONFIG shows changed values after
those of the trial that it was forked from.

The command folds the log from the beginning of the search, and computes each decision again. If a
decision in the log does not follow from the events before it, the command prints it and exits with
code 6.`,
		Example: "  ckptstore trials mnist\n  ckptstore trials mnist --json",
		RunE: func(c *cobra.Command, runs []string) error {
			return a.read(c.Context(), func(s *store.Store) error {
				board, err := answer.SearchOf(c.Context(), s, runs[0])
				if err != nil {
					return err
				}
				return a.printSearch(board)
			})
		},
	}
}

func (a *app) printSearch(board tune.Board) error {
	err := console.Emit(a.Console, board, board.Trials, func(w *tabwriter.Writer, _ bool) {
		for _, cells := range board.Table() {
			console.Row(w, cells...)
		}
		for _, d := range board.Differ {
			fmt.Fprintf(w, "event %d assigns rung %d to trial %s, but %s\n", d.Sequence, d.Rung, d.Trial, d.Problem)
		}
	})
	switch {
	case err != nil || a.Quiet:
	case board.Over:
		fmt.Fprintf(a.Err, "%d decisions; nothing is left to train\n", board.Decisions)
	default:
		fmt.Fprintf(a.Err, "%d decisions; trials are left to train, and the same `trainer tune` continues the search\n", board.Decisions)
	}
	if err == nil && len(board.Differ) > 0 {
		err = errFindings
	}
	return err
}
