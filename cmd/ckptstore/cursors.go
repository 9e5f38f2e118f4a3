package main

import (
	"context"
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// cursorRow is one cursor in `events cursors --json`.
type cursorRow struct {
	Name     string    `json:"name"`
	Sequence uint64    `json:"sequence"` // of the last event that was handled
	Lag      uint64    `json:"lag"`      // events of the log after it
	MovedAt  time.Time `json:"moved_at"` // by the server's clock
}

func (a *app) cursorsCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "cursors", Short: "List the cursors of subscribers, or remove one", Args: console.Args(cobra.NoArgs),
		Long: `List the cursors that "events --cursor NAME" has left in the store, and how
many events of the log each has still before it.`,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.read(c.Context(), func(s *store.Store) error { return a.cursors(c.Context(), s) })
		},
	}
	c.AddCommand(&cobra.Command{
		Use: "rm NAME", Short: "Remove a cursor", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Remove a cursor. The next subscriber of that name begins where --from says.
A cursor that somebody follows is not removed: exit code 5.`,
		RunE: func(c *cobra.Command, names []string) error {
			return a.with(c.Context(), func(s *store.Store) error { return removeCursor(c.Context(), s, names[0]) })
		},
	})
	return c
}

func (a *app) cursors(ctx context.Context, s *store.Store) error {
	list, err := s.Log.ListCursors(ctx)
	if err != nil {
		return err
	}
	last, err := s.Log.Last(ctx)
	if err != nil {
		return err
	}
	rows := []cursorRow{}
	var damage error
	for _, c := range list {
		if c.Damage != nil {
			damage = errors.Join(damage, fmt.Errorf("%w: cursor %q: %w", store.ErrDamaged, c.Name, c.Damage))
			continue
		}
		rows = append(rows, cursorRow{Name: c.Name, Sequence: c.Sequence, Lag: last - min(last, c.Sequence), MovedAt: c.Moved.UTC()})
	}
	whole := struct {
		Cursors []cursorRow `json:"cursors"`
	}{rows}
	err = console.Emit(a.Console, whole, rows, func(w *tabwriter.Writer, _ bool) {
		console.Row(w, "CURSOR", "SEQUENCE", "LAG", "MOVED")
		for _, c := range rows {
			console.Row(w, c.Name, c.Sequence, c.Lag, console.When(c.MovedAt))
		}
	})
	return errors.Join(err, damage)
}

func removeCursor(ctx context.Context, s *store.Store, name string) error {
	list, err := s.Log.ListCursors(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, c := range list {
		if names = append(names, c.Name); c.Name != name {
			continue
		}
		return s.RemoveCursor(ctx, name)
	}
	return &projections.NotFoundError{What: "cursor", Ref: name, Hint: fmt.Sprintf("cursors are %q", names)}
}
