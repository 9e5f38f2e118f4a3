package s3test

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/internal/object/faultproxy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// want sends a request and checks the status of its answer.
func want(t *testing.T, s *Server, status int, method, target string, header http.Header, body []byte) Answer {
	t.Helper()
	a := s.Do(t, method, target, header, body)
	if a.Status != status {
		t.Errorf("%s %s: status %d, want %d: %s", method, target, a.Status, status, a.Body)
	}
	return a
}

func TestObjectsAreFiles(t *testing.T) {
	for name, o := range map[string]Options{"default": {}, "sidecar": {Sidecar: true}} {
		t.Run(name, func(t *testing.T) {
			s := Start(t, o)
			if s.MinIO {
				return
			}
			want(t, s, 200, "PUT", "/run/main/a%20b", nil, []byte("contents"))
			path := filepath.Join(s.Dir, "run/main/a b")
			if got, err := os.ReadFile(path); string(got) != "contents" || err != nil {
				t.Fatalf("%s: %q, %v", path, got, err)
			}
			if err := os.WriteFile(path, []byte("c0ntents"), 0o600); err != nil {
				t.Fatal(err)
			}
			if a := want(t, s, 206, "GET", "/run/main/a%20b", http.Header{"Range": {"bytes=1-3"}}, nil); string(a.Body) != "0nt" || a.Header.Get("ETag") == "" {
				t.Errorf("damaged object: %q, %v", a.Body, a.Header)
			}
			if a := want(t, s, 200, "GET", "?list-type=2&prefix=run%2F&delimiter=%2F", nil, nil); !bytes.Contains(a.Body, []byte("<Prefix>run/main/</Prefix>")) {
				t.Errorf("list: %s", a.Body)
			}
		})
	}
}

func TestVersioning(t *testing.T) {
	s := Start(t, Options{Versioning: true})
	first := want(t, s, 200, "PUT", "/k", nil, []byte("one")).Header.Get("X-Amz-Version-Id")
	want(t, s, 200, "PUT", "/k", nil, []byte("two"))
	if a := want(t, s, 200, "GET", "/k?versionId="+first, nil, nil); first == "" || string(a.Body) != "one" {
		t.Errorf("version %q: %q", first, a.Body)
	}
}

// proxied starts a proxy in front of a server, and returns the server behind it.
func proxied(t *testing.T, s *Server) (*faultproxy.Proxy, *Server) {
	t.Helper()
	p, err := faultproxy.Start(faultproxy.Options{Target: s.Endpoint, Key: s.Key})
	if err != nil {
		t.Fatal(err)
	}
	behind := &Server{Endpoint: p.URL(), Bucket: s.Bucket, Region: s.Region, Key: s.Key}
	t.Cleanup(func() {
		behind.client.CloseIdleConnections()
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p, behind
}

// crcHeader is the header that has a server check a body.
func crcHeader(body string) http.Header {
	sum := crc32.Checksum([]byte(body), crc32.MakeTable(crc32.Castagnoli))
	return http.Header{"X-Amz-Checksum-Crc32c": {base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, sum))}}
}

// The server refuses a second exclusive PUT and a wrong checksum, and accepts both behind a
// proxy that drops the headers. Tests of these guards can therefore be seen failing.
func TestGuardsBehindTheProxy(t *testing.T) {
	s := Start(t, Options{})
	p, behind := proxied(t, s)
	exclusive := http.Header{"If-None-Match": {"*"}}
	want(t, behind, 200, "PUT", "/k", exclusive, []byte("first"))
	want(t, behind, 412, "PUT", "/k", exclusive, []byte("second"))
	want(t, behind, 200, "PUT", "/sum", crcHeader("data"), []byte("data"))
	want(t, behind, 400, "PUT", "/sum", crcHeader("data"), []byte("date"))

	p.Inject(faultproxy.Fault{Do: faultproxy.DropHeaders("If-None-Match", "X-Amz-Checksum-*")})
	want(t, behind, 200, "PUT", "/k", exclusive, []byte("second"))
	want(t, behind, 200, "PUT", "/sum", crcHeader("data"), []byte("date"))
}

// multipart uploads parts with their checksums, or with that of other bytes, and returns the
// status of the last request. header is that of the request that completes the upload.
func multipart(t *testing.T, s *Server, key string, header http.Header, other string, parts ...string) int {
	t.Helper()
	begun := s.Do(t, "POST", key+"?uploads", http.Header{"X-Amz-Checksum-Algorithm": {"CRC32C"}, "X-Amz-Checksum-Type": {"FULL_OBJECT"}}, nil)
	_, rest, _ := strings.Cut(string(begun.Body), "<UploadId>")
	id, _, ok := strings.Cut(rest, "<")
	if !ok {
		t.Fatalf("begin upload: status %d: %s", begun.Status, begun.Body)
	}
	list := ""
	for n, part := range parts {
		sum := crcHeader(part)
		if other != "" {
			sum = crcHeader(other)
		}
		a := s.Do(t, "PUT", fmt.Sprintf("%s?partNumber=%d&uploadId=%s", key, n+1, id), sum, []byte(part))
		if a.Status != http.StatusOK {
			return a.Status
		}
		list += fmt.Sprintf("<Part><PartNumber>%d</PartNumber><ETag>%s</ETag><ChecksumCRC32C>%s</ChecksumCRC32C></Part>", n+1, a.Header.Get("ETag"), sum.Get("X-Amz-Checksum-Crc32c"))
	}
	a := s.Do(t, "POST", key+"?uploadId="+id, header, []byte("<CompleteMultipartUpload>"+list+"</CompleteMultipartUpload>"))
	if bytes.Contains(a.Body, []byte("<Error>")) {
		t.Logf("complete %s: %s", key, a.Body)
	}
	return a.Status
}

// A multipart upload passes through the proxy, and each of its requests has its class. Its
// guards end where the proxy drops them.
func TestMultipartBehindTheProxy(t *testing.T) {
	s := Start(t, Options{})
	p, behind := proxied(t, s)
	exclusive := http.Header{"If-None-Match": {"*"}}
	part := strings.Repeat("0123456789abcdef", 5<<20/16)
	if status := multipart(t, behind, "/run/k", exclusive, "", part, part[1:]); status != 200 {
		t.Fatalf("status %d", status)
	}
	if a := want(t, behind, 200, "GET", "/run/k", nil, nil); string(a.Body) != part+part[1:] {
		t.Errorf("%d bytes", len(a.Body))
	}
	counts := p.Reset()
	for _, class := range []faultproxy.Class{faultproxy.Create, faultproxy.Complete, faultproxy.Get} {
		if n := counts.Requests(class); n != 1 {
			t.Errorf("%d requests of class %v", n, class)
		}
	}
	if got := counts.Of(faultproxy.Part); got.Requests != 2 || got.Sent != int64(2*len(part)-1) {
		t.Errorf("parts: %+v", got)
	}
	if status := multipart(t, behind, "/run/k", exclusive, "", part, "end"); status != 412 {
		t.Errorf("a second exclusive upload: status %d", status)
	}
	if status := multipart(t, behind, "/run/other", nil, "other bytes", part); status != 400 {
		t.Errorf("a wrong checksum: status %d", status)
	}
	flipped := p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Part), Do: faultproxy.FlipSent(3)})
	if status := multipart(t, behind, "/run/flipped", nil, "", part); status != 400 || flipped.Hits() != 1 {
		t.Errorf("a flipped bit: status %d, %d hits", status, flipped.Hits())
	}
	flipped.Remove()

	p.Inject(faultproxy.Fault{Do: faultproxy.DropHeaders("If-None-Match", "X-Amz-Checksum-*")})
	p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Complete), Do: faultproxy.DropElements("ChecksumCRC32C")})
	if status := multipart(t, behind, "/run/k", exclusive, "other bytes", part, "end"); status != 200 {
		t.Errorf("without guards: status %d", status)
	}
}

// The server has ended when the test has, and its port is free.
func TestEndsWithTheTest(t *testing.T) {
	var address string
	t.Run("one", func(t *testing.T) { address = strings.TrimPrefix(Start(t, Options{}).Endpoint, "http://") })
	if address == "" {
		return // the server was not built
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
}

// refused is a test that records how it ends.
type refused struct {
	testing.TB
	skipped, failed string
}

func (r *refused) Skip(args ...any) {
	r.skipped = fmt.Sprint(args...)
	panic(r)
}

func (r *refused) Fatalf(format string, args ...any) {
	r.failed = fmt.Sprintf(format, args...)
	panic(r)
}

func TestWithoutAServer(t *testing.T) {
	for name, c := range map[string]struct{ program, required, skipped, failed string }{
		"skip":      {"", "", "CKPTSTORE_TEST_S3 is not set", ""},
		"required":  {"", "1", "", "or unset CKPTSTORE_TEST_S3_REQUIRED"},
		"not there": {"/nowhere/versitygw", "", "", "must be the absolute path"},
		"ends":      {"false", "", "", "it ended: exit status 1"},
	} {
		t.Setenv(EnvServer, c.program)
		t.Setenv(EnvRequired, c.required)
		r := &refused{TB: t}
		func() {
			defer func() { _ = recover() }()
			Start(r, Options{})
		}()
		if (r.skipped == "") != (c.skipped == "") || !strings.Contains(r.skipped, c.skipped) ||
			(r.failed == "") != (c.failed == "") || !strings.Contains(r.failed, c.failed) {
			t.Errorf("%s: skipped %q, failed %q", name, r.skipped, r.failed)
		}
	}
}
