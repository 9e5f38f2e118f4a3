package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

const gcHelp = `Delete the checkpoints that a policy does not keep, and the leftovers of aborted saves.
Without --apply, only show what would be deleted, and why.

A policy is a list of rules. A checkpoint is kept if any rule keeps it:

  last=N               the newest N of the line, and of each file by itself
  every=Nsteps         the newest of each N steps: with 1000, of 1 to 1000, of
                       1001 to 2000 and so on
  best=N:METRIC:MODE   the N with the best METRIC; MODE is min or max
  keep-tagged          only those that every policy keeps
  superseded=delete    also delete checkpoints that a resume superseded (default:
                       keep)

Every policy keeps checkpoints that are pinned, tagged, the origin of a fork, being
restored, or the newest. Without a policy, gc only deletes leftovers, and checkpoints
removed by name (see ` + "`ckptstore rm`" + `) whose files had to stay until now.

FREED counts bytes to which no other checkpoint has a link. In a bucket, the summary also
has what they cost a month by --prices. Old versions of removed files are removed too.
What the bucket locks stays, and a later gc removes it. gc records each decision in
the log before it deletes files. An interrupted collection is finished by the next one,
or when the store is next opened. gc does not touch directories that are not in the
log, or copies of other checkpoints.

With --staging, gc deletes no file of the store. Instead it frees the shared memory that
this store's dead trainers left on this machine. Their staged saves are then lost;
otherwise the run's next trainer commits them. --all-stores frees the memory that dead
trainers and agents of all stores left.

Exit codes: 0 ok, 1 files could not be removed, 2 usage, 4 no such run, 6 the newest
checkpoint of a trial is damaged, so nothing of that trial was deleted.`

func (a *app) gcCommand() *cobra.Command {
	var policy string
	var apply, dry, staging, allStores bool
	prices := object.Standard()
	c := &cobra.Command{
		Use: "gc [RUN...]", Short: "Delete the checkpoints that a policy does not keep", Long: gcHelp,
		Example: "  ckptstore gc bert --policy last=3,best=1:loss:min\n  ckptstore gc --policy last=2,every=1000steps --apply",
		RunE: func(c *cobra.Command, runs []string) error {
			o := collection.Options{Runs: runs, Apply: apply}
			if apply && dry {
				return console.Usagef("--apply and --dry-run: give one of them")
			}
			if c.Flags().Changed("policy") {
				var err error
				if o.Policy, err = retention.Parse(policy); err != nil {
					return fmt.Errorf("--policy: %w", err)
				}
			}
			if allStores && !staging {
				return console.Usagef("--all-stores: it goes with --staging only")
			}
			if staging {
				if apply || dry || c.Flags().Changed("policy") || len(runs) > 0 {
					return console.Usagef("--staging: it goes with no other flag than --all-stores, and no RUN")
				}
				if allStores && c.Flags().Changed("store") {
					return console.Usagef("--all-stores and --store: give one of them")
				}
				return a.freeStaging(c.Context(), allStores)
			}
			return a.with(c.Context(), func(s *store.Store) error { return a.gc(c.Context(), s, o, prices) })
		},
	}
	c.Flags().StringVar(&policy, "policy", "", "rules that keep checkpoints, such as last=2,every=1000steps,best=1:loss:min")
	c.Flags().Var(&prices, "prices", pricesHelp)
	c.Flags().BoolVar(&staging, "staging", false, "free the shared memory of this store's dead trainers on this machine")
	c.Flags().BoolVar(&allStores, "all-stores", false, "with --staging: for the dead trainers and agents of all stores")
	c.Flags().BoolVar(&apply, "apply", false, "delete, instead of only showing what would be deleted")
	c.Flags().BoolVarP(&dry, "dry-run", "n", false, "only show what would be deleted (the default)")
	return c
}

func (a *app) gc(ctx context.Context, s *store.Store, o collection.Options, prices object.Prices) error {
	out, err := s.Collect(ctx, o)
	if len(out.Checkpoints) == 0 && err != nil {
		return err
	}
	why, verr := s.Data.Unfreed(ctx)
	if verr != nil {
		a.Warn("warning: the bucket does not tell whether it keeps removed files as versions, which would cost as before: %v", verr)
	}
	if why != nil {
		out.Unfreed = why.Error()
		a.Warn("warning: the bucket keeps removed files as versions, which cannot be removed: %v", why)
	}
	printed := console.Emit(a.Console, out, out.Checkpoints, func(w *tabwriter.Writer, wide bool) {
		head := []any{"RUN", "CHECKPOINT", "STEP", "ACTION", "SIZE", "FREED", "REASON"}
		if wide {
			head = append(head, "TRIAL", "STATE", "LEFT")
		}
		console.Row(w, head...)
		for _, c := range out.Checkpoints {
			freed := ""
			if c.Action != collection.Keep {
				freed = bytesize.Text(c.Freed)
			}
			cells := []any{c.Run, c.ID, c.Step, c.Action, bytesize.Text(c.Bytes), freed, c.Reason}
			if wide {
				cells = append(cells, c.Trial, c.State, c.Left)
			}
			console.Row(w, cells...)
		}
	})
	note := ""
	if s.Data.Metered() {
		note = fmt.Sprintf(" (%s a month)", dollars(prices.Kept(out.Freed)))
	}
	switch {
	case out.Waits > 0 && out.Waits < out.Freed:
		note += fmt.Sprintf(", %s of it", bytesize.Text(out.Waits))
		fallthrough
	case out.Waits > 0:
		note += " once a rule of the bucket has removed the versions that it keeps"
	}
	a.sayCollected(out, note)
	return errors.Join(printed, err)
}

// sayCollected prints a summary to stderr. note follows the freed bytes.
func (a *app) sayCollected(out collection.Collection, note string) {
	if a.Quiet {
		return
	}
	n := map[collection.Action]int{}
	for _, c := range out.Checkpoints {
		n[c.Action]++
		if c.Left != "" {
			fmt.Fprintf(a.Err, "%s: some files remain: %s\n", refOf(c.Run, c.Trial, c.ID), c.Left)
		}
	}
	text := fmt.Sprintf("%d kept, %d deleted, %d swept, %s freed%s", n[collection.Keep], n[collection.Delete], n[collection.Sweep], bytesize.Text(out.Freed), note)
	if !out.Applied {
		text = fmt.Sprintf("dry run: %d would be kept, %d deleted, %d swept, %s freed%s; delete with --apply", n[collection.Keep], n[collection.Delete], n[collection.Sweep], bytesize.Text(out.Freed), note)
	}
	fmt.Fprintln(a.Err, text)
}

// freed is the output of `gc --staging --json`.
type freed struct {
	Directories []string `json:"directories"`
	Bytes       int64    `json:"bytes"`
}

// freeStaging frees the shared memory of dead trainers: of this store, or of all
// stores.
func (a *app) freeStaging(ctx context.Context, all bool) error {
	shared, _ := shm.Dir()
	var out freed
	var err error
	if all {
		out.Directories, out.Bytes, err = staging.FreeAll(shared)
	} else {
		id, ierr := store.Identity(ctx, a.options())
		if ierr != nil {
			return fmt.Errorf("gc --staging: identify the store: %w", ierr)
		}
		out.Directories, out.Bytes, err = staging.Free(shared, id)
	}
	out.Directories = append([]string{}, out.Directories...)
	printed := console.Emit(a.Console, out, []freed{out}, func(w *tabwriter.Writer, _ bool) {
		for _, dir := range out.Directories {
			fmt.Fprintln(w, dir)
		}
		fmt.Fprintf(w, "%d directories of dead trainers, %s freed\n", len(out.Directories), bytesize.Text(out.Bytes))
	})
	return errors.Join(err, printed)
}

func (a *app) rmCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm REF...", Short: "Delete checkpoints by name", Args: console.Args(cobra.MinimumNArgs(1)),
		Long: `Delete committed checkpoints: remove them from the line of their run, and delete their
files. Pinned or tagged checkpoints are refused; unpin or untag them first. If a trial
was forked from the checkpoint, or it is being restored, its files stay until the first
gc after that has ended.

The decision is in the log before files are deleted. Bytes that other checkpoints share
stay.

Exit codes: 0 deleted, 2 usage, 4 no such checkpoint, 5 a checkpoint is pinned or tagged.`,
		Example: "  ckptstore rm bert@step-2000 bert@step-2500",
		RunE: func(c *cobra.Command, refs []string) error {
			return a.with(c.Context(), func(s *store.Store) error {
				runs := map[string][]projections.Checkpoint{}
				var order []string
				for _, ref := range refs {
					if !strings.Contains(ref, "@") {
						return console.Usagef("rm %s: name the checkpoint, as RUN@NAME: rm takes no run alone, which would mean its newest", ref)
					}
					x, err := store.Committed(c.Context(), s.Views(), ref)
					if err != nil {
						return err
					}
					if x.Pinned {
						return problem.Errorf(problem.Conflict, "%s is pinned (%s); run `ckptstore unpin` first", refOf(x.Run, x.Trial, x.ID), x.PinReason)
					}
					if len(x.Tags) > 0 {
						return problem.Errorf(problem.Conflict, "%s is tagged %q; run `ckptstore tag --delete` first", refOf(x.Run, x.Trial, x.ID), x.Tags)
					}
					if runs[x.Run] == nil {
						order = append(order, x.Run)
					}
					runs[x.Run] = append(runs[x.Run], x)
				}
				out := collection.Collection{Store: s.ID, Policy: "by name", Applied: true, Checkpoints: []collection.Collected{}}
				for _, run := range order {
					done, err := s.Withdraw(c.Context(), runs[run], "removed by name")
					out.Checkpoints = append(out.Checkpoints, done...)
					if err != nil {
						return err
					}
				}
				for _, x := range out.Checkpoints {
					out.Freed += x.Freed
					out.Waits += x.Waits
				}
				return a.printRemoved(out)
			})
		},
	}
}

func (a *app) printRemoved(out collection.Collection) error {
	return console.Emit(a.Console, out, out.Checkpoints, func(w *tabwriter.Writer, _ bool) {
		console.Row(w, "RUN", "CHECKPOINT", "SIZE", "FREED", "STAYS")
		for _, c := range out.Checkpoints {
			stays := c.Stays()
			if stays == "" && c.Waits > 0 {
				stays = "as versions, until a rule of the bucket removes them"
			}
			console.Row(w, c.Run, c.ID, bytesize.Text(c.Bytes), bytesize.Text(c.Freed), stays)
		}
	})
}
