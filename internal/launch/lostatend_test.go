package launch_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
)

// recordedEnds is a [launch.Survival] that notes whose parts were ended.
type recordedEnds struct {
	mu    sync.Mutex
	parts []string
}

var _ launch.Survival = (*recordedEnds)(nil)

func (r *recordedEnds) Live(context.Context, int, int) error { return nil }
func (r *recordedEnds) Term() time.Duration                  { return time.Second }

func (r *recordedEnds) Silence(_ context.Context, node, attempt int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.parts = append(r.parts, fmt.Sprint(node, " in attempt ", attempt))
	return nil
}

// A job that ends because it has lost a node ends the part of this node in the log: its processes may live by the
// word of the log, and the next job does not ask for them.
func TestJobEndsPartOfTheNodeThatEndsIt(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, failsAlone...) // the node obeys nothing
	j.shared = t.TempDir()
	endpoint, err := nodes.Listen(t.Context(), nodes.EndpointConfig{
		Address: "127.0.0.1:0", Dir: j.shared, Job: j.cfg.Job, Run: j.cfg.Run, Store: home.ID, Version: "test", Min: 1, Max: 1,
		Self: nodes.Node{Index: 0, Key: "0", Standby: true}, Timeout: 3 * time.Second, Logger: j.cfg.Logger,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = endpoint.Close() })
	ends := &recordedEnds{}
	j.cfg.Endpoint, j.cfg.GatherTimeout, j.cfg.LastCall = endpoint, patience, patience
	j.cfg.Standby, j.cfg.Nodes, j.cfg.Survival, j.cfg.MaxInfraRestarts = true, session.OneNode(0), ends, 0
	port, err := launch.HoldPort()
	if err != nil {
		t.Fatal(err)
	}
	cfg := config(j.cfg.Run, 1, j.cfg.Command, j.out, j.log)
	cfg.Port = port
	link := j.join(1, cfg, &process.Contact{})
	t.Cleanup(link.Close)
	if err := link.Tell("serves", struct{}{}); err != nil {
		t.Fatal(err)
	}
	j.start()
	select {
	case _, ok := <-link.Commands(): // to start its part
		if !ok {
			t.Fatal("the node is lost before its group")
		}
	case <-time.After(patience):
		t.Fatal("no group")
	}
	link.Close()
	var failed *launch.FailedError
	if err := j.wait(); !errors.As(err, &failed) {
		t.Errorf("the job ended by %v", err)
	}
	if want := []string{"1 in attempt 1"}; !slices.Equal(ends.parts, want) {
		t.Errorf("parts that were ended: %q, want %q", ends.parts, want)
	}
}
