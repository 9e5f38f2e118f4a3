package main

import (
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

func (a *app) rmCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm REF...", Short: "Delete checkpoints by name", Args: console.Args(cobra.MinimumNArgs(1)),
		Long: `Delete committed checkpoints: they are out of the line of their run, and their
files go. What is pinned or tagged is refused: unpin or untag it first. One that
a trial was forked from, or that is being restored, is out of the line too, and
keeps its files until the first collection after that is over.

The decisions are in the log before a file goes. The bytes that other checkpoints
share stay.`,
		Example: "  ckptstore rm bert@step-2000 bert@step-2500",
		RunE: func(c *cobra.Command, refs []string) error {
			return a.with(c.Context(), func(s *store.Store) error {
				runs := map[string][]projections.Checkpoint{}
				var order []string
				for _, ref := range refs {
					if !strings.Contains(ref, "@") {
						return console.Usagef("rm %s: say which checkpoint, as RUN@NAME: a run alone stands for its newest", ref)
					}
					x, err := store.Committed(c.Context(), s.Views(), ref)
					if err != nil {
						return err
					}
					if x.Pinned {
						return fmt.Errorf("%s@%s is pinned (%s): `ckptstore unpin` it first", x.Run, x.ID, x.PinReason)
					}
					if len(x.Tags) > 0 {
						return fmt.Errorf("%s@%s is tagged %q: `ckptstore untag` it first", x.Run, x.ID, x.Tags)
					}
					if runs[x.Run] == nil {
						order = append(order, x.Run)
					}
					runs[x.Run] = append(runs[x.Run], x)
				}
				out := store.Collection{Store: s.ID, Policy: "by name", Applied: true, Checkpoints: []store.Collected{}}
				for _, run := range order {
					done, err := s.Withdraw(c.Context(), runs[run], "removed by name")
					out.Checkpoints = append(out.Checkpoints, done...)
					if err != nil {
						return err
					}
				}
				for _, x := range out.Checkpoints {
					out.Freed += x.Freed
				}
				return a.printRemoved(out)
			})
		},
	}
}

func (a *app) printRemoved(out store.Collection) error {
	return console.Emit(a.Console, out, out.Checkpoints, func(w *tabwriter.Writer, _ bool) {
		console.Row(w, "RUN", "CHECKPOINT", "SIZE", "FREED", "STAYS")
		for _, c := range out.Checkpoints {
			console.Row(w, c.Run, c.ID, bytesize.Text(c.Bytes), bytesize.Text(c.Freed), c.Stays())
		}
	})
}
