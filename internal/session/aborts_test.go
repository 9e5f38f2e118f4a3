package session

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// The files of an aborted save are removed when no node writes them any more. A slow disk delays neither the
// messages of nodes nor the loss of one, and the end of the group waits for it.
func TestRemovalDelaysNoMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &aborts{}
		aborted := a.expect(Nodes{{0}, {1}, {2}}, 0)
		heal := make(chan struct{})
		var removed atomic.Int32
		aborted("x", func() { <-heal; removed.Add(1) })
		aborted("y", func() { <-heal; removed.Add(1) })
		a.settle(1, "x")
		a.settle(2, "x")
		a.settle(1, "y")
		a.lose(2)
		synctest.Wait()
		if n := removed.Load(); n != 0 {
			t.Errorf("%d saves removed", n)
		}
		close(heal)
		a.over()
		if n := removed.Load(); n != 2 {
			t.Errorf("%d saves removed, want 2", n)
		}
	})
}
