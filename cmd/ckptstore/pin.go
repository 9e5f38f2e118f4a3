package main

import (
	"context"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// printMarked prints the tags and the pin of a checkpoint, or text as the table.
func (a *app) printMarked(c projections.Checkpoint, from, text string) error {
	out := answer.MarkedFrom(c, from)
	return console.Emit(a.Console, out, []answer.Marked{out}, func(w *tabwriter.Writer, _ bool) { fmt.Fprintln(w, text) })
}

func (a *app) pinCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use: "pin REF", Short: "Exempt a checkpoint from retention", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Exempt a checkpoint from retention: no policy deletes it until it is unpinned.
The pin is recorded in the log, so it applies on every machine.`,
		Example: "  ckptstore pin bert@step-2000 --reason \"table 3\"",
		RunE: func(c *cobra.Command, refs []string) error {
			return a.with(c.Context(), func(s *store.Store) error {
				x, err := s.Pin(c.Context(), refs[0], reason)
				if err != nil {
					return err
				}
				return a.printMarked(x, "", fmt.Sprintf("pinned %s", refOf(x.Run, x.Trial, x.ID)))
			})
		},
	}
	c.Flags().StringVar(&reason, "reason", "", "reason to record with the pin")
	return c
}

func (a *app) unpinCommand() *cobra.Command {
	return &cobra.Command{
		Use: "unpin REF", Short: "Remove the pin of a checkpoint", Args: console.Args(cobra.ExactArgs(1)),
		Long:    "Remove the pin of a checkpoint, if it has one. This deletes nothing by itself: the next\n`ckptstore gc --apply` or `trainer run --keep` decides whether to keep the checkpoint.",
		Example: "  ckptstore unpin bert@step-2000",
		RunE: func(c *cobra.Command, refs []string) error {
			return a.with(c.Context(), func(s *store.Store) error {
				x, err := s.Unpin(c.Context(), refs[0])
				if err != nil {
					return err
				}
				return a.printMarked(x, "", fmt.Sprintf("%s is not pinned", refOf(x.Run, x.Trial, x.ID)))
			})
		},
	}
}

const tagHelp = `Tag a checkpoint: RUN@NAME then refers to it, and no policy deletes it. If another
checkpoint of the trial has the tag NAME, the tag moves.

With --delete, remove a tag, given as RUN@NAME or as REF NAME.`

func (a *app) tagCommand() *cobra.Command {
	var remove bool
	c := &cobra.Command{
		Use: "tag REF NAME", Short: "Tag a checkpoint, or remove a tag", Args: console.Args(cobra.RangeArgs(1, 2)), Long: tagHelp,
		Example: "  ckptstore tag bert@best:loss:min released\n  ckptstore show bert@released\n  ckptstore tag --delete bert@released",
		RunE: func(c *cobra.Command, given []string) error {
			if !remove && len(given) != 2 {
				return console.Usagef("tag REF NAME: the name is missing; see `ckptstore tag --help`")
			}
			return a.with(c.Context(), func(s *store.Store) error {
				if remove {
					return a.untag(c.Context(), s, given)
				}
				return a.tag(c.Context(), s, given[0], given[1])
			})
		},
	}
	c.Flags().BoolVarP(&remove, "delete", "d", false, "remove the tag")
	return c
}

func (a *app) tag(ctx context.Context, s *store.Store, ref, name string) error {
	c, from, err := s.Tag(ctx, ref, name)
	if err != nil {
		return err
	}
	text := fmt.Sprintf("%s is tagged %q", refOf(c.Run, c.Trial, c.ID), name)
	if from != "" {
		text += ", which was the tag of " + from
	}
	return a.printMarked(c, from, text)
}

func (a *app) untag(ctx context.Context, s *store.Store, given []string) error {
	name := given[len(given)-1]
	if len(given) == 1 {
		at := strings.LastIndexByte(name, '@')
		if at < 0 {
			return console.Usagef("tag --delete %s: want RUN@NAME", name)
		}
		name = name[at+1:]
	}
	c, err := s.Untag(ctx, given[0], name)
	if err != nil {
		return err
	}
	return a.printMarked(c, "", fmt.Sprintf("%s is no longer tagged %q", refOf(c.Run, c.Trial, c.ID), name))
}
