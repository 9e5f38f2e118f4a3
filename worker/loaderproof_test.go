package worker

import (
	"context"
	"errors"
	"testing"

	"github.com/ckptstore/ckptstore/storage"
)

// proving is a loader whose proof of a checkpoint is under way, and what ends it.
func proving(t *testing.T, a *arenas, checkpoint string) (l *loader, end func()) {
	t.Helper()
	held, release := a.hold(checkpoint)
	ctx, stop := context.WithCancel(t.Context())
	p := &proof{checkpoint: checkpoint, stop: stop, done: make(chan struct{}), slots: map[int]*kept{}}
	for rank, of := range held {
		p.slots[rank] = of.kept
	}
	l = newLoader(&group{work: t.Context()}, a)
	l.proof = p
	go func() {
		<-ctx.Done()
		p.chunks = &storage.Proof{}
		release()
		close(p.done)
	}()
	return l, stop
}

// What was found out of slots is waited for, and believed of those slots and
// that checkpoint alone.
func TestProofIsOfItsSlots(t *testing.T) {
	s, a := keeping(t, 1)
	stage(t, s, "step-1.a1", 1)
	s.close()
	l, end := proving(t, a, "step-1.a1")
	held, release := a.hold("step-1.a1")
	defer release()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.proven(gone, "step-1.a1", held); !errors.Is(err, context.Canceled) {
		t.Errorf("a load that has ended waits for a proof: %v", err)
	}
	end()
	other := copies{0: {kept: &kept{checkpoint: "step-1.a1"}, idle: true}}
	for _, c := range []struct {
		checkpoint string
		slots      copies
		want       bool
	}{{"step-1.a1", held, true}, {"step-2.a1", held, false}, {"step-1.a1", other, false}} {
		if got, err := l.proven(t.Context(), c.checkpoint, c.slots); err != nil || (got != nil) != c.want {
			t.Errorf("%s: proof %v, %v", c.checkpoint, got, err)
		}
	}
}

// A save that comes before any load ends the proof, and has the slot that was
// looked at.
func TestSaveEndsProof(t *testing.T) {
	s, a := keeping(t, 1)
	stage(t, s, "step-1.a1", 1)
	s.close()
	l, end := proving(t, a, "step-1.a1")
	defer end()
	if err := l.endProof(t.Context()); err != nil {
		t.Fatal(err)
	}
	next := newStaging(a, s.cfg)
	t.Cleanup(next.close)
	stage(t, next, "step-2.a2", 2)
	if n := len(a.live); n != 1 {
		t.Errorf("there are %d slots, want the one that there was", n)
	}
}
