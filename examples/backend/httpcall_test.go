package main

import (
	"bytes"
	"context"
	"errors"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client/rpc"
)

// A timeout that no call could meet is rejected.
func TestTimeout(t *testing.T) {
	for _, seconds := range []float64{0, -1, 1e-12, math.NaN()} {
		if _, _, err := httpOptionsOf(rpc.Settings{"timeout": seconds}); err == nil || !strings.Contains(err.Error(), "give seconds, more than 0") {
			t.Errorf("a timeout of %v: %v", seconds, err)
		}
	}
	o, _, err := httpOptionsOf(rpc.Settings{"timeout": 1.5})
	if err != nil || o.(*httpOptions).timeout != 1500*time.Millisecond {
		t.Errorf("options %v, %v", o, err)
	}
}

// caller returns an agent that calls itself.
func caller(t *testing.T) *httpAgent {
	t.Helper()
	a := &httpAgent{token: "secret", limit: time.Minute, funcs: map[string]rpc.Func{}}
	server := httptest.NewServer(http.HandlerFunc(a.serve))
	t.Cleanup(server.Close)
	a.self = rpc.Peer{Name: "me"}
	a.peers = map[string]address{"me": {a.self, strings.TrimPrefix(server.URL, "http://")}}
	return a
}

// A function can be called whatever characters its name has.
func TestFunctionName(t *testing.T) {
	a := caller(t)
	const name = "sum&function=other #1 100%+é"
	if err := a.Handle(name, func(_ context.Context, body []byte) ([]byte, error) { return body, nil }); err != nil {
		t.Fatal(err)
	}
	if got, err := a.Call(t.Context(), "me", name, []byte("hello")); err != nil || string(got) != "hello" {
		t.Errorf("%q, %v", got, err)
	}
}

// A call or an answer that is too large is an error.
func TestLargeBodies(t *testing.T) {
	a := caller(t)
	for name, size := range map[string]int{"most": maxBody, "too much": maxBody + 1} {
		if err := a.Handle(name, func(context.Context, []byte) ([]byte, error) { return make([]byte, size), nil }); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := a.Call(t.Context(), "me", "most", make([]byte, maxBody)); err != nil || !bytes.Equal(got, make([]byte, maxBody)) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if _, err := a.Call(t.Context(), "me", "too much", nil); err == nil || !strings.Contains(err.Error(), "the answer has more than") {
		t.Errorf("a large answer: %v", err)
	}
	_, err := a.Call(t.Context(), "me", "most", make([]byte, maxBody+1))
	if remote := (*rpc.RemoteError)(nil); !errors.As(err, &remote) || !strings.Contains(err.Error(), "too large") {
		t.Errorf("a large call: %v", err)
	}
}
