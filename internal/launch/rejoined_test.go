package launch_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
)

// groupHeld is a log that does not answer to the start of a group until it is free.
type groupHeld struct {
	session.Log
	asked chan struct{} // gets a value when it is asked
	free  chan struct{} // closed when it answers
}

// Decide implements session.Log.
func (l *groupHeld) Decide(ctx context.Context, d events.Decision, after uint64) (uint64, error) {
	if d.Kind == (events.GroupStarted{}).Kind() {
		l.asked <- struct{}{}
		<-l.free
	}
	return l.Log.Decide(ctx, d, after)
}

// The coordinating trainer has chosen a group, and the log does not answer. Meanwhile the trainer of a node of this group
// starts again. The new trainer gets no part in the group, because it has not opened the store. The node is lost for
// the group.
func TestNodeJoinsAgainBeforeItsGroupStarts(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, waitsForTheEnd...)
	j.cfg.MaxInfraRestarts = 0
	held := &groupHeld{j.store.Log, make(chan struct{}, 1), make(chan struct{})}
	j.store.Log = held
	answer := sync.OnceFunc(func() { close(held.free) })
	defer answer()
	first := j.beatsOnly()
	j.start()
	select {
	case <-held.asked:
	case <-time.After(patience):
		t.Fatal("no group")
	}
	first.Close()
	port, err := launch.HoldPort()
	if err != nil {
		t.Fatal(err)
	}
	cfg := config(j.cfg.Run, 1, j.cfg.Command, j.out, j.log)
	cfg.Port = port
	again := j.join(1, cfg, &process.Contact{})
	defer again.Close()
	answer()
	var failed *launch.FailedError
	if err := j.wait(); !errors.As(err, &failed) || failed.Kind != blame.Infrastructure || !strings.Contains(failed.Cause, "node 1 is lost") {
		t.Errorf("the job ended by %v, want the loss of node 1", err)
	}
	select {
	case c, ok := <-again.Commands():
		t.Errorf("the new trainer got the command %s %s (%v)", c.Kind, c.Body, ok)
	default:
	}
}
