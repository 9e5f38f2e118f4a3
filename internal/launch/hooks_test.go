package launch_test

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch/backend"
)

// hooks is a backend that records its calls and makes others of its own.
type hooks struct {
	backend.Default
	t     *testing.T
	job   *job
	holds bool
	each  map[string]func(context.Context, *backend.Group) error

	mu    sync.Mutex
	calls []string
}

var (
	_ backend.Backend = (*hooks)(nil)
	_ backend.Config  = (*hooks)(nil)
	_ backend.Gate    = (*hooks)(nil)
)

// hooked makes hooks the backend of a job.
func hooked(t *testing.T, j *job, each map[string]func(context.Context, *backend.Group) error) *hooks {
	t.Helper()
	h := &hooks{t: t, job: j, each: each}
	j.cfg.Backend, j.cfg.Backends, j.cfg.InitHook = h.Name(), backend.Builtin(), h.Init
	if err := j.cfg.Backends.Register(h); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *hooks) call(ctx context.Context, name string, g *backend.Group) error {
	h.mu.Lock()
	h.calls = append(h.calls, name)
	h.mu.Unlock()
	if f := h.each[name]; f != nil {
		return f(ctx, g)
	}
	return nil
}

func (h *hooks) wantCalls(want ...string) {
	h.t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	if !slices.Equal(h.calls, want) {
		h.t.Errorf("hooks were called %q, want %q", h.calls, want)
	}
}

// awaitCall waits until a hook was called.
func (h *hooks) awaitCall(name string) {
	h.t.Helper()
	called := func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return slices.Contains(h.calls, name)
	}
	for tick, end := time.Tick(5*time.Millisecond), time.Now().Add(patience); !called(); <-tick {
		if time.Now().After(end) {
			h.t.Fatalf("hook %q is not called", name)
		}
	}
}

// Name implements backend.Config.
func (h *hooks) Name() string { return "hooks" }

// Backend implements backend.Config.
func (h *hooks) Backend() backend.Backend { return h }

// HoldsHello implements backend.Gate.
func (h *hooks) HoldsHello() bool { return h.holds }

// Init is the init hook.
func (h *hooks) Init(ctx context.Context, g *backend.Group) error { return h.call(ctx, "init", g) }

// OnStart implements backend.Backend.
func (h *hooks) OnStart(ctx context.Context, g *backend.Group) error {
	return h.call(ctx, "start", g)
}

// OnTrainingStart implements backend.Backend.
func (h *hooks) OnTrainingStart(ctx context.Context, g *backend.Group) error {
	return h.call(ctx, "training", g)
}

// OnShutdown implements backend.Backend.
func (h *hooks) OnShutdown(ctx context.Context, g *backend.Group) error {
	return h.call(ctx, "shutdown", g)
}

// sockets are those of the ranks of a job.
func (h *hooks) sockets() []string {
	found, err := filepath.Glob(filepath.Join(home.Runtime, "job-"+h.job.cfg.Job[28:], "*.sock"))
	if err != nil {
		h.t.Error(err)
	}
	return found
}

// hears waits for a text of the workers, but no longer than usual.
func (h *hooks) hears(text string) bool {
	limit := time.After(shortly)
	for {
		more := h.job.out.next()
		if strings.Contains(h.job.out.String(), text) {
			return true
		}
		select {
		case <-more:
		case <-limit:
			return false
		}
	}
}
