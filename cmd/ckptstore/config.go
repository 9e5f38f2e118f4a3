package main

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store/trusted"
)

const trustHelp = `Trust the store in DIR although other users can write to it.

A process that opens a store acts on its contents with the rights of its user: it
removes leftovers of aborted saves, and continues trainings. So a store opens for
writing only if its directory, its store.json and LOCK, and its log, data, blobs, views
and run belong to you, or to the group that shares it, and no other user can write to
them. Any other store is read by its receipts, with a warning; commands that need more
exit with 12. Trust such a store only if you trust everyone who can write to it.

The list of trusted directories is per user: $XDG_CONFIG_HOME/ckptstore/trusted, by
default ~/.config/ckptstore/trusted. An entry is valid while the directory keeps its
owner and group. $` + trusted.Env + ` (paths separated by colons) adds directories for
one process and its children, as in a container.`

func (a *app) configCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "config", Short: "Manage the settings of this user", Args: console.Args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.trustCommand())
	return c
}

func (a *app) trustCommand() *cobra.Command {
	var list, remove bool
	c := &cobra.Command{
		Use: "trust [DIR]", Short: "Trust a store that other users can write to", Args: console.Args(cobra.MaximumNArgs(1)), Long: trustHelp,
		Example: "  ckptstore config trust /mnt/team/ckpts\n  ckptstore config trust --list\n  ckptstore config trust --remove /mnt/team/ckpts",
		RunE: func(c *cobra.Command, dirs []string) error {
			switch {
			case list && (remove || len(dirs) > 0):
				return console.Usagef("--list prints the whole list; omit --remove and DIR")
			case list:
				return a.listTrusted()
			case len(dirs) == 0:
				return console.Usagef("config trust DIR: the directory is missing; see `ckptstore config trust --help`")
			case remove:
				return trusted.Remove(c.Context(), dirs[0])
			}
			t, err := trusted.Add(c.Context(), dirs[0])
			if err != nil {
				return err
			}
			return console.Emit(a.Console, t, []trusted.Dir{t}, func(w *tabwriter.Writer, _ bool) {
				fmt.Fprintf(w, "%s is trusted while it belongs to user %d and group %d\n", t.Path, t.UID, t.GID)
			})
		},
	}
	c.Flags().BoolVar(&list, "list", false, "list the trusted directories")
	c.Flags().BoolVar(&remove, "remove", false, "stop trusting DIR")
	return c
}

func (a *app) listTrusted() error {
	list, err := trusted.List()
	if err != nil {
		return err
	}
	if list == nil {
		list = []trusted.Dir{}
	}
	return console.Emit(a.Console, list, list, func(w *tabwriter.Writer, _ bool) {
		console.Row(w, "DIRECTORY", "USER", "GROUP")
		for _, t := range list {
			console.Row(w, t.Path, t.UID, t.GID)
		}
	})
}
