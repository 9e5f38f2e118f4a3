package nodes

import (
	"errors"
	"net/http"
	"sync/atomic"
	"testing"
)

// An agent repeats a probe of the shared directory that got no answer.
func TestProbeWithoutAnswer(t *testing.T) {
	t.Parallel()
	j := listen(t, short)
	asked := atomic.Int32{}
	j.Handle("POST "+probePath, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) < 3 {
			panic(http.ErrAbortHandler) // the connection breaks
		}
		_, _ = w.Write([]byte("{}"))
	}))
	if err := join1(t, j.agent("a", -1)).ProveShared(within(t), j.dir); err != nil {
		t.Error(err)
	}
	if n := asked.Load(); n != 3 {
		t.Errorf("%d requests, want 3", n)
	}
}

// An agent that is no member any more when its probe is answered joins again: it gets
// ErrExpelled.
func TestProbeOfLostNode(t *testing.T) {
	t.Parallel()
	j := listen(t, short)
	j.Handle("POST "+probePath, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		if err := j.Expel(1, j.Members()[1].Joining, "the test"); err != nil {
			t.Error(err)
		}
		panic(http.ErrAbortHandler)
	}))
	if err := join1(t, j.agent("a", -1)).ProveShared(within(t), j.dir); !errors.Is(err, ErrExpelled) {
		t.Errorf("error %v, want ErrExpelled", err)
	}
}
