package launch_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session"
)

// refusesLater is refusesSecond with a late answer: after the worker has learned
// that its bytes are staged.
type refusesLater struct {
	refusesSecond
	told <-chan struct{}
}

// Append implements session.Log.
func (l refusesLater) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	seq, err := l.refusesSecond.Append(ctx, facts...)
	if err != nil {
		select {
		case <-l.told:
		case <-ctx.Done():
		}
	}
	return seq, err
}

var lastIsNotWaitedFor = workerRole("does not wait for its last save", func(ctx context.Context, c *client.Client) error {
	if err := save(ctx, c, 1); err != nil {
		return err
	}
	if _, err := c.Save(ctx, 2, state(2, c.Rank, c.WorldSize), client.SaveOptions{}); err != nil {
		return err
	}
	emit("told")
	return nil
})

// noKind is the kind of no event.
const noKind events.Kind = ""

// A job whose last save is lost reports it, whichever fact of the save the log
// does not take. It also does so if the save was lost before it began, or if its
// files have no room.
func TestLastSaveIsLost(t *testing.T) {
	t.Parallel()
	for _, kind := range []events.Kind{events.LocalPlan{}.Kind(), events.WriteSealed{}.Kind(), noKind} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 1, lastIsNotWaitedFor...)
			told := make(chan struct{})
			j.store.Log = refusesLater{refusesSecond{j.store.Log, kind, errRefused, nil}, told}
			why := errRefused.Error()
			if kind == noKind {
				g := j.gated("step-2.a1/r00000.safetensors")
				g.open, g.err, why = told, syscall.ENOSPC, "no space left on device"
			}
			j.start()
			j.out.await(t, 1, "told")
			close(told)
			err := j.wait()
			j.lost(err, "step-2.a1")
			if text := err.Error(); !strings.Contains(text, why) || !strings.Contains(text, "it would resume from step-1.a1") {
				t.Errorf("error %v", err)
			}
			committed, aborted := ended(t, runOf(t))
			if begun := len(bodiesOf[events.CheckpointBegun](t, runOf(t))) == 2; !slices.Equal(committed, []string{"step-1.a1"}) || begun != (len(aborted) == 1) {
				t.Errorf("committed %q, aborted %q", committed, aborted)
			}
			if kind == (events.LocalPlan{}).Kind() && len(aborted) > 0 {
				t.Errorf("the save without a plan in the log began: %q", aborted)
			}
		})
	}
}

var _ session.Log = refusesLater{}

var lastIsRefused = workerRole("is refused its last save", func(ctx context.Context, c *client.Client) error {
	if err := save(ctx, c, 1); err != nil {
		return err
	}
	grown := state(2, c.Rank, c.WorldSize) // by another plan, which the log has first
	grown.Values[1].Data = append(grown.Values[1].Data, " and more"...)
	if _, err := c.Save(ctx, 2, grown, client.SaveOptions{}); err == nil || !strings.Contains(err.Error(), errRefused.Error()) {
		return fmt.Errorf("error %w, want that it is refused", err)
	}
	return nil
})

// A save that was refused to the worker itself does not count: a worker that ends
// well nevertheless is content with the previous one.
func TestRefusedSaveIsNotLost(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, lastIsRefused...)
	j.store.Log = refusesSecond{j.store.Log, events.LocalPlan{}.Kind(), errRefused, nil}
	j.must()
	wantEnded(t, []string{"step-1.a1"}, nil)
}
