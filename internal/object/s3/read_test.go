package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/faultproxy"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/internal/object/s3test"
)

// TestConformanceOfAFake runs the suite without a server: its failures are those of this
// package.
func TestConformanceOfAFake(t *testing.T) {
	objecttest.Test(t, func(tb testing.TB) object.Backend {
		f := newFake()
		b, err := New(Location{Bucket: "bucket", Endpoint: "http://server.test:9000"}, Options{PartSize: 256 << 10, Transport: f, Keys: Static("a", "b")})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { _ = b.Close() })
		return b
	})
}

// TestBodies breaks, shifts and cuts the bodies of reads: the reader gets the right bytes, or
// an error.
func TestBodies(t *testing.T) {
	data := noise(3 << 20)
	set := func(name, value string) func(*http.Response) {
		return func(r *http.Response) { r.Header.Set(name, value) }
	}
	for _, c := range []struct {
		name  string
		then  func(*http.Response)
		times int
		fails bool
	}{
		{"reset at 1000", func(r *http.Response) {
			r.Body = io.NopCloser(io.MultiReader(io.LimitReader(r.Body, 1000), iotest.ErrReader(errReset)))
		}, 5, false},
		{"short", func(r *http.Response) { r.Body = io.NopCloser(io.LimitReader(r.Body, 1000)) }, 5, false},
		{"empty", func(r *http.Response) { r.Body = io.NopCloser(strings.NewReader("")) }, 5, false},
		{"always empty", func(r *http.Response) { r.Body = io.NopCloser(strings.NewReader("")) }, 1000, true},
		{"wrong range", set("Content-Range", "bytes 8-1048583/3145728"), 3, false},
		{"always wrong range", set("Content-Range", "bytes 8-1048583/3145728"), 1000, true},
		{"no range", func(r *http.Response) { r.Header.Del("Content-Range") }, 2, false},
		{"whole object", func(r *http.Response) { r.StatusCode = 200 }, 1000, true},
		{"wrong length", set("Content-Length", "5"), 3, false},
		{"no etag", func(r *http.Response) { r.Header.Del("ETag") }, 1000, true},
		{"wrong total", set("Content-Range", "bytes 17-1048592/9999999"), 1000, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFake()
				b := f.bucket(t, Options{})
				if err := put(t.Context(), b, "f", data, object.Replace); err != nil {
					t.Fatal(err)
				}
				o, err := b.Open(t.Context(), "f")
				if err != nil {
					t.Fatal(err)
				}
				if c.name == "wrong total" { // after the size is known
					if _, err := o.Stat(); err != nil {
						t.Fatal(err)
					}
				}
				f.seen["GET"] = 0
				f.fault = func(kind string, n int, _ *http.Request) *fault {
					if kind == "GET" && n <= c.times {
						return &fault{then: c.then}
					}
					return nil
				}
				got := make([]byte, 1<<20)
				n, err := o.ReadAt(got, 17)
				if !bytes.Equal(got[:n], data[17:17+n]) {
					t.Errorf("wrong bytes among %d", n)
				}
				if c.fails != (err != nil) || !c.fails && n != len(got) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
					t.Errorf("%d bytes, %v", n, err)
				}
				body, err := o.(object.Ranger).ReadRange(17, 1<<20)
				if err == nil {
					got, err = io.ReadAll(body)
					_ = body.Close()
					if !bytes.Equal(got, data[17:17+len(got)]) {
						t.Errorf("wrong bytes among %d of a stream", len(got))
					}
				}
				if c.times == 1000 && err == nil {
					t.Error("a stream succeeds")
				}
			})
		})
	}
}

// TestReadsCost counts the requests of reads.
func TestReadsCost(t *testing.T) {
	f := newFake()
	b := f.bucket(t, Options{})
	if err := put(t.Context(), b, "f", noise(1000), object.Replace); err != nil {
		t.Fatal(err)
	}
	check := func(what string, want ...string) {
		t.Helper()
		if got := f.requests(); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	check("put", "PUT")
	o, err := b.Open(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	check("open")
	_, _ = o.ReadAt(make([]byte, 10), 0)
	info, err := o.Stat()
	if info.Size != 1000 || info.Modified.IsZero() || err != nil {
		t.Errorf("%+v, %v", info, err)
	}
	check("read and stat", "GET")
	if n, err := o.ReadAt(make([]byte, 10), 1000); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %d, %v", n, err)
	}
	check("read at the known end")
	_, _ = b.Get(t.Context(), "f", 1000)
	check("get", "GET")
	_, _ = b.Stat(t.Context(), "f")
	check("stat", "HEAD")
	_, _ = b.Stat(t.Context(), "none")
	check("stat of nothing", "HEAD", "GET list-type")
	_ = b.Remove(t.Context(), "f", "g", "h")
	check("the first removal", "GET versioning", "POST delete")
	_ = b.Remove(t.Context(), "f", "g", "h")
	check("remove", "POST delete")
	_ = b.MakeDir(t.Context(), "d")
	_ = b.Sync(t.Context(), "d")
	check("directories")
}

// TestReplacedWhileRead replaces and removes an object that is open.
func TestReplacedWhileRead(t *testing.T) {
	b := newFake().bucket(t, Options{})
	if err := put(t.Context(), b, "f", noise(1000), object.Replace); err != nil {
		t.Fatal(err)
	}
	o, err := b.Open(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := o.ReadAt(make([]byte, 10), 0); err != nil {
		t.Fatal(err)
	}
	if err := put(t.Context(), b, "f", noise(1001), object.Replace); err != nil {
		t.Fatal(err)
	}
	if n, err := o.ReadAt(make([]byte, 10), 10); n != 0 || !errors.Is(err, errReplaced) || !strings.Contains(err.Error(), "replaced since it was opened") {
		t.Errorf("replaced: %d, %v", n, err)
	}
	if err := b.Remove(t.Context(), "f"); err != nil {
		t.Fatal(err)
	}
	if n, err := o.ReadAt(make([]byte, 10), 10); n != 0 || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("removed: %d, %v", n, err)
	}
}

// TestListContinues lists over a failure between two pages.
func TestListContinues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		b := f.bucket(t, Options{})
		for i := range 2500 {
			f.objects[fmt.Sprintf("p/d/%04d", i)] = stored{}
		}
		f.objects["p/d/sub/x"] = stored{}
		f.fault = func(kind string, n int, _ *http.Request) *fault {
			if n == 2 || n == 4 {
				return &fault{before: errReset}
			}
			return nil
		}
		entries, err := b.List(t.Context(), "d")
		if err != nil || len(entries) != 2501 {
			t.Errorf("%d entries, %v", len(entries), err)
		}
		if got := f.requests(); len(got) != 5 {
			t.Errorf("%d requests: %v", len(got), got)
		}
		// A list that is an error in the shape of a success is not an empty directory.
		f.fault = func(string, int, *http.Request) *fault { return &fault{status: 200, code: "AccessDenied"} }
		if _, err := b.List(t.Context(), "d"); err == nil {
			t.Error("an error was listed as empty")
		}
	})
}

// TestReadWithoutAnswer holds the answer to a read: another connection brings the bytes long before
// the end of the held request.
func TestReadWithoutAnswer(t *testing.T) {
	s := s3test.Start(t, s3test.Options{})
	b, p := behind(t, s, "p")
	data := noise(4 << 20)
	if err := gathered(t, b, "f", data, object.Exclusive); err != nil {
		t.Fatal(err)
	}
	o, err := b.Open(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	hangs := p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Get), Times: 1, Do: faultproxy.Hang()})
	began := time.Now()
	var g sync.WaitGroup
	got := make([]byte, len(data))
	for at := 0; at < len(data); at += 1 << 20 {
		g.Go(func() {
			if _, err := o.ReadAt(got[at:at+1<<20], int64(at)); err != nil {
				t.Error(err)
			}
		})
	}
	g.Wait()
	if took := time.Since(began); took < hedgeLeast || took > 2*hedgeLeast || !bytes.Equal(got, data) {
		t.Errorf("read in %v, right: %t", took, bytes.Equal(got, data))
	}
	if r := b.Requests(); hangs.Hits() != 1 || r.Hedged != 1 || r.Get != 5 || r.Repeated != 0 {
		t.Errorf("%d held; %+v", hangs.Hits(), r)
	}
	// The bytes of another object are refused, whichever request brings them.
	p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Get), Times: 1, Do: faultproxy.Hang()})
	p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Get), Skip: 1, Times: 1, Do: faultproxy.WrongETag()})
	before := p.Counts().Connections
	if _, err := o.ReadAt(got[:100], 0); !errors.Is(err, errReplaced) {
		t.Errorf("another object: %v", err)
	}
	if n := p.Counts().Connections - before; n != 1 {
		t.Errorf("the second request is on one of %d new connections", n)
	}
	// An answer that comes after the second request was sent is used.
	slow := p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Get), Times: 1, Do: faultproxy.Delay(hedgeLeast + time.Second)})
	p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Get), Skip: 1, Times: 1, Do: faultproxy.Hang()})
	began = time.Now()
	if _, err := o.ReadAt(got[:100], 50); err != nil || slow.Hits() != 1 || time.Since(began) > 2*hedgeLeast || !bytes.Equal(got[:100], data[50:150]) {
		t.Errorf("%v, after %v", err, time.Since(began))
	}
	if r := b.Requests(); r.Hedged != 3 || r.Repeated != 0 {
		t.Errorf("%+v", r)
	}
	// A failure of the second that may pass does not end the first.
	earlier := b.Requests()
	slow = p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Get), Times: 1, Do: faultproxy.Delay(hedgeLeast + 300*time.Millisecond)})
	p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Get), Skip: 1, Times: 1, Do: faultproxy.Refuse(http.StatusServiceUnavailable, "SlowDown")})
	began = time.Now()
	if _, err := o.ReadAt(got[:100], 50); err != nil || slow.Hits() != 1 || time.Since(began) > 2*hedgeLeast || !bytes.Equal(got[:100], data[50:150]) {
		t.Errorf("%v, after %v", err, time.Since(began))
	}
	if r := b.Requests(); r.Hedged != 4 || r.Get != earlier.Get+2 || r.Repeated != 0 {
		t.Errorf("%+v, before %+v", r, earlier)
	}
	// A small file is read so too.
	b.hedger = newHedger() // after reads that waited
	p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Get), Times: 1, Do: faultproxy.Hang()})
	began = time.Now()
	if all, err := b.Get(t.Context(), "f", int64(len(data))); err != nil || !bytes.Equal(all, data) || time.Since(began) > 2*hedgeLeast {
		t.Errorf("%v, after %v", err, time.Since(began))
	}
}

// TestSharedLink sends and reads files over connections each of which is slower than one may be: at
// the same time they are no stalls, and alone each is.
func TestSharedLink(t *testing.T) {
	s := s3test.Start(t, s3test.Options{})
	b, p := behind(t, s, "p")
	b.transport.patience = patience{first: 10 * time.Second, commit: time.Minute, window: 500 * time.Millisecond, quantum: 1 << 20, least: 16 << 10}
	b.transport.base.(*http.Transport).DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, address)
		if err == nil {
			err = errors.Join(c.(*net.TCPConn).SetWriteBuffer(16<<10), c.(*net.TCPConn).SetReadBuffer(16<<10))
		}
		return c, err
	}
	p.SetShape(faultproxy.Shape{Sent: 600 << 10, Received: 600 << 10}) // a body alone has to move by 1 MiB in 500 ms
	data := noise(2 << 20)
	for _, c := range []struct {
		files  int
		stalls bool
	}{{8, false}, {1, true}} {
		var g sync.WaitGroup
		before := b.Requests()
		for i := range c.files {
			g.Go(func() {
				if err := gathered(t, b, fmt.Sprint("f", i), data, object.Replace); err != nil {
					t.Error(err)
				}
			})
		}
		g.Wait()
		sent := b.Requests()
		if stalled := sent.Repeated - before.Repeated; (stalled > 0) != c.stalls {
			t.Errorf("%d files: %d stalled when they were sent", c.files, stalled)
		}
		for i := range c.files {
			g.Go(func() {
				if got, err := b.Get(t.Context(), fmt.Sprint("f", i), int64(len(data))); err != nil || !bytes.Equal(got, data) {
					t.Errorf("right: %t, %v", bytes.Equal(got, data), err)
				}
			})
		}
		g.Wait()
		if stalled := b.Requests().Repeated - sent.Repeated; stalled > 0 && !c.stalls {
			t.Errorf("%d files: %d stalled when they were read", c.files, stalled)
		}
	}
}

// TestStalledBody holds an answer after its first bytes: the rest is read on another connection.
func TestStalledBody(t *testing.T) {
	s := s3test.Start(t, s3test.Options{})
	b, p := behind(t, s, "p")
	b.transport.patience = patience{first: 10 * time.Second, commit: time.Minute, window: 300 * time.Millisecond, quantum: 64 << 10}
	data := noise(1 << 20)
	if err := gathered(t, b, "f", data, object.Exclusive); err != nil {
		t.Fatal(err)
	}
	o, err := b.Open(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Get), Times: 1, Do: faultproxy.StallReceived(100_000)})
	began := time.Now()
	got := make([]byte, len(data))
	// The window of a body is at least the time that its request waits for an answer.
	b.transport.patience.first = 300 * time.Millisecond
	if _, err := o.ReadAt(got, 0); err != nil || !bytes.Equal(got, data) || time.Since(began) > 5*time.Second {
		t.Errorf("%v, after %v, right: %t", err, time.Since(began), bytes.Equal(got, data))
	}
	if r := b.Requests(); r.Get != 2 || r.Repeated != 1 || r.Hedged != 0 {
		t.Errorf("%+v", r)
	}
}

// TestHedgesAreFew: of reads that all wait, one in twenty is sent again, and few before.
func TestHedgesAreFew(t *testing.T) {
	h := newHedger()
	if after := h.begin(); after != hedgeLeast {
		t.Errorf("the first waits %v", after)
	}
	sent := 0
	for range 1000 {
		h.begin()
		if h.again() {
			sent++
		}
	}
	if sent < 50 || sent > 50+hedgeBurst {
		t.Errorf("%d of 1000", sent)
	}
	for i := range 10 * hedgeRecent { // one in ten waits for 2 s
		h.answered(time.Duration(i%10/9) * 2 * time.Second)
	}
	if after := h.begin(); after != 6*time.Second {
		t.Errorf("where many wait for 2 s, it is %v", after)
	}
	for i := range 10 * hedgeRecent { // one in fifty
		h.answered(time.Duration(i%50/49) * 2 * time.Second)
	}
	if after := h.begin(); after != hedgeLeast {
		t.Errorf("where few wait for 2 s, it is %v", after)
	}
}
