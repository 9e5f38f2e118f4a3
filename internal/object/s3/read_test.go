package s3

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"

	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
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
