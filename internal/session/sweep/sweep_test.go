package sweep

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// The files of an aborted save are removed when no node writes them any more. A slow disk delays neither the
// messages of nodes nor the loss of one, and the end of the group waits for it.
func TestRemovalDelaysNoMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &Writers{}
		w.Expect(1, 2)
		heal := make(chan struct{})
		var removed atomic.Int32
		w.Abort("x", func() { <-heal; removed.Add(1) })
		w.Abort("y", func() { <-heal; removed.Add(1) })
		w.Settle(1, "x")
		w.Settle(2, "x")
		w.Settle(1, "y")
		w.Lose(2)
		synctest.Wait()
		if n := removed.Load(); n != 0 {
			t.Errorf("%d saves removed", n)
		}
		close(heal)
		w.Close()
		if n := removed.Load(); n != 2 {
			t.Errorf("%d saves removed, want 2", n)
		}
		if len(w.sweeps)+len(w.settled) > 0 {
			t.Errorf("of saves without files it keeps %d sweeps, %v", len(w.sweeps), w.settled)
		}
	})
}
