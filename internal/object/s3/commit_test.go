package s3

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
)

var (
	noSuchHost = net.DNSError{Err: "no such host", Name: "server.test", IsNotFound: true}
	untrusted  = x509.UnknownAuthorityError{}
)

const piece = 8 << 10

func noise(size int) []byte {
	p := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{byte(size)}).Read(p) // never fails
	return p
}

// TestLostAnswers loses the answer to each kind of commit, and has it refused for conditions
// that an earlier attempt made fail.
func TestLostAnswers(t *testing.T) {
	lost := &fault{after: errReset}
	for _, c := range []struct {
		name  string
		size  int
		kind  string // of the request that fails
		fault *fault
		other bool // has committed the name before
		want  error
	}{
		{"put", 10, "PUT", lost, false, nil},
		{"put, not done", 10, "PUT", &fault{before: errReset}, false, nil},
		{"put, conflict", 10, "PUT", &fault{status: 409, code: "ConditionalRequestConflict"}, false, nil},
		{"put, taken", 10, "PUT", &fault{before: errReset}, true, fs.ErrExist},
		{"put, conflict, taken", 10, "PUT", &fault{status: 409, code: "ConditionalRequestConflict"}, true, fs.ErrExist},
		{"complete", 3*piece + 1, "POST uploadId", lost, false, nil},
		{"complete, not done", 3*piece + 1, "POST uploadId", &fault{before: errReset}, false, nil},
		{"complete, internal", 3*piece + 1, "POST uploadId", &fault{status: 200, code: "InternalError"}, false, nil},
		{"complete, cut", 3*piece + 1, "POST uploadId", &fault{then: func(r *http.Response) { r.Body = io.NopCloser(strings.NewReader("")) }}, false, nil},
		{"complete, conflict", 3*piece + 1, "POST uploadId", &fault{status: 409, code: "ConditionalRequestConflict"}, false, nil},
		{"complete, taken", 3*piece + 1, "POST uploadId", &fault{before: errReset}, true, fs.ErrExist},
		{"complete, gone", 3*piece + 1, "POST uploadId", &fault{status: 404, code: "NoSuchUpload"}, false, errors.ErrUnsupported},
		{"part", 3*piece + 1, "PUT uploadId", lost, false, nil},
		{"create", 3*piece + 1, "POST uploads", lost, false, nil},
	} {
		for _, gathered := range []bool{false, true} {
			for _, mode := range []object.Mode{object.Exclusive, object.Replace} {
				t.Run(fmt.Sprintf("%s, gathered %v, mode %d", c.name, gathered, mode), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						f := newFake()
						b := f.bucket(t, Options{PartSize: piece})
						want := c.want
						if mode == object.Replace && errors.Is(want, fs.ErrExist) {
							want = nil
						}
						if strings.Contains(c.name, "complete, conflict") && !gathered {
							want = errConflict
						}
						data := noise(c.size)
						if c.other {
							if err := put(t.Context(), b, "f", noise(5), object.Replace); err != nil {
								t.Fatal(err)
							}
						}
						failed := false
						f.fault = func(kind string, _ int, _ *http.Request) *fault {
							if kind != c.kind || failed {
								return nil
							}
							failed = true
							return c.fault
						}
						err := commit(t, b, data, gathered, mode)
						switch {
						case errors.Is(want, errors.ErrUnsupported):
							if err == nil || !strings.Contains(err.Error(), "save again") {
								t.Errorf("the upload is gone: %v", err)
							}
							return
						case !errors.Is(err, want):
							t.Fatalf("%v, want %v; requests %v", err, want, f.requests())
						}
						got, _ := b.Get(t.Context(), "f", 1<<20)
						if want == nil && !bytes.Equal(got, data) || errors.Is(want, fs.ErrExist) && !bytes.Equal(got, noise(5)) {
							t.Errorf("the object has %d bytes", len(got))
						}
						b.background.Wait()
						if len(f.uploads) > 0 && c.kind != "POST uploads" {
							t.Errorf("unfinished uploads are left: %v", f.uploads)
						}
					})
				})
			}
		}
	}
}

func commit(t *testing.T, b *Bucket, data []byte, gathered bool, mode object.Mode) error {
	u, err := b.Create(t.Context(), "f", int64(len(data)), mode)
	if err != nil {
		return err
	}
	defer u.Abort()
	if !gathered {
		if _, err := u.WriteAt(data, 0); err != nil {
			return err
		}
		return u.Commit(t.Context())
	}
	for at := 0; at < len(data); at += u.Piece() {
		p := data[at:min(at+u.Piece(), len(data))]
		half := len(p) / 2
		if err := u.(object.Gatherer).WriteFrom([][]byte{p[:half], p[half:]}, int64(at), crc32c.Checksum(p)); err != nil {
			return err
		}
	}
	return u.Commit(t.Context())
}

// TestConditions checks which requests carry the condition, the checksums and the token.
func TestConditions(t *testing.T) {
	f := newFake()
	headers := map[string][]http.Header{}
	f.fault = func(kind string, _ int, r *http.Request) *fault {
		headers[kind] = append(headers[kind], r.Header)
		return nil
	}
	b := f.bucket(t, Options{PartSize: piece})
	b.at.Class, b.at.KMS = "STANDARD_IA", "key"
	for _, size := range []int{10, 2 * piece} {
		if err := commit(t, b, noise(size), true, object.Exclusive); err != nil {
			t.Fatal(err)
		}
		if err := b.Remove(t.Context(), "f"); err != nil {
			t.Fatal(err)
		}
	}
	for kind, wants := range map[string]string{
		"PUT":           "If-None-Match,X-Amz-Checksum-Crc32c,X-Amz-Meta-Ckptstore-Upload,X-Amz-Storage-Class,X-Amz-Server-Side-Encryption-Aws-Kms-Key-Id",
		"POST uploads":  "X-Amz-Checksum-Algorithm,X-Amz-Checksum-Type,X-Amz-Meta-Ckptstore-Upload,X-Amz-Storage-Class,X-Amz-Server-Side-Encryption",
		"PUT uploadId":  "X-Amz-Checksum-Crc32c",
		"POST uploadId": "If-None-Match,X-Amz-Checksum-Crc32c,X-Amz-Checksum-Type,X-Amz-Mp-Object-Size",
	} {
		for _, header := range headers[kind] {
			signed := header.Get("Authorization")
			for name := range strings.SplitSeq(wants, ",") {
				if header.Get(name) == "" || !strings.Contains(signed, strings.ToLower(name)) {
					t.Errorf("%s: %s is not there, or not signed", kind, name)
				}
			}
			if kind == "POST uploads" && header.Get("If-None-Match") != "" {
				t.Error("the condition is on the request that begins the upload")
			}
		}
	}
	if n := len(headers["PUT uploadId"]); n != 2 {
		t.Errorf("%d parts", n)
	}
	if got, want := b.Requests(), (Requests{Put: 1, Create: 1, Part: 2, Complete: 1, Delete: 2, Other: 1, Sent: b.Requests().Sent, Received: b.Requests().Received}); got != want {
		t.Errorf("counted %+v, want %+v", got, want)
	}
}

// TestDamageOnTheWay repeats a part that was damaged on the way, and refuses memory that has
// changed.
func TestDamageOnTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		b := f.bucket(t, Options{PartSize: piece})
		f.fault = func(kind string, n int, _ *http.Request) *fault {
			if kind == "PUT uploadId" && n == 1 {
				return &fault{status: 400, code: "BadDigest"}
			}
			return nil
		}
		if err := commit(t, b, noise(2*piece), true, object.Exclusive); err != nil {
			t.Errorf("a part that was damaged on the way: %v", err)
		}
		for _, size := range []int64{10, 2 * piece} {
			u, err := b.Create(t.Context(), "g", size, object.Exclusive)
			if err != nil {
				t.Fatal(err)
			}
			data := noise(int(min(size, piece)))
			err = u.(object.Gatherer).WriteFrom([][]byte{data}, 0, crc32c.Checksum(data)+1)
			if size == 10 && err == nil {
				err = u.Commit(t.Context())
			}
			if !errors.Is(err, object.ErrChanged) {
				t.Errorf("%d bytes that changed: %v", size, err)
			}
			u.Abort()
		}
	})
}

// TestUploads checks the sizes of pieces, and writes that do not fit them.
func TestUploads(t *testing.T) {
	b := newFake().bucket(t, Options{})
	for size, want := range map[int64]int{0: 32 << 20, 1: 32 << 20, 9000 * 32 << 20: 32 << 20, 9000*32<<20 + 1: 33 << 20, 40 << 40: 4661 << 20} {
		u, err := b.Create(t.Context(), "f", size, object.Replace)
		if err != nil {
			t.Fatal(err)
		}
		if u.Piece() != want || u.Piece()%object.Align != 0 {
			t.Errorf("%d bytes: pieces of %d, want %d", size, u.Piece(), want)
		}
		u.Abort()
	}
	if _, err := b.Create(t.Context(), "f", 50<<40, object.Replace); err == nil {
		t.Error("50 TiB")
	}
	b = newFake().bucket(t, Options{PartSize: piece})
	u, err := b.Create(t.Context(), "f", 2*piece+5, object.Replace)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range [][2]int{{1, piece}, {0, 5}, {piece, 3 * piece}, {2 * piece, 4}, {-piece, piece}} {
		if _, err := u.WriteAt(make([]byte, w[1]), int64(w[0])); err == nil {
			t.Errorf("wrote %d bytes at %d", w[1], w[0])
		}
	}
	if _, err := u.WriteAt(make([]byte, piece), 0); err != nil {
		t.Error(err)
	}
	if err := u.Commit(t.Context()); err == nil || !strings.Contains(err.Error(), "piece 2 of 3 was not written") {
		t.Errorf("commit of a part: %v", err)
	}
}

// TestRemoveReportsEach removes a batch with one key that is refused.
func TestRemoveReportsEach(t *testing.T) {
	f := newFake()
	b := f.bucket(t, Options{})
	for _, name := range []string{"a", "locked", "c"} {
		if err := put(t.Context(), b, name, []byte("x"), object.Replace); err != nil {
			t.Fatal(err)
		}
	}
	f.fault = func(kind string, _ int, _ *http.Request) *fault {
		if kind == "DELETE" {
			return &fault{status: 403, code: "AccessDenied"}
		}
		return nil
	}
	err := b.Remove(t.Context(), "a", "locked", "c")
	if err == nil || !strings.Contains(err.Error(), "s3://bucket/p/locked: AccessDenied") || strings.Contains(err.Error(), "p/a") {
		t.Errorf("%v", err)
	}
	left, err := b.List(t.Context(), "")
	if names := object.Names(left); err != nil || !slices.Equal(names, []string{"locked"}) {
		t.Errorf("left %v, %v", names, err)
	}
}
