package rpc

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/internal/collective"
)

// patience bounds the wait for expected events.
const patience = 60 * time.Second

// The test binary is also a peer that can be killed.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == asPeer {
		if err := bePeer(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// collectives is a group's transport over a hub of this process.
type collectives struct {
	hub  *collective.Hub
	rank int
	size int
	seq  uint64
	met  func(rank int, seq uint64) // called before a rank joins the others
}

func (c *collectives) Rank() int { return c.rank }
func (c *collectives) Size() int { return c.size }

func (c *collectives) AllGather(ctx context.Context, own []byte) ([][]byte, error) {
	c.seq++
	if c.met != nil {
		c.met(c.rank, c.seq)
	}
	all, err := c.hub.Exchange(ctx, c.rank, c.seq, collective.OpAllGather, own)
	var mine [][]byte // the hub's are shared among the ranks
	for _, part := range all {
		mine = append(mine, bytes.Clone(part))
	}
	return mine, err
}

func (c *collectives) Broadcast(ctx context.Context, root int, data []byte) ([]byte, error) {
	c.seq++
	all, err := c.hub.Exchange(ctx, c.rank, c.seq, collective.OpBroadcast(root, len(data)), data)
	if err != nil {
		return nil, err
	}
	return bytes.Clone(all[root]), nil
}

// world opens an agent for each rank, with setups that change may modify, and
// closes the opened agents at the end of the test.
func world(t *testing.T, backend string, ranks int, change func(rank int, s *Setup)) ([]Agent, []error) {
	t.Helper()
	return worldThatMeets(t, backend, ranks, change, nil)
}

func worldThatMeets(t *testing.T, backend string, ranks int, change func(rank int, s *Setup), met func(rank int, seq uint64)) ([]Agent, []error) {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	hub, messages, store := collective.NewHub(ranks), NewSwitch(ranks), NewMemoryStore()
	agents, errs := make([]Agent, ranks), make([]error, ranks)
	done := make(chan int)
	for rank := range ranks {
		registry := Builtin()
		b, err := registry.Lookup(backend)
		if err != nil {
			t.Fatal(err)
		}
		s := Setup{
			Backend: b, Name: fmt.Sprint("worker", rank), Rank: AnyRank, World: AnyRank, Store: store, Token: "secret",
			Group: collective.New(&collectives{hub: hub, rank: rank, size: ranks, met: met}, collective.Options{}),
		}
		if backend == ProcessGroup {
			s.Store = messages.Messenger(rank)
		}
		if change != nil {
			change(rank, &s)
		}
		go func() {
			agents[rank], errs[rank] = registry.Init(ctx, s)
			done <- rank
		}()
	}
	for range ranks {
		<-done
	}
	t.Cleanup(func() {
		for _, a := range agents {
			if a != nil {
				if err := a.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
			}
		}
	})
	return agents, errs
}

// open is world for setups that must succeed.
func open(t *testing.T, backend string, ranks int, change func(rank int, s *Setup)) []Agent {
	t.Helper()
	agents, errs := world(t, backend, ranks, change)
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
	return agents
}

func handle(t *testing.T, a Agent, name string, f Func) {
	t.Helper()
	if err := a.Handle(name, f); err != nil {
		t.Fatal(err)
	}
}

// wantError checks that an error contains all parts.
func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", parts)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in error %q", part, err)
		}
	}
}

// each runs a test for both backends.
func each(t *testing.T, f func(t *testing.T, backend string)) {
	for _, backend := range []string{ProcessGroup, TensorPipe} {
		t.Run(backend, func(t *testing.T) { f(t, backend) })
	}
}

// within returns a channel's next value, or fails.
func within[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("%s did not come", what)
		panic("unreachable")
	}
}
