package s3

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/ckptstore/ckptstore/internal/object"
)

// TestAsksBeforeItSends puts an object to a server that refuses the first request, and counts
// the bytes of bodies that it receives.
func TestAsksBeforeItSends(t *testing.T) {
	data := bytes.Repeat([]byte("checkpoint"), askFrom)
	var asked, received atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Expect") != "100-continue" {
			t.Error("a request did not ask")
		}
		if asked.Add(1) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, "<Error><Code>SlowDown</Code></Error>")
			return
		}
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			t.Error(err)
		}
		received.Add(n)
		w.Header().Set("Etag", `"0123456789abcdef"`)
	}))
	defer server.Close()
	if err := gathered(t, serverAt(t, server.URL), "file", data, object.Replace); err != nil {
		t.Fatal(err)
	}
	if asked.Load() != 2 || received.Load() != int64(len(data)) {
		t.Errorf("%d requests and %d bytes, want 2 and %d", asked.Load(), received.Load(), len(data))
	}
}

// TestNo100Continue puts objects to a server that waits for the body of each request and sends no
// 100 Continue: the first is sent after a time, and the next does not ask.
func TestNo100Continue(t *testing.T) {
	t.Parallel()
	data := bytes.Repeat([]byte("checkpoint"), askFrom)
	var asked atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Expect") != "" {
			asked.Add(1)
		}
		c, b, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = c.Close() }()
		if n, err := io.CopyN(io.Discard, b, r.ContentLength); err != nil {
			t.Errorf("%d bytes: %v", n, err)
		}
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\nEtag: \"0123456789abcdef\"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
	}))
	defer server.Close()
	b := serverAt(t, server.URL)
	for _, name := range []string{"one", "two", "three"} {
		if err := gathered(t, b, name, data, object.Replace); err != nil {
			t.Fatal(err)
		}
	}
	if asked.Load() != 1 {
		t.Errorf("%d of 3 requests asked, want the first", asked.Load())
	}
}

// serverAt returns a bucket on a server that a test wrote.
func serverAt(t *testing.T, endpoint string) *Bucket {
	t.Helper()
	b, err := New(Location{Bucket: "bucket", Prefix: "p", Endpoint: endpoint, Region: "us-east-1"},
		Options{PartSize: 64 << 20, Keys: Static("access", "secret")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// TestExpectationFailed puts an object through a proxy that refuses requests with Expect.
func TestExpectationFailed(t *testing.T) {
	data := bytes.Repeat([]byte("checkpoint"), askFrom)
	var refused, received atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Expect") != "" {
			refused.Add(1)
			w.WriteHeader(http.StatusExpectationFailed)
			return
		}
		if r.Method != http.MethodPut {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		n, _ := io.Copy(io.Discard, r.Body)
		received.Add(n)
		w.Header().Set("Etag", `"0123456789abcdef"`)
	}))
	defer server.Close()
	if err := gathered(t, serverAt(t, server.URL), "file", data, object.Replace); err != nil || refused.Load() != 1 || received.Load() != int64(len(data)) {
		t.Errorf("%d refused, %d bytes received: %v", refused.Load(), received.Load(), err)
	}
}
