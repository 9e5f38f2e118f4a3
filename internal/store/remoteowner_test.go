package store

import (
	"context"
	"net"
	"sync/atomic"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

// A process on another machine, which shares the directory, appends and asks through the
// owner, and never takes the lock: not even when the owner is gone.
func TestOwnerOnAnotherMachine(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner := open(t, dir)
	var dials atomic.Int32
	far, err := Open(t.Context(), Options{Location: dir, Owner: func(ctx context.Context, door Door) (net.Conn, error) {
		dials.Add(1)
		return owner.DialOwner(ctx, door)
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = far.Close() }()
	d, err := events.NewDecision(Stamp("test"), events.Aggregate{Run: "r", Trial: "main"}, &events.TrialCreated{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := far.Log.Decide(t.Context(), d, 0); err != nil {
		t.Fatal(err)
	}
	trial, err := Queries{From: far.Views()}.Trial(t.Context(), "r", "main")
	if err != nil || trial.Status != projections.Pending {
		t.Errorf("trial %+v: %v", trial, err)
	}
	if far.Owns() || dials.Load() == 0 {
		t.Errorf("owns %v, %d dials", far.Owns(), dials.Load())
	}
	if err := owner.Close(); err != nil {
		t.Fatal(err)
	}
	if took, err := far.owner.tryOwn(t.Context()); took || err != nil {
		t.Errorf("took the lock: %v, %v", took, err)
	}
}
