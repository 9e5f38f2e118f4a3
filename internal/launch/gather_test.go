package launch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
)

// silencing calls a function for each part of a node that is silenced.
type silencing func()

func (silencing) Live(context.Context, int, int) error      { return nil }
func (silencing) Term() time.Duration                       { return time.Second }
func (s silencing) Silence(context.Context, int, int) error { s(); return nil }

// endpointOfOne returns the endpoint of a job of one node.
func endpointOfOne(t *testing.T) *nodes.Endpoint {
	t.Helper()
	e, err := nodes.Listen(t.Context(), nodes.EndpointConfig{
		Address: "127.0.0.1:0", Dir: t.TempDir(), Job: "job", Run: "run", Store: "store", Version: "test", Min: 1, Max: 1,
		Timeout: 100 * time.Millisecond, Self: nodes.Node{Index: 0, Key: "0", Procs: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	return e
}

// A job that is asked to end while it ends the parts of lost nodes starts no other group: it has not waited
// until their processes are gone.
func TestAskedToEndWhileNodesAreSilenced(t *testing.T) {
	t.Parallel()
	e := endpointOfOne(t)
	j := &job{orders: newOrders(), log: slog.New(slog.DiscardHandler)}
	j.cfg.GatherTimeout = time.Minute
	j.cfg.Survival = silencing(func() { j.ask(StopRequest{Reason: "enough"}) })
	j.fleet = &fleet{job: j, endpoint: e, silenced: map[nodePart]bool{{node: 1, attempt: 3}: true}}
	if asked, err := j.gather(t.Context()); err != nil || !asked {
		t.Errorf("asked to end: %v, %v", asked, err)
	}
	if m := e.Members(); len(m) != 1 || m[0].State == nodes.StateActive {
		t.Errorf("members %+v", m)
	}
}

// A job that ends with lost nodes ends their parts first: the next one does not ask for nodes of an attempt whose end
// is in the log. A coordinator that was replaced ends none.
func TestJobEndsPartsOfLostNodes(t *testing.T) {
	t.Parallel()
	e := endpointOfOne(t)
	for name, c := range map[string]struct {
		err  error
		want int
	}{
		"in order":      {nil, 1},
		"with an error": {errors.New("the budget is used up"), 1},
		"replaced":      {fmt.Errorf("attempt 3: %w", session.ErrOvertaken), 0},
	} {
		silenced := 0
		j := &job{orders: newOrders(), log: slog.New(slog.DiscardHandler)}
		j.cfg.Survival = silencing(func() { silenced++ })
		j.fleet = &fleet{job: j, endpoint: e, silenced: map[nodePart]bool{{node: 1, attempt: 3}: true}}
		j.ask(StopRequest{Reason: "enough"})
		j.fleet.silenceLeft(t.Context(), c.err)
		if silenced != c.want {
			t.Errorf("%s: %d parts silenced, want %d", name, silenced, c.want)
		}
	}
}

// refusing is a log that takes the end of a part only if it may.
type refusing struct {
	silencing
	may *bool
}

func (r refusing) Silence(ctx context.Context, node, attempt int) error {
	if !*r.may {
		return errors.New("the log does not answer")
	}
	return r.silencing.Silence(ctx, node, attempt)
}

// A job that could not end the parts of lost nodes before a group, or has not waited until their processes were gone,
// does that when it ends: these nodes may train on by the word of the log.
func TestPartsOfLostNodesAreNotForgotten(t *testing.T) {
	t.Parallel()
	e := endpointOfOne(t)
	for _, answers := range []bool{false, true} {
		silenced, may := 0, answers
		j := &job{orders: newOrders(), log: slog.New(slog.DiscardHandler)}
		j.cfg.Survival = refusing{func() { silenced++ }, &may}
		j.fleet = &fleet{job: j, endpoint: e, silenced: map[nodePart]bool{{1, 3}: true, {2, 3}: true}}
		ctx, stop := context.WithCancel(t.Context())
		stop() // the job is stopped meanwhile
		if err := j.fleet.gather(ctx); err == nil {
			t.Fatal("a group while parts of lost nodes may live")
		}
		may, silenced = true, 0
		j.fleet.silenceLeft(t.Context(), nil)
		if silenced != 2 || len(j.fleet.silenced) > 0 {
			t.Errorf("the log answered before: %v: %d parts silenced, and %d are left", answers, silenced, len(j.fleet.silenced))
		}
	}
}
