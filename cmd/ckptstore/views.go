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
	"github.com/ckptstore/ckptstore/internal/store/views"
)

// viewsStatus is the output of `views status --json`.
type viewsStatus struct {
	Store string `json:"store"`
	query.ViewsState
	Lag      uint64          `json:"lag"`                 // events of the log that the views have not folded
	FullRead *store.FullRead `json:"full_read,omitempty"` // last full reading without findings
	// Age is the age of FullRead in seconds.
	Age *float64 `json:"full_read_age_s,omitempty"`
	// Damage is what the newest reading of the log found.
	Damage *store.LogDamage `json:"log_damage,omitempty"`
}

func (a *app) viewsCommand() *cobra.Command {
	views := &cobra.Command{
		Use: "views", Short: "Show, verify or rebuild the views that answer queries", Args: console.Args(cobra.ArbitraryArgs),
		RunE: func(c *cobra.Command, given []string) error {
			if len(given) == 0 {
				return c.Help()
			}
			return console.Usagef("unknown command %q; see `%s --help`", given[0], c.CommandPath())
		},
	}
	views.AddCommand(&cobra.Command{
		Use: "status", Short: "Show the state of the views", Args: console.Args(cobra.NoArgs),
		Long: `Show the sequence of the log that the views contain, how far that is behind the end of
the log, the version of the reducer that built them, and the digest of all rows.

Also show how long ago the whole log was last read without findings: by views verify or
rebuild, by verify, or by the owner of the store, which reads it every six hours. If the
newest reading found damage, list it and exit with code 6.`,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.read(c.Context(), func(s *store.Store) error { return a.viewsStatus(c.Context(), s) })
		},
	}, &cobra.Command{
		Use: "verify", Short: "Compare the views with a rebuild from the log", Args: console.Args(cobra.NoArgs),
		Long: `Rebuild the views from the log in a separate directory, compare them with the live views
as of the same sequence, and remove the rebuilt ones. If they differ, exit with code 6.
The store may be in use.`,
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
		Use: "rebuild", Short: "Rebuild the views from the log", Args: console.Args(cobra.NoArgs),
		Long: `Rebuild the views from the log, compare them with the present views, and replace those
atomically. No process may own the store meanwhile. If the two differed, exit with code
6; the views are replaced anyway.`,
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
	// Read the end of the log first, so that the lag does not count newer events.
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

func (a *app) printRebuilt(out views.Rebuilt) error {
	err := console.Emit(a.Console, out, []views.Rebuilt{out}, func(w *tabwriter.Writer, _ bool) {
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
