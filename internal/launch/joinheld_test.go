package launch_test

import (
	"context"
	"os/signal"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
)

// joinsHeld is a log that does not answer to the record of a node that has joined, once it is away.
type joinsHeld struct {
	session.Log
	away  atomic.Bool
	asked chan struct{} // gets a value when it is asked
	free  chan struct{} // closed when it answers again
}

// Append implements session.Log.
func (l *joinsHeld) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	joins := func(f events.Fact) bool { return f.Kind == (events.NodeJoined{}).Kind() }
	if l.away.Load() && slices.ContainsFunc(facts, joins) {
		l.asked <- struct{}{}
		<-l.free
	}
	return l.Log.Append(ctx, facts...)
}

var waitsForTheEnd = workerRole("waits until it is asked to end", func(ctx context.Context, _ *client.Client) error {
	asked, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	emit("trains")
	<-asked.Done()
	emit("is asked to end")
	return nil
})

// While the log does not take that a node has joined, the loss of another one ends its group nevertheless.
func TestLossWhileAJoinIsNotRecorded(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, waitsForTheEnd...)
	held := &joinsHeld{Log: j.store.Log, asked: make(chan struct{}, 1), free: make(chan struct{})}
	j.store.Log = held
	j.cfg.MaxInfraRestarts = 0
	other := j.spread(1, 1)[0]
	j.start()
	j.out.await(t, 1, "[rank0] trains")
	other.out.await(t, 1, "[rank1] trains")
	port, err := launch.HoldPort()
	if err != nil {
		t.Fatal(err)
	}
	third := config(j.cfg.Run, 1, j.cfg.Command, j.out, j.log)
	third.Port = port
	answer := sync.OnceFunc(func() { close(held.free) })
	defer answer()
	held.away.Store(true)
	link := j.join(2, third, &process.Contact{})
	defer link.Close()
	select {
	case <-held.asked:
	case <-time.After(patience):
		t.Fatal("the join is not recorded")
	}
	other.stop()
	j.out.await(t, 1, "[rank0] is asked to end")
	answer()
	if err := j.wait(); err == nil {
		t.Error("the job has not lost a node")
	}
}
