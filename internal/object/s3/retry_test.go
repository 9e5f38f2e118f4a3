package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/problem"
)

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// put commits a file.
func put(ctx context.Context, b *Bucket, name string, data []byte, mode object.Mode) error {
	u, err := b.Create(ctx, name, int64(len(data)), mode)
	if err != nil {
		return err
	}
	defer u.Abort()
	if _, err := u.WriteAt(data, 0); err != nil {
		return err
	}
	return u.Commit(ctx)
}

// TestRetries checks which failures are repeated, how often, and for how long.
func TestRetries(t *testing.T) {
	for _, c := range []struct {
		name   string
		fault  fault
		tries  int
		repeat bool
	}{
		{"slow down", fault{status: 503, code: "SlowDown"}, 10, true},
		{"too many", fault{status: 429, code: "TooManyRequests"}, 10, true},
		{"internal", fault{status: 500, code: "InternalError"}, 10, true},
		{"internal with the status of a success", fault{status: 200, code: "InternalError"}, 10, true},
		{"gateway", fault{status: 502, body: "<html>"}, 10, true},
		{"reset", fault{before: errReset}, 10, true},
		{"denied", fault{status: 403, code: "AccessDenied"}, 1, false},
		{"denied with the status of a success", fault{status: 200, code: "AccessDenied"}, 1, false},
		{"no bucket", fault{status: 404, code: "NoSuchBucket"}, 1, false},
		{"signature", fault{status: 403, code: "SignatureDoesNotMatch"}, 1, false},
		{"full", fault{status: 507, code: "XMinioStorageFull"}, 1, false},
		{"no such host", fault{before: &noSuchHost}, 1, false},
		{"expired", fault{status: 400, code: "ExpiredToken"}, 2, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFake()
				f.fault = func(string, int, *http.Request) *fault { return &c.fault }
				b := f.bucket(t, Options{})
				began := time.Now()
				_, err := b.List(t.Context(), "x")
				took, n := time.Since(began), len(f.requests())
				if err == nil || n != c.tries || (took > time.Second) != c.repeat || took > 2*time.Minute {
					t.Errorf("%d requests in %v: %v", n, took, err)
				}
				// Then it works.
				count := 0
				f.fault = func(string, int, *http.Request) *fault {
					if count++; c.tries > 1 && count < c.tries {
						return &c.fault
					}
					return nil
				}
				if _, err := b.List(t.Context(), "x"); err != nil {
					t.Errorf("at the last try: %v", err)
				}
				// The deadline is the caller's.
				f.fault = func(string, int, *http.Request) *fault { return &c.fault }
				if !c.repeat {
					return
				}
				ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
				defer cancel()
				began = time.Now()
				_, err = b.List(ctx, "x")
				if took := time.Since(began); took != 300*time.Millisecond || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "s3://bucket/p/x") {
					t.Errorf("deadline of 300 ms: %v, %v", took, err)
				}
			})
		})
	}
}

// TestTokenIsRenewed renews expired keys once, for all requests that were refused with them.
func TestTokenIsRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int32
		f := newFake()
		f.fault = func(kind string, _ int, r *http.Request) *fault {
			if r.Header.Get("X-Amz-Security-Token") == "token-1" {
				if kind == "HEAD" {
					return &fault{status: 400, code: "x"}
				}
				return &fault{status: 400, code: "ExpiredToken"}
			}
			return nil
		}
		b := f.bucket(t, Options{Keys: func(context.Context) (Keys, error) {
			return Keys{Access: "a", Secret: "b", Token: fmt.Sprint("token-", asked.Add(1))}, nil
		}})
		var g sync.WaitGroup
		for i := range 8 {
			g.Go(func() {
				if i%2 == 0 {
					if err := put(t.Context(), b, fmt.Sprint(i), []byte("x"), object.Exclusive); err != nil {
						t.Error(err)
					}
				} else if _, err := b.Stat(t.Context(), "none"); !errors.Is(err, fs.ErrNotExist) {
					t.Error(err)
				}
			})
		}
		g.Wait()
		if n := asked.Load(); n != 2 {
			t.Errorf("asked for keys %d times", n)
		}
	})
}

// TestGate halves the requests at the same time, and lets them grow again.
func TestGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(16)
		most := func(during time.Duration) int {
			ctx, cancel := context.WithTimeout(t.Context(), during)
			defer cancel()
			var inside, highest atomic.Int32
			var all sync.WaitGroup
			for range 40 {
				all.Go(func() {
					for ctx.Err() == nil {
						if _, err := g.enter(ctx); err != nil {
							return
						}
						highest.Store(max(highest.Load(), inside.Add(1)))
						_ = sleep(ctx, 10*time.Millisecond)
						inside.Add(-1)
						g.leave()
					}
				})
			}
			all.Wait()
			return int(highest.Load())
		}
		if n := most(time.Second); n != 16 {
			t.Errorf("%d at the same time, want 16", n)
		}
		began := time.Now()
		_ = sleep(t.Context(), time.Millisecond)
		for range 10 { // answers to requests of the same moment
			g.throttled(began)
		}
		if n := most(100 * time.Millisecond); n != 8 {
			t.Errorf("%d after a halving, want 8", n)
		}
		if n := most(4 * time.Second); n < 11 || n > 13 {
			t.Errorf("%d after 4 s, want 12", n)
		}
		if n := most(10 * time.Second); n != 16 {
			t.Errorf("%d after 14 s, want 16", n)
		}
		for range 1000 { // 1 of 20 answers
			_ = sleep(t.Context(), time.Millisecond)
			g.throttled(time.Now())
			for range 19 {
				g.served()
			}
		}
		if n := most(100 * time.Millisecond); n != 16 {
			t.Errorf("%d with 5 %% of such answers, want 16", n)
		}
		for range 20 {
			_ = sleep(t.Context(), time.Millisecond)
			g.throttled(time.Now())
		}
		if n := most(100 * time.Millisecond); n != 1 {
			t.Errorf("%d after many halvings, want 1", n)
		}
	})
}

// TestErrors checks that each failure tells what, where, why and what to do, and has a kind.
func TestErrors(t *testing.T) {
	region := http.Header{"X-Amz-Bucket-Region": {"eu-west-3"}}
	for _, c := range []struct {
		fault fault
		wants []string
		is    error
		kind  problem.Kind
	}{
		{fault{status: 403, code: "InvalidAccessKeyId"}, []string{"AWS_ACCESS_KEY_ID"}, nil, problem.Denied},
		{fault{status: 403, code: "SignatureDoesNotMatch"}, []string{"AWS_SECRET_ACCESS_KEY"}, nil, problem.Denied},
		{fault{status: 403, code: "AccessDenied"}, []string{"s3:PutObject"}, nil, problem.Denied},
		{fault{status: 404, code: "NoSuchBucket"}, []string{"create the bucket"}, nil, problem.Invalid},
		{fault{status: 400, code: "AuthorizationHeaderMalformed", header: region}, []string{"region=eu-west-3"}, nil, problem.Invalid},
		{fault{status: 301, code: "PermanentRedirect", header: region}, []string{"region=eu-west-3"}, nil, problem.Invalid},
		{fault{status: 301, body: " ", header: region}, []string{"another region"}, nil, problem.Invalid},
		{fault{status: 403, code: "RequestTimeTooSkewed"}, []string{"clock", "NTP"}, nil, problem.Invalid},
		{fault{status: 507, code: "XMinioStorageFull"}, []string{"free space"}, syscall.ENOSPC, ""},
		{fault{status: 507, body: "full"}, []string{"free space"}, syscall.ENOSPC, ""},
		{fault{status: 403, code: "QuotaExceeded"}, []string{"quota"}, syscall.EDQUOT, ""},
		{fault{status: 400, code: "XAmzContentChecksumMismatch"}, []string{"digested"}, object.ErrChanged, ""},
		{fault{status: 400, code: "InvalidRequest", body: "<Error><Code>InvalidRequest</Code><Message>The checksum did not match.</Message><RequestId>REQ1</RequestId></Error>"}, []string{"digested"}, object.ErrChanged, ""},
		{fault{status: 503, code: "SlowDown"}, []string{"10 tries", "fewer"}, nil, problem.Unavailable},
		{fault{status: 500, code: "InternalError"}, []string{"10 tries", "log"}, nil, problem.Unavailable},
		{fault{status: 501, code: "NotImplemented"}, []string{"lacks"}, nil, problem.Invalid},
		{fault{before: &noSuchHost}, []string{"DNS"}, nil, problem.Unavailable},
		{fault{before: syscall.ECONNREFUSED}, []string{"no server answers at http://server.test:9000"}, syscall.ECONNREFUSED, problem.Unavailable},
		{fault{before: errReset}, []string{"network"}, errReset, problem.Unavailable},
		{fault{before: untrusted}, []string{"AWS_CA_BUNDLE"}, nil, problem.Invalid},
	} {
		t.Run(fmt.Sprint(c.fault.status, c.fault.code, c.fault.before), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFake()
				f.fault = func(kind string, _ int, _ *http.Request) *fault {
					if kind == "HEAD" {
						return nil
					}
					return &c.fault
				}
				err := put(t.Context(), f.bucket(t, Options{}), "dir/name", []byte("x"), object.Replace)
				if err == nil {
					t.Fatal("no error")
				}
				wants := append([]string{"put s3://bucket/p/dir/name: "}, c.wants...)
				if c.fault.code != "" {
					wants = append(wants, c.fault.code, fmt.Sprint("status ", c.fault.status), "request REQ1")
				}
				for _, want := range wants {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("%v\nlacks %q", err, want)
					}
				}
				if kinds := problem.Kinds(err); c.is != nil && !errors.Is(err, c.is) || c.kind != "" && !slices.Contains(kinds, c.kind) || c.kind == "" && len(kinds) > 0 {
					t.Errorf("%v: kinds %v", err, kinds)
				}
				if strings.Contains(err.Error(), "\n") {
					t.Errorf("several lines: %v", err)
				}
			})
		})
	}
}

// TestSilence ends requests whose connection is silent.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		b := f.bucket(t, Options{})
		if err := put(t.Context(), b, "a", bytes.Repeat([]byte("x"), 3000), object.Replace); err != nil {
			t.Fatal(err)
		}
		silent := true
		f.fault = func(_ string, _ int, r *http.Request) *fault {
			if !silent {
				return nil
			}
			silent = false
			return &fault{then: func(res *http.Response) {
				res.Body = io.NopCloser(io.MultiReader(io.LimitReader(res.Body, 100), blocked{r.Context()}))
			}}
		}
		o, err := b.Open(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		began, got := time.Now(), make([]byte, 3000)
		if n, err := o.ReadAt(got, 0); n != 3000 || err != nil || !bytes.Equal(got, bytes.Repeat([]byte("x"), 3000)) {
			t.Errorf("%d bytes, %v", n, err)
		}
		if took := time.Since(began); took < patient.window || took > patient.window+time.Second {
			t.Errorf("silence of a body ended after %v", took)
		}
	})
}

// blocked is a connection that brings nothing.
type blocked struct{ ctx context.Context }

func (b blocked) Read([]byte) (int, error) {
	<-b.ctx.Done()
	return 0, b.ctx.Err()
}
