package trainer

import (
	"errors"
	"fmt"
	"testing"

	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
)

// A node coordinates in place of another until the job ends. If it could not, for any reason, or another
// node coordinates in its place by now, it may do so later. Otherwise its part would wait for ever for a
// coordinator that this node believes to be, or end with its own error
// after a job that ended well under another one.
func TestHeir(t *testing.T) {
	t.Parallel()
	failed := make(chan error, 1)
	fails := func(err error) { failed <- err }
	ends := errors.New("the job has failed")
	for name, c := range map[string]struct {
		err   error
		took  bool // the log has it as coordinator
		heir  bool // it has coordinated
		again bool // it may take over later
	}{
		"the job ends":            {nil, true, true, false},
		"the job fails":           {ends, true, true, false},
		"the store does not open": {ends, false, false, true},
		"it is overtaken":         {fmt.Errorf("append: %w", session.ErrOvertaken), true, false, true},
		"the port is taken":       {errTaken, false, false, true},
		"the lease is not free":   {&store.RunningError{Run: "run"}, false, false, true},
	} {
		var h heir
		if h.active() {
			t.Errorf("%s: active before", name)
		}
		calls, end := 0, make(chan struct{})
		h.by(func(at string) (bool, error) {
			if calls++; at != "a:1" {
				t.Errorf("%s: in place of %s", name, at)
			}
			<-end
			return c.took, c.err
		})
		h.take("a:1", fails)
		h.take("a:1", fails) // it does already
		if !h.active() || h.over() {
			t.Errorf("%s: active %v, over %v", name, h.active(), h.over())
		}
		close(end)
		coordinated, err := h.wait()
		if coordinated != c.heir || c.heir && !errors.Is(err, c.err) {
			t.Errorf("%s: coordinated %v, %v", name, coordinated, err)
		}
		if c.again {
			select {
			case got := <-failed:
				if !errors.Is(got, c.err) {
					t.Errorf("%s: failed with %v", name, got)
				}
			default: // wait returned after it
				t.Errorf("%s: not reported", name)
			}
		}
		if h.active() == c.again || h.over() == c.again || calls != 1 {
			t.Errorf("%s: active %v, over %v after %d calls", name, h.active(), h.over(), calls)
		}
	}
	var none *heir
	if none.active() || none.over() {
		t.Error("no heir is active")
	}
}
