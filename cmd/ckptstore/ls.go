package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// listed is one checkpoint in the output of `ls --json`. With --offline, fields that
// receipts lack are omitted.
type listed struct {
	Run         string    `json:"run"`
	Trial       string    `json:"trial"`
	ID          string    `json:"id"`
	Name        string    `json:"name"`
	Step        int64     `json:"step"`
	Attempt     int       `json:"attempt"`
	WorldSize   int       `json:"world_size"`
	State       string    `json:"state"`
	Bytes       int64     `json:"bytes"`
	Written     *int64    `json:"bytes_written,omitempty"`   // of Bytes: written by this save
	Reused      *int64    `json:"bytes_reused,omitempty"`    // of Bytes: stored before it
	Shared      *int64    `json:"bytes_shared,omitempty"`    // of its files: with links in other checkpoints
	Exclusive   *int64    `json:"bytes_exclusive,omitempty"` // of its files: without; deleting it frees them
	Manifest    string    `json:"manifest,omitempty"`
	Sequence    uint64    `json:"sequence,omitempty"` // of checkpoint.committed
	CommittedAt time.Time `json:"committed_at,omitzero"`
	Superseded  *bool     `json:"superseded,omitempty"`
	Parent      string    `json:"parent,omitempty"`
	Reason      string    `json:"reason,omitempty"`
	Pinned      *bool     `json:"pinned,omitempty"`
	Tags        []string  `json:"tags,omitempty"`

	ref checkpoint.Ref
}

// listing is the output of `ls --json`.
type listing struct {
	Store       string   `json:"store"`
	Offline     bool     `json:"offline"`
	Checkpoints []listed `json:"checkpoints"`
	// KilledNow is what it would cost to kill the trials of the run now; only with the name of a
	// run that has a live job.
	KilledNow []insight.KilledNow `json:"killed_now,omitempty"`
}

func (a *app) lsCommand() *cobra.Command {
	var all, offline bool
	var asOf *string
	c := &cobra.Command{
		Use: "ls [RUN]", Short: "List checkpoints, newest first", Args: console.Args(cobra.MaximumNArgs(1)),
		Long: `List the committed checkpoints in the current line of RUN, or of every run, newest
first.

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
		Example: "  ckptstore ls\n  ckptstore ls bert --all\n  ckptstore ls --as-of 1200\n  ckptstore ls --as-of 2026-11-21T14:05:06Z",
		RunE: func(c *cobra.Command, names []string) error {
			run := ""
			if len(names) == 1 {
				run = names[0]
			}
			then, err := parseMoment("as-of", *asOf)
			if err != nil {
				return err
			}
			if offline && !then.isEnd() {
				return console.Usagef("--offline does not read the log, --as-of needs it: give one of them")
			}
			if offline || then.isEnd() && a.byReceipts() {
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

func (a *app) ls(ctx context.Context, s *store.Store, run string, all bool, then moment) error {
	views, err := past(ctx, s, then)
	if err != nil {
		return err
	}
	runs := []string{run}
	if run != "" {
		if err := knownRun(ctx, views, run); err != nil {
			return err
		}
	} else {
		rows, err := query.Ask(ctx, views, query.Runs, query.Params{})
		if err != nil {
			return err
		}
		runs = nil
		for _, r := range rows {
			runs = append(runs, r.Name)
		}
	}
	l := listing{Store: s.ID, Checkpoints: []listed{}}
	var unknown []error // runs that only a newer version can read
	for _, name := range runs {
		rows, err := query.Ask(ctx, views, query.Checkpoints, query.Params{Run: name, All: all})
		if run == "" && errors.Is(err, events.ErrNewer) {
			unknown = append(unknown, err)
			continue
		}
		if err != nil {
			return err
		}
		for _, c := range rows {
			l.Checkpoints = append(l.Checkpoints, fromRow(c))
		}
	}
	if err := a.measure(ctx, l.Checkpoints, s.Data); err != nil {
		return err
	}
	if run != "" && then.isEnd() {
		of, err := standingOf(ctx, s, run)
		if err != nil {
			return err
		}
		l.KilledNow = of.KilledNow
	}
	if err := errors.Join(append(unknown, a.printListing(l))...); err != nil || a.Quiet {
		return err
	}
	for _, k := range l.KilledNow {
		fmt.Fprintln(a.Err, k.Text)
	}
	return nil
}

func fromRow(c projections.Checkpoint) listed {
	out := listed{
		Run: c.Run, Trial: c.Trial, ID: c.ID, Name: c.Name, Step: c.Step, Attempt: c.Attempt,
		WorldSize: c.WorldSize, State: string(c.State), Bytes: c.Bytes, Manifest: c.Manifest,
		Written: &c.BytesWritten, Reused: &c.BytesReused,
		Sequence: c.CommittedSeq, Superseded: &c.Superseded, Parent: c.Parent, Reason: c.Reason,
		Pinned: &c.Pinned, Tags: c.Tags, ref: store.RefOf(c),
	}
	if c.CommittedSeq > 0 {
		out.CommittedAt = c.EndedAt
	}
	return out
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
	l := listing{Offline: true, Checkpoints: []listed{}}
	var errs []error
	for _, d := range damaged {
		errs = append(errs, d.Problem())
	}
	receipts = slices.DeleteFunc(receipts, func(r checkpoint.Receipt) bool { return run != "" && r.Run != run })
	rows, problems := store.RowsOf(ctx, root, receipts)
	for i, r := range receipts {
		if problems[i] != nil {
			errs = append(errs, problems[i])
			continue
		}
		l.Store = r.Store
		l.Checkpoints = append(l.Checkpoints, listed{
			Run: r.Run, Trial: r.Trial, ID: r.Checkpoint, Name: r.Name, Step: r.Step, Attempt: r.Attempt,
			WorldSize: rows[i].WorldSize, State: string(projections.Committed), Bytes: rows[i].Bytes,
			Manifest: r.Manifest.String(), Sequence: r.Sequence, CommittedAt: r.CommittedAt, ref: r.Ref,
		})
	}
	if run != "" && len(l.Checkpoints) == 0 && len(errs) == 0 {
		return &projections.NotFoundError{What: "run", Ref: run, Hint: "no receipt in " + a.location + " names it"}
	}
	slices.SortFunc(l.Checkpoints, func(x, y listed) int {
		return cmp.Or(cmp.Compare(x.Run, y.Run), cmp.Compare(y.Sequence, x.Sequence))
	})
	if err := a.measure(ctx, l.Checkpoints, root); err != nil {
		return err
	}
	return errors.Join(append([]error{a.printListing(l)}, errs...)...)
}

// measure fills in Shared and Exclusive if the format prints them: with many
// checkpoints, reading the files' metadata dominates the time. The fields stay nil for
// checkpoints without files.
func (a *app) measure(ctx context.Context, list []listed, root *data.Root) error {
	if a.Format == "table" {
		return nil
	}
	feet, problems := make([]store.Footprint, len(list)), make([]error, len(list))
	var g errgroup.Group
	g.SetLimit(root.Width())
	for i, c := range list {
		g.Go(func() error {
			feet[i], problems[i] = store.MeasureFiles(ctx, root, c.ref)
			return nil
		})
	}
	_ = g.Wait() // never fails
	for i := range list {
		var err error
		if list[i].Shared, list[i].Exclusive, err = a.known(ctx, feet[i], problems[i]); err != nil {
			return err
		}
	}
	return nil
}

// footprint returns the shared and exclusive bytes of a checkpoint's files, or nil if
// they are unknown.
func (a *app) footprint(ctx context.Context, root *data.Root, ref checkpoint.Ref) (shared, exclusive *int64, err error) {
	f, err := store.MeasureFiles(ctx, root, ref)
	return a.known(ctx, f, err)
}

// known returns the bytes of a footprint, or nil if err is why they are unknown.
func (a *app) known(ctx context.Context, f store.Footprint, err error) (shared, exclusive *int64, _ error) {
	switch {
	case ctx.Err() != nil:
		return nil, nil, ctx.Err()
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil, nil
	case err != nil:
		a.Warn("shared and exclusive bytes are unknown: %v", err)
		return nil, nil, nil
	}
	return &f.Shared, &f.Exclusive, nil
}

func (a *app) printListing(l listing) error {
	return console.Emit(a.Console, l, l.Checkpoints, func(w *tabwriter.Writer, wide bool) {
		head := []any{"RUN", "CHECKPOINT", "STEP", "STATE", "RANKS", "SIZE", "COMMITTED", "CONTINUES"}
		if wide {
			head = append(head, "WRITTEN", "REUSED", "SHARED", "EXCLUSIVE", "SEQUENCE", "MANIFEST", "REASON")
		}
		marked := slices.ContainsFunc(l.Checkpoints, func(c listed) bool { return c.marks() != "" })
		if marked {
			head = append(head, "MARKS")
		}
		console.Row(w, head...)
		for _, c := range l.Checkpoints {
			state := c.State
			if c.Superseded != nil && *c.Superseded && c.State == string(projections.Committed) {
				state = "superseded"
			}
			cells := []any{c.Run, c.ID, c.Step, state, c.WorldSize, bytesize.Text(c.Bytes), console.When(c.CommittedAt), c.Parent}
			if wide {
				cells = append(cells, console.MaybeSize(c.Written), console.MaybeSize(c.Reused), console.MaybeSize(c.Shared), console.MaybeSize(c.Exclusive), c.Sequence, console.Short(c.Manifest), c.Reason)
			}
			if marked {
				cells = append(cells, c.marks())
			}
			console.Row(w, cells...)
		}
		if len(l.Checkpoints) == 0 && !a.Quiet {
			fmt.Fprintln(a.Err, "no checkpoints yet")
		}
	})
}

// marks returns the tags of a checkpoint, and "(pinned)" if it is.
func (c listed) marks() string {
	marks := slices.Clone(c.Tags)
	if c.Pinned != nil && *c.Pinned {
		marks = append([]string{"(pinned)"}, marks...)
	}
	return strings.Join(marks, ", ")
}
