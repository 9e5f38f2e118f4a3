package backend

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestBuiltin(t *testing.T) {
	r := Builtin()
	if got, want := r.Names(), []string{"none", "process_group", "tensorpipe", "torch"}; !slices.Equal(got, want) {
		t.Errorf("names %q, want %q", got, want)
	}
	_, err := r.Lookup("mpi")
	var unknown *UnknownError
	if !errors.As(err, &unknown) || !strings.Contains(err.Error(), `no backend "mpi" is registered; choose one of none, process_group, tensorpipe, torch`) {
		t.Errorf("error %v", err)
	}
	for _, c := range []struct {
		name, devices string
		want          map[string]string // of rank 1
	}{
		{Torch, "", map[string]string{EnvBackend: "gloo"}},
		{Torch, "GPU-", map[string]string{EnvBackend: "nccl", "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}},
		{TensorPipe, "", map[string]string{EnvBackend: "tensorpipe", EnvRPCName: "worker1"}},
		{ProcessGroup, "", map[string]string{EnvBackend: "process_group", EnvRPCName: "worker1"}},
		{None, "", nil},
		{None, "GPU-", map[string]string{"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}},
	} {
		config, err := r.Lookup(c.name)
		if err != nil || config.Name() != c.name {
			t.Fatal(config, err)
		}
		g := groupOf("", "")
		if c.devices != "" {
			g = groupOf(c.devices+"0", c.devices+"1")
		}
		if err := NewExecutor(c.name, config.Backend(), Options{}).Start(t.Context(), g); err != nil {
			t.Fatal(err)
		}
		got := g.Workers[1].Env
		if len(got) != len(c.want) {
			t.Errorf("%s: rank 1 is given %v, want %v", c.name, got, c.want)
		}
		for k, v := range c.want {
			if got[k] != v {
				t.Errorf("%s: rank 1 is given %s=%q, want %q", c.name, k, got[k], v)
			}
		}
	}
}

// mine is a backend of a user's own.
type mine struct{ name string }

// Name implements Config.
func (m mine) Name() string { return m.name }

// Backend implements Config.
func (mine) Backend() Backend { return Default{} }

func TestRegister(t *testing.T) {
	r := Builtin()
	if err := r.Register(mine{"mine"}); err != nil {
		t.Fatal(err)
	}
	if err := r.Register(mine{"mine"}); err == nil || !strings.Contains(err.Error(), `"mine": it is already registered; choose another name`) {
		t.Errorf("error %v", err)
	}
	if err := r.Register(mine{}); err == nil || !strings.Contains(err.Error(), "it has no name") {
		t.Errorf("error %v", err)
	}
	if got, err := r.Lookup("mine"); err != nil || got.Name() != "mine" {
		t.Errorf("%v, %v", got, err)
	}
	if slices.Contains(Builtin().Names(), "mine") {
		t.Error("registries are one")
	}
	if err := new(Registry).Register(mine{"mine"}); err != nil {
		t.Error(err)
	}
}

// sleeps is a backend with hooks that do not look at their context.
type sleeps struct {
	Default
	wake chan struct{}
}

// OnStart implements Backend.
func (s sleeps) OnStart(context.Context, *Group) error { <-s.wake; return nil }

// OnShutdown implements Backend.
func (s sleeps) OnShutdown(context.Context, *Group) error { <-s.wake; return nil }

// A hook that does not end is abandoned, at the deadline or when its group ends.
func TestHookThatDoesNotEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wake := make(chan struct{})
		defer close(wake)
		e := NewExecutor("slow", sleeps{wake: wake}, Options{})
		began := time.Now()
		if err := e.Start(t.Context(), groupOf("")); err == nil || !strings.Contains(err.Error(), "backend slow: OnStart: it does not end within 1m0s") || time.Since(began) != time.Minute {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(errors.New("rank 3 has died")) })
		if err := e.Start(ctx, groupOf("")); err == nil || !strings.Contains(err.Error(), "OnStart: rank 3 has died") {
			t.Errorf("error %v", err)
		}
		if err := e.Start(ctx, groupOf("")); err == nil || !strings.Contains(err.Error(), "OnStart: rank 3 has died") {
			t.Errorf("in a context that has ended: error %v", err)
		}
	})
}

// ends is a backend that counts its ends.
type ends struct {
	Default
	n   *int
	err error
}

// OnShutdown implements Backend.
func (e ends) OnShutdown(context.Context, *Group) error { *e.n++; return e.err }

// OnShutdown runs once, at a graceful end only, and its error is logged.
func TestShutdown(t *testing.T) {
	var log strings.Builder
	n := 0
	e := NewExecutor("test", ends{n: &n, err: errors.New("rank 1 is gone")}, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	e.Shutdown(t.Context())
	if err := e.Start(t.Context(), groupOf("")); err != nil {
		t.Fatal(err)
	}
	e.Abort()
	e.Shutdown(t.Context())
	e.End()
	if n != 0 {
		t.Errorf("OnShutdown ran %d times without a graceful end", n)
	}
	if err := e.Start(t.Context(), groupOf("")); err != nil {
		t.Fatal(err)
	}
	e.Shutdown(t.Context())
	e.Abort()
	e.Shutdown(t.Context())
	if n != 1 || strings.Count(log.String(), "OnShutdown: rank 1 is gone") != 1 {
		t.Errorf("OnShutdown ran %d times; the log is %s", n, log.String())
	}
}

// observes is a backend that notes why its groups have failed.
type observes struct {
	Default
	causes []string
}

func (o *observes) OnFailure(_ context.Context, g *Group, cause error) error {
	o.causes = append(o.causes, cause.Error())
	return nil
}

func (o *observes) OnShutdown(context.Context, *Group) error {
	o.causes = append(o.causes, "shutdown")
	return nil
}

// An aborted group has failed, a group that ends otherwise has not.
func TestFailureObserver(t *testing.T) {
	o := &observes{}
	e := NewExecutor("test", o, Options{})
	start := func() {
		t.Helper()
		if err := e.Start(t.Context(), groupOf("")); err != nil {
			t.Fatal(err)
		}
	}
	cause := errors.New("rank 0 is gone")
	e.Failed(t.Context(), cause) // no group is live
	start()
	e.Failed(t.Context(), cause) // nor has this one failed
	e.Abort()
	e.Shutdown(t.Context())
	e.Failed(t.Context(), cause)
	e.End()
	start()
	e.Shutdown(t.Context())
	e.Abort()
	e.Failed(t.Context(), cause) // it has ended gracefully
	e.End()
	if want := []string{"rank 0 is gone", "shutdown"}; !slices.Equal(o.causes, want) {
		t.Errorf("hooks noted %q, want %q", o.causes, want)
	}
}

// panics is a backend each of whose hooks panics.
type panics struct{}

var (
	_ Backend         = panics{}
	_ Gate            = panics{}
	_ FailureObserver = panics{}
)

func (panics) OnStart(context.Context, *Group) error                  { panic("in OnStart") }
func (panics) OnTrainingStart(context.Context, *Group) error          { panic("in OnTrainingStart") }
func (panics) OnShutdown(context.Context, *Group) error               { panic("in OnShutdown") }
func (panics) OnFailure(context.Context, *Group, error) error         { panic("in OnFailure") }
func (panics) EncodeData(map[string]any) (map[string]any, error)      { panic("in EncodeData") }
func (panics) DecodeData(data map[string]any) (map[string]any, error) { panic("in DecodeData") }
func (panics) ShareVisibleDevices() bool                              { panic("in ShareVisibleDevices") }
func (panics) HoldsHello() bool                                       { panic("in HoldsHello") }

// startsWell panics in each hook except at the start.
type startsWell struct{ panics }

func (startsWell) OnStart(context.Context, *Group) error { return nil }

// A hook that panics has failed: the error names it and has its stack.
func TestHookPanics(t *testing.T) {
	share := false
	want := func(hook string, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s: no error", hook)
			return
		}
		for _, part := range []string{"backend test: ", hook + " panicked: in " + hook + "\n", "backend_test.go:"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %q is not in %v", hook, part, err)
			}
		}
	}
	init := func(context.Context, *Group) error { panic("in init hook") }
	want("init hook", NewExecutor("test", Default{}, Options{Init: init}).Start(t.Context(), groupOf("")))
	want("ShareVisibleDevices", NewExecutor("test", startsWell{}, Options{}).Start(t.Context(), groupOf("")))
	want("OnStart", NewExecutor("test", panics{}, Options{Share: &share}).Start(t.Context(), groupOf("")))

	var log strings.Builder
	e := NewExecutor("test", startsWell{}, Options{Share: &share, Log: slog.New(slog.NewTextHandler(&log, nil))})
	_, err := e.HoldsHello()
	want("HoldsHello", err)
	for _, end := range []func(){func() { e.Shutdown(t.Context()) }, func() { e.Abort(); e.Failed(t.Context(), errors.New("a cause")) }} {
		if err := e.Start(t.Context(), groupOf("")); err != nil {
			t.Fatal(err)
		}
		want("OnTrainingStart", e.TrainingStart(t.Context()))
		_, err := e.Fetch(nil)
		want("DecodeData", err)
		end()
		e.End()
	}
	for _, part := range []string{"OnShutdown panicked: in OnShutdown", "OnFailure panicked: in OnFailure"} {
		if !strings.Contains(log.String(), part) {
			t.Errorf("%q is not in the log: %s", part, log.String())
		}
	}
}

// stuck is a backend whose DecodeData waits for a channel.
type stuck struct {
	Default
	until chan struct{}
}

func (s stuck) DecodeData(data map[string]any) (map[string]any, error) {
	<-s.until
	return data, nil
}

// A DecodeData that does not end fails the report after the limit of hooks.
func TestDecodeDataThatDoesNotEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := stuck{until: make(chan struct{})}
		e := NewExecutor("test", b, Options{})
		if err := e.Start(t.Context(), groupOf("")); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if _, err := e.Fetch(map[string]any{"loss": 1.0}); err == nil || !strings.Contains(err.Error(), "DecodeData does not end within 1m0s") || time.Since(began) != time.Minute {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		close(b.until)
		if out, err := e.Fetch(map[string]any{"loss": 1.0}); err != nil || out["loss"] != 1.0 {
			t.Errorf("the next: %v, %v", out, err)
		}
	})
}
