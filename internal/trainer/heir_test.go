package trainer

import (
	"errors"
	"testing"

	"github.com/ckptstore/ckptstore/internal/store"
)

// A node coordinates in place of another until it ends. If another one was faster, it may do so later.
func TestHeir(t *testing.T) {
	t.Parallel()
	failed := make(chan error, 1)
	fails := func(err error) { failed <- err }
	ends := errors.New("the job has failed")
	for name, c := range map[string]struct {
		err   error
		heir  bool // it has coordinated
		again bool // it may take over later
	}{
		"the job ends":          {nil, true, false},
		"the job fails":         {ends, true, false},
		"the port is taken":     {errTaken, false, true},
		"the lease is not free": {&store.RunningError{Run: "run"}, false, true},
	} {
		var h heir
		if h.active() {
			t.Errorf("%s: active before", name)
		}
		calls, end := 0, make(chan struct{})
		h.coordinate = func(at string) error {
			if calls++; at != "a:1" {
				t.Errorf("%s: in place of %s", name, at)
			}
			<-end
			return c.err
		}
		h.take("a:1", fails)
		h.take("a:1", fails) // it does already
		if !h.active() {
			t.Errorf("%s: not active", name)
		}
		close(end)
		coordinated, err := h.wait()
		if coordinated != c.heir || c.heir && !errors.Is(err, c.err) {
			t.Errorf("%s: coordinated %v, %v", name, coordinated, err)
		}
		if c.again {
			if got := <-failed; !errors.Is(got, c.err) {
				t.Errorf("%s: failed with %v", name, got)
			}
		}
		if h.active() == c.again || calls != 1 {
			t.Errorf("%s: active %v after %d calls", name, h.active(), calls)
		}
	}
	var none *heir
	if none.active() {
		t.Error("no heir is active")
	}
}
