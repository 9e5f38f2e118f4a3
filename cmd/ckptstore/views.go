package main

import (
	"context"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
)

// viewsStatus is `views status --json`.
type viewsStatus struct {
	Store string `json:"store"`
	query.ViewsState
	Lag      uint64          `json:"lag"`                 // events of the log that the views have not folded
	FullRead *store.FullRead `json:"full_read,omitempty"` // absent before the first, also if that found something
	// Age is that of the full read, in seconds.
	Age *float64 `json:"full_read_age_s,omitempty"`
	// Damage is what the newest reading of the log has found.
	Damage *store.LogDamage `json:"log_damage,omitempty"`
}

func (a *app) viewsCommand() *cobra.Command {
	views := &cobra.Command{
		Use: "views", Short: "Look at the views that answer queries, and check them against the log", Args: console.Args(cobra.ArbitraryArgs),
		RunE: func(c *cobra.Command, given []string) error {
			if len(given) == 0 {
				return c.Help()
			}
			return console.Usagef("unknown command %q; see `%s --help`", given[0], c.CommandPath())
		},
	}
	views.AddCommand(&cobra.Command{
		Use: "status", Short: "Say what the views stand for", Args: console.Args(cobra.NoArgs),
		Long: `Say which sequence of the log the views contain and how far that is behind its
end, the version of the folds that made them, the digest of all rows, and how
long ago the log was last read from its first event to its end without a
finding: by views verify or rebuild, by verify, or by the owner of the store,
which reads it every six hours. What the newest reading has found is listed
until one finds nothing; the exit code is then 6.`,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.read(c.Context(), func(s *store.Store) error { return a.viewsStatus(c.Context(), s) })
		},
	}, &cobra.Command{
		Use: "verify", Short: "Rebuild the views beside the live ones and compare", Args: console.Args(cobra.NoArgs),
		Long: `Rebuild the views from the log in a directory beside the live ones, compare
both as of one sequence, and remove the rebuilt ones. A difference exits with
6. The store may be in use.`,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.with(c.Context(), func(s *store.Store) error {
				out, err := s.VerifyViews(c.Context())
				if err != nil {
					return err
				}
				return a.printRebuilt(out)
			})
		},
	}, &cobra.Command{
		Use: "rebuild", Short: "Rebuild the views and put them in the place of the live ones", Args: console.Args(cobra.NoArgs),
		Long: `Rebuild the views from the log beside those that are there, compare both, and
exchange them in one step. Nobody may own the store meanwhile. A difference
exits with 6; the rebuilt views are in place then too.`,
		RunE: func(c *cobra.Command, _ []string) error {
			out, err := store.RebuildViews(c.Context(), store.Options{Location: a.location})
			if err != nil {
				return err
			}
			return a.printRebuilt(out)
		},
	})
	return views
}

func (a *app) viewsStatus(ctx context.Context, s *store.Store) error {
	// The end is asked first: views that are behind it then are behind it.
	last, err := s.Log.Last(ctx)
	if err != nil {
		return err
	}
	out := viewsStatus{Store: s.ID}
	if out.ViewsState, err = query.Ask(ctx, s.Views(), query.State, query.Params{}); err != nil {
		return err
	}
	out.Lag = last - min(last, out.Sequence)
	read, found, err := s.LastFullRead()
	if err != nil {
		return err
	}
	age := ""
	out.Damage = read.Damage
	if read.Damage = nil; found && read.Sequence > 0 {
		seconds := time.Since(read.At).Seconds()
		out.FullRead, out.Age = &read, &seconds
		age = fmt.Sprintf("%v ago, up to sequence %d", time.Since(read.At).Round(time.Second), read.Sequence)
	}
	err = console.Emit(a.Console, out, []viewsStatus{out}, func(w *tabwriter.Writer, _ bool) {
		console.Row(w, "sequence", out.Sequence)
		console.Row(w, "lag", out.Lag)
		console.Row(w, "reducer", out.Reducer)
		console.Row(w, "digest", out.Digest)
		console.Row(w, "log last read in full", age)
		if out.Damage != nil {
			for _, f := range out.Damage.Findings {
				console.Row(w, "log damaged", f)
			}
		}
	})
	if err == nil && out.Damage != nil {
		return errFindings
	}
	return err
}

func (a *app) printRebuilt(out store.RebuiltViews) error {
	err := console.Emit(a.Console, out, []store.RebuiltViews{out}, func(w *tabwriter.Writer, _ bool) {
		console.Row(w, "sequence", out.Sequence)
		console.Row(w, "equal", out.Equal)
		console.Row(w, "rebuilt", out.Digest)
		console.Row(w, "had", out.Had)
		if out.Problem != "" {
			console.Row(w, "problem", out.Problem)
		}
	})
	compared := out.Had != "" || out.Problem != "" // there were views
	if err == nil && compared && !out.Equal {
		return errFindings
	}
	return err
}
