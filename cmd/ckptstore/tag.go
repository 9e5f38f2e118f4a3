package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
)

const tagHelp = `Give a checkpoint a further name: RUN@NAME then stands for it, and no policy
deletes it. A name that another checkpoint of the trial has as its tag moves.

With --delete the tag is taken back: REF is RUN@NAME, or any reference of the
checkpoint, followed by NAME.`

func (a *app) tagCommand() *cobra.Command {
	var remove bool
	c := &cobra.Command{
		Use: "tag REF NAME", Short: "Give a checkpoint a further name", Args: console.Args(cobra.RangeArgs(1, 2)), Long: tagHelp,
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
	c.Flags().BoolVarP(&remove, "delete", "d", false, "take the tag back")
	return c
}

func (a *app) tag(ctx context.Context, s *store.Store, ref, name string) error {
	c, from, err := s.Tag(ctx, ref, name)
	if err != nil {
		return err
	}
	said := fmt.Sprintf("%s@%s is tagged %q", c.Run, c.ID, name)
	if from != "" {
		said += ", which was the tag of " + from
	}
	return a.printMarked(c, from, said)
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
	return a.printMarked(c, "", fmt.Sprintf("%s@%s is no longer tagged %q", c.Run, c.ID, name))
}
