package faultproxy

import (
	"bytes"
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/object/sigv4"
)

// A server receives what the client has sent, and a client what the server has sent.
func TestForwardsUnchanged(t *testing.T) {
	p, k := begin(t, sigv4.Key{})
	data := noise(3 << 20)
	const target = "/bucket/a%2Fb%20c+d//e?uploadId=x%2By&partNumber=3&empty"
	r, err := http.NewRequestWithContext(t.Context(), "PUT", p.URL()+target, bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	r.Host = "bucket.example:9000"
	r.Header.Set("X-Amz-Date", "20260101T000000Z")
	r.Header["User-Agent"] = nil
	answer, err := client(t).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	_ = answer.Body.Close()
	if got := answer.Header; got.Get("ETag") != `"right"` || got.Get("Content-Type") != "" || answer.ContentLength != 0 {
		t.Errorf("answer: %v", got)
	}
	_, last := k.seen()
	if last.RequestURI != target || last.Host != r.Host || last.ContentLength != int64(len(data)) {
		t.Errorf("server received %q for %q, %d bytes", last.RequestURI, last.Host, last.ContentLength)
	}
	if h := last.Header; h.Get("X-Amz-Date") == "" || h.Get("User-Agent") != "" || h.Get("X-Forwarded-For") != "" {
		t.Errorf("server received %v", h)
	}
	if got, err := k.body(last.URL.Path); !bytes.Equal(got, data) || err != nil {
		t.Errorf("server received %d bytes, %v", len(got), err)
	}
	for _, query := range []string{"", "?chunked"} {
		if got := do(t.Context(), t, nil, "GET", p.URL()+"/bucket/a%2Fb%20c+d//e"+query, nil, nil); !bytes.Equal(got.body, data) || got.err != nil {
			t.Errorf("get%s: %d bytes, %v", query, len(got.body), got.err)
		}
	}
	if got := do(t.Context(), t, nil, "HEAD", p.URL()+"/bucket/a%2Fb%20c+d//e", nil, nil); got.header.Get("Content-Length") != "3145728" || got.err != nil {
		t.Errorf("head: %v, %v", got.header, got.err)
	}
}

func TestKeepsConnections(t *testing.T) {
	p, k := begin(t, sigv4.Key{})
	c := client(t)
	put(t, p, "/b/k", noise(1000))
	p.Reset()
	for range 20 {
		if got := do(t.Context(), t, c, "GET", p.URL()+"/b/k", nil, nil); len(got.body) != 1000 {
			t.Fatal(got.err)
		}
		if got := do(t.Context(), t, c, "PUT", p.URL()+"/b/l", noise(1000), nil); got.status != http.StatusOK {
			t.Fatal(got.err)
		}
	}
	if n := p.Counts().Connections; n != 1 {
		t.Errorf("%d connections of one client", n)
	}
	if n := k.conns.Load(); n > 2 {
		t.Errorf("%d connections to the server", n)
	}
}

func TestCounts(t *testing.T) {
	p, _ := begin(t, sigv4.Key{})
	put(t, p, "/b/k", noise(70_000))
	for range 2 {
		do(t.Context(), t, nil, "GET", p.URL()+"/b/k", nil, http.Header{"Range": {"bytes=100-299"}})
	}
	do(t.Context(), t, nil, "HEAD", p.URL()+"/b/k", nil, nil)
	counts := p.Reset()
	if counts.Of(Put) != (Count{1, 70_000, 0}) || counts.Of(Get) != (Count{2, 0, 400}) || counts.Requests(Head, List) != 1 {
		t.Errorf("counts: %v", counts)
	}
	if counts.Of() != (Count{4, 70_000, 400}) || counts.Connections != 4 || counts.Peak != 1 {
		t.Errorf("counts: %v", counts)
	}
	if text := counts.String(); !strings.HasPrefix(text, "get: 2 requests, 0 bytes sent, 400 received; head: 1 ") || !strings.HasSuffix(text, "4 connections, at most 1 requests at a time") {
		t.Error(text)
	}
	if rest := p.Counts(); rest != (Counts{}) {
		t.Errorf("after Reset: %v", rest)
	}
	var clients sync.WaitGroup
	p.Inject(Fault{Do: Delay(200 * time.Millisecond)})
	for range 5 {
		clients.Go(func() { get(t, p, "/b/k") })
	}
	clients.Wait()
	if peak := p.Counts().Peak; peak < 2 || peak > 5 {
		t.Errorf("peak of 5 requests at the same time: %d", peak)
	}
}

func TestClasses(t *testing.T) {
	for request, want := range map[string]Class{
		"GET /b/k": Get, "GET /b/k?versionId=1": Get, "GET /b/k?x-id=GetObject": Get, "GET /b/k?tagging": Other,
		"GET /b/k?uploadId=u": ListParts, "HEAD /b/k": Head, "HEAD /b": Bucket, "GET /": Bucket,
		"GET /b": List, "GET /b/?list-type=2&prefix=a%2F&delimiter=%2F": List, "GET /b?versions": List,
		"GET /b?uploads&prefix=a": ListUploads, "GET /b?location": Bucket, "GET /b/?versioning=": Bucket,
		"PUT /b": Bucket, "PUT /b/k": Put, "PUT /b/k?partNumber=1&uploadId=u": Part, "PUT /b/k?retention": Other,
		"PUT /b/k COPY": Copy, "PUT /b/k?partNumber=1&uploadId=u COPY": PartCopy,
		"POST /b/k?uploads": Create, "POST /b/k?uploadId=u": Complete, "POST /b?delete": DeleteMany, "POST /b/k?select": Other,
		"DELETE /b/k": Delete, "DELETE /b/k?uploadId=u": Abort, "DELETE /b/k?tagging": Other, "DELETE /b": Bucket,
	} {
		part := strings.Fields(request)
		r, err := http.NewRequestWithContext(t.Context(), part[0], "http://server"+part[1], nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(part) > 2 {
			r.Header.Set("X-Amz-Copy-Source", "/b/other")
		}
		if got := describe(r); got.Class != want {
			t.Errorf("%s: %v, want %v", request, got.Class, want)
		}
	}
	if Class(-1).String() != "unknown" {
		t.Error(Class(-1))
	}
}

func TestShape(t *testing.T) {
	p, _ := begin(t, sigv4.Key{})
	data := noise(1 << 20)
	put(t, p, "/b/k", data)
	for name, test := range map[string]struct {
		shape Shape
		send  func() reply
	}{
		"received":   {Shape{Received: 8 << 20}, func() reply { return get(t, p, "/b/k") }},
		"sent":       {Shape{Sent: 8 << 20}, func() reply { return do(t.Context(), t, nil, "PUT", p.URL()+"/b/l", data, nil) }},
		"first byte": {Shape{FirstByte: 120 * time.Millisecond}, func() reply { return get(t, p, "/b/k") }},
	} {
		p.SetShape(test.shape)
		began := time.Now()
		if got := test.send(); got.err != nil {
			t.Errorf("%s: %v", name, got.err)
		}
		if took := time.Since(began); took < 110*time.Millisecond {
			t.Errorf("%s: took %v, at least 120ms were expected", name, took)
		}
	}
	// A low rate does not hold a small request back for long.
	p.SetShape(Shape{Sent: 10_000, Received: 10_000})
	if got := do(t.Context(), t, nil, "HEAD", p.URL()+"/b/k", nil, nil); got.err != nil {
		t.Error(got.err)
	}
}

func TestPiece(t *testing.T) {
	for _, c := range []struct {
		n    int
		rate int64
		want int
	}{{1 << 20, 0, 1 << 20}, {1 << 20, 80 << 20, 64 << 10}, {1 << 20, 1000, 10}, {5, 1000, 5}, {0, 10, 0}, {7, 10, 1}} {
		if got := piece(c.n, c.rate); got != c.want {
			t.Errorf("piece of %d at %d B/s: %d, want %d", c.n, c.rate, got, c.want)
		}
	}
}

// A client that waits for the server's permission does not send a body that the server
// refuses.
func TestExpectContinue(t *testing.T) {
	p, k := begin(t, sigv4.Key{})
	header := http.Header{"Expect": {"100-continue"}}
	got := do(t.Context(), t, nil, "PUT", p.URL()+"/b/k?unread", noise(100_000), header)
	if sent := p.Counts().Of().Sent; got.status != http.StatusPreconditionFailed || sent != 0 {
		t.Errorf("status %d, %v, %d bytes sent", got.status, got.err, sent)
	}
	got = do(t.Context(), t, nil, "PUT", p.URL()+"/b/k", noise(100_000), header)
	if body, err := k.body("/b/k"); got.status != http.StatusOK || len(body) != 100_000 {
		t.Errorf("status %d, %v, %d bytes, %v", got.status, got.err, len(body), err)
	}
	p.Reset()
	p.Inject(Fault{Do: SlowDown()})
	got = do(t.Context(), t, nil, "PUT", p.URL()+"/b/k", noise(100_000), header)
	if sent := p.Counts().Of().Sent; got.status != http.StatusServiceUnavailable || sent != 0 {
		t.Errorf("status %d, %v, %d bytes sent", got.status, got.err, sent)
	}
}

func TestStartRefuses(t *testing.T) {
	for _, target := range []string{"", "127.0.0.1:9000", "https://host", "http://host/path", "http://%"} {
		if p, err := Start(Options{Target: target}); err == nil || !strings.Contains(err.Error(), "http://host:port") {
			t.Errorf("target %q: %v", target, err)
			if p != nil {
				_ = p.Close()
			}
		}
	}
}

func TestServerIsGone(t *testing.T) {
	p, err := Start(Options{Target: "http://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}()
	if got := get(t, p, "/b/k"); got.status != http.StatusBadGateway || !bytes.Contains(got.body, []byte("does not answer")) {
		t.Errorf("status %d, %q, %v", got.status, got.body, got.err)
	}
}

func TestCloseEndsRequests(t *testing.T) {
	p, k := begin(t, sigv4.Key{})
	p.Inject(Fault{Match: Of(Get), Do: Hang()})
	p.Inject(Fault{Match: Of(Put), Do: StallSent(10)})
	var clients sync.WaitGroup
	c := client(t)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, method := range []string{"GET", "PUT"} {
		clients.Go(func() {
			if got := do(ctx, t, c, method, p.URL()+"/b/k", noise(100), nil); got.err == nil || timedOut(got.err) {
				t.Errorf("%s: %v", method, got.err)
			}
		})
	}
	until(t, "both requests arrive", func() bool { n, _ := k.seen(); return n == 2 })
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	clients.Wait()
	if got := get(t, p, "/b/k"); got.err == nil {
		t.Error("a closed proxy answers")
	}
}

// Disconnect breaks requests off, and later ones succeed.
func TestDisconnect(t *testing.T) {
	p, k := begin(t, sigv4.Key{})
	stalled := p.Inject(Fault{Times: 1, Do: StallSent(-1)})
	failed := make(chan error, 1)
	go func() { failed <- do(context.Background(), t, client(t), "PUT", p.URL()+"/b/k", noise(5000), nil).err }()
	until(t, "the server has all bytes but one", func() bool { return k.progress.Load() == 4999 })
	p.Disconnect()
	select {
	case err := <-failed:
		if err == nil {
			t.Error("a request without its last byte succeeded")
		}
	case <-time.After(patience):
		t.Error("the request still waits")
	}
	until(t, "the server sees the end", func() bool { _, err := k.body("/b/k"); return err != nil })
	if stalled.Hits() != 1 {
		t.Errorf("%d hits", stalled.Hits())
	}
	put(t, p, "/b/k", noise(5000))
}
