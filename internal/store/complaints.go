package store

import (
	"context"
	"log/slog"
)

// complaints passes a server's warnings on for debugging only: after a kill
// they are about caches of its state, which it makes anew. Damage of the log is
// found by package jetlog's own checks, whoever caused it.
type complaints struct{ slog.Handler }

// Handle implements [slog.Handler].
func (c complaints) Handle(ctx context.Context, r slog.Record) error {
	if r.Level == slog.LevelWarn {
		r.Level = slog.LevelDebug
	}
	if !c.Enabled(ctx, r.Level) {
		return nil
	}
	return c.Handler.Handle(ctx, r)
}

// WithAttrs implements [slog.Handler].
func (c complaints) WithAttrs(a []slog.Attr) slog.Handler { return complaints{c.Handler.WithAttrs(a)} }

// WithGroup implements [slog.Handler].
func (c complaints) WithGroup(name string) slog.Handler { return complaints{c.Handler.WithGroup(name)} }

func serverLogger(to *slog.Logger) *slog.Logger { return slog.New(complaints{to.Handler()}) }
