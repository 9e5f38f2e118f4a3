package main

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// marked is `pin --json`, and that of unpin and tag.
type marked struct {
	Run       string   `json:"run"`
	Trial     string   `json:"trial"`
	ID        string   `json:"id"`
	Pinned    bool     `json:"pinned"`
	PinReason string   `json:"pin_reason,omitempty"`
	Tags      []string `json:"tags"`
	From      string   `json:"from,omitempty"` // the checkpoint that had the tag
}

// printMarked says what a checkpoint is called and whether it is pinned.
func (a *app) printMarked(c projections.Checkpoint, from, said string) error {
	out := marked{Run: c.Run, Trial: c.Trial, ID: c.ID, Pinned: c.Pinned, PinReason: c.PinReason, Tags: append([]string{}, c.Tags...), From: from}
	return console.Emit(a.Console, out, []marked{out}, func(w *tabwriter.Writer, _ bool) { fmt.Fprintln(w, said) })
}

func (a *app) pinCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use: "pin REF", Short: "Keep a checkpoint under every policy", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Exempt a checkpoint from retention: no policy deletes it until it is unpinned.
The pin is a decision in the log, so that it holds on every machine.`,
		Example: "  ckptstore pin bert@step-2000 --reason \"table 3\"",
		RunE: func(c *cobra.Command, refs []string) error {
			return a.with(c.Context(), func(s *store.Store) error {
				x, err := s.Pin(c.Context(), refs[0], reason)
				if err != nil {
					return err
				}
				return a.printMarked(x, "", fmt.Sprintf("pinned %s@%s", x.Run, x.ID))
			})
		},
	}
	c.Flags().StringVar(&reason, "reason", "", "what it is kept for")
	return c
}

func (a *app) unpinCommand() *cobra.Command {
	return &cobra.Command{
		Use: "unpin REF", Short: "Take a pin back", Args: console.Args(cobra.ExactArgs(1)),
		Long: "Take a pin back, if there is one. The checkpoint is not deleted by that: the next\n`ckptstore gc --apply` or `trainer run --keep` decides.",
		RunE: func(c *cobra.Command, refs []string) error {
			return a.with(c.Context(), func(s *store.Store) error {
				x, err := s.Unpin(c.Context(), refs[0])
				if err != nil {
					return err
				}
				return a.printMarked(x, "", fmt.Sprintf("%s@%s is not pinned", x.Run, x.ID))
			})
		},
	}
}
