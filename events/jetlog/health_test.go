package jetlog

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestWatch checks that a server that no longer accepts writes is noticed, and that a
// healthy one is left alone.
func TestWatch(t *testing.T) {
	t.Parallel()
	_, s := newLog(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*healthEvery)
	defer cancel()
	if err := s.Watch(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a healthy server: %v", err)
	}
	if err := s.ns.DisableJetStream(); err != nil {
		t.Fatal(err)
	}
	if err := s.Watch(t.Context()); !errors.Is(err, ErrBroken) || !strings.Contains(err.Error(), "stopped its streams") {
		t.Errorf("a server without streams: %v", err)
	}
}

// TestDown checks that an abandoned request reports why no process serves the log.
func TestDown(t *testing.T) {
	t.Parallel()
	s := startServer(t, filepath.Join(t.TempDir(), "log"))
	l := connectTo(t, Options{Dial: dial(s), Down: func() error { return syscall.ENOSPC }})
	if err := l.Create(t.Context(), created(t, "store")); err != nil {
		t.Fatal(err)
	}
	s.Shutdown()
	for what, do := range map[string]func(context.Context) error{
		"append": func(ctx context.Context) error { _, err := l.Append(ctx, fact(t, 1)); return err },
		"decide": func(ctx context.Context) error { _, err := l.Decide(ctx, begun(t, "step-1"), 0); return err },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		err := do(ctx)
		cancel()
		if !errors.Is(err, ErrUnacknowledged) || !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("%s without a server: %v", what, err)
		}
	}
}
