package faultproxy

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/internal/object/sigv4"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what must happen soon.
const patience = 20 * time.Second

// noise returns bytes without a pattern.
func noise(n int) []byte {
	p := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{}).Read(p) // never fails
	return p
}

// keeper is a server that keeps the bodies of PUT, and serves them with ranges.
type keeper struct {
	mu       sync.Mutex
	bodies   map[string][]byte // also of a request that broke off
	failures map[string]error  // of reading a body
	last     *http.Request
	requests int
	conns    atomic.Int64
	progress atomic.Int64 // bytes of bodies received
}

func (k *keeper) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	k.mu.Lock()
	k.requests++
	k.last = r
	k.mu.Unlock()
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		k.mu.Lock()
		body := k.bodies[r.URL.Path]
		k.mu.Unlock()
		w.Header().Set("ETag", `"right"`)
		if r.URL.Query().Has("chunked") {
			_, _ = w.Write(body[:len(body)/2])
			_ = http.NewResponseController(w).Flush()
			_, _ = w.Write(body[len(body)/2:])
			return
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
		return
	}
	if r.URL.Query().Has("unread") {
		w.WriteHeader(http.StatusPreconditionFailed)
		return
	}
	var body bytes.Buffer
	_, err := io.Copy(io.MultiWriter(&body, progress{k}), r.Body)
	k.mu.Lock()
	k.bodies[r.URL.Path] = body.Bytes()
	if err != nil {
		k.failures[r.URL.Path] = err
	}
	k.mu.Unlock()
	w.Header().Set("ETag", `"right"`)
}

type progress struct{ *keeper }

func (p progress) Write(b []byte) (int, error) {
	p.progress.Add(int64(len(b)))
	return len(b), nil
}

func (k *keeper) body(path string) ([]byte, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.bodies[path], k.failures[path]
}

func (k *keeper) seen() (int, *http.Request) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.requests, k.last
}

// begin starts a keeper and a proxy in front of it.
func begin(t *testing.T, key sigv4.Key) (*Proxy, *keeper) {
	t.Helper()
	k := &keeper{bodies: map[string][]byte{}, failures: map[string]error{}}
	server := httptest.NewUnstartedServer(k)
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			k.conns.Add(1)
		}
	}
	server.Start()
	t.Cleanup(server.Close)
	p, err := Start(Options{Target: server.URL, Key: key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p, k
}

// reply is what a client received. err is that of the request or of its body.
type reply struct {
	status int
	header http.Header
	body   []byte
	err    error
}

// client has connections of its own.
func client(t *testing.T) *http.Client {
	transport := &http.Transport{ExpectContinueTimeout: patience}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: patience}
}

// do sends a request, on a new connection if c is nil: Go's client repeats requests on a
// connection that it has used before.
func do(ctx context.Context, t *testing.T, c *http.Client, method, target string, body []byte, header http.Header) reply {
	t.Helper()
	if c == nil {
		c = client(t)
	}
	r, err := http.NewRequestWithContext(ctx, method, target, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(r.Header, header)
	answer, err := c.Do(r)
	if err != nil {
		return reply{err: err}
	}
	defer answer.Body.Close()
	got, err := io.ReadAll(answer.Body)
	return reply{answer.StatusCode, answer.Header, got, err}
}

// put stores data, which must succeed.
func put(t *testing.T, p *Proxy, path string, data []byte) {
	t.Helper()
	if got := do(t.Context(), t, nil, "PUT", p.URL()+path, data, nil); got.err != nil || got.status != http.StatusOK {
		t.Fatalf("put %s: status %d, %v", path, got.status, got.err)
	}
}

func get(t *testing.T, p *Proxy, path string) reply {
	t.Helper()
	return do(t.Context(), t, nil, "GET", p.URL()+path, nil, nil)
}

// until waits for a condition.
func until(t *testing.T, what string, done func() bool) {
	t.Helper()
	limit := time.After(patience)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-limit:
			t.Fatalf("not after %v: %s", patience, what)
		case <-tick.C:
		}
	}
}

// timedOut reports whether a client gave up.
func timedOut(err error) bool { return errors.Is(err, context.DeadlineExceeded) }
