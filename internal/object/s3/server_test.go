package s3

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/faultproxy"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/internal/object/s3test"
)

const smallest = 5 << 20 // the least size of a part on real servers

// on returns a bucket on a server, below a prefix.
func on(tb testing.TB, s *s3test.Server, endpoint, prefix string) *Bucket {
	tb.Helper()
	at := Location{Bucket: s.Bucket, Prefix: prefix, Endpoint: endpoint, Region: s.Region}
	b, err := New(at, Options{PartSize: smallest, Keys: Static(s.Key.Access, s.Key.Secret)})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := b.Close(); err != nil {
			tb.Error(err)
		}
	})
	return b
}

// behind returns a bucket behind a proxy.
func behind(t *testing.T, s *s3test.Server, prefix string) (*Bucket, *faultproxy.Proxy) {
	t.Helper()
	p, err := faultproxy.Start(faultproxy.Options{Target: s.Endpoint, Key: s.Key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return on(t, s, p.URL(), prefix), p
}

// TestConformance runs the suite of backends on a server.
func TestConformance(t *testing.T) {
	s := s3test.Start(t, s3test.Options{})
	var n atomic.Int32
	objecttest.Test(t, func(tb testing.TB) object.Backend {
		return on(tb, s, s.Endpoint, fmt.Sprintf("prefix %d/ü+%%", n.Add(1)))
	})
}

// TestConformanceAtTheRoot runs it without a prefix.
func TestConformanceAtTheRoot(t *testing.T) {
	objecttest.Test(t, func(tb testing.TB) object.Backend {
		s := s3test.Start(tb, s3test.Options{})
		return on(tb, s, s.Endpoint, "")
	})
}

// TestProbeOfAServer probes a server that has all, and one behind a proxy that hides it.
func TestProbeOfAServer(t *testing.T) {
	for _, versions := range []bool{false, true} {
		s := s3test.Start(t, s3test.Options{Versioning: versions})
		found, err := on(t, s, s.Endpoint, "p").Probe(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%+v", found)
		want := Capabilities{Server: found.Server, ExclusivePut: true, ExclusiveComplete: true, Checksums: true, FullChecksum: true, Conditions: true, Consistent: true, Versioned: versions, Locked: found.Locked, Warnings: found.Warnings}
		if fmt.Sprint(found) != fmt.Sprint(want) {
			t.Errorf("found %+v", found)
		}
	}
	s := s3test.Start(t, s3test.Options{})
	for header, lacks := range map[string]string{"If-None-Match": "exclusive PUT", "X-Amz-Checksum-*": "x-amz-checksum-crc32c", "If-Match": "conditional GET"} {
		b, p := behind(t, s, "p")
		p.Inject(faultproxy.Fault{Do: faultproxy.DropHeaders(header, "X-Amz-Sdk-Checksum-Algorithm")})
		if strings.HasPrefix(header, "X-Amz") {
			p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Complete), Do: faultproxy.DropElements("ChecksumCRC32C")})
		}
		if _, err := b.Probe(t.Context()); err == nil || !strings.Contains(err.Error(), lacks) {
			t.Errorf("without %s: %v", header, err)
		}
		left, err := b.List(t.Context(), "")
		if err != nil || len(left) > 0 {
			t.Errorf("the probe leaves %v, %v", object.Names(left), err)
		}
	}
}

// TestExpirationRule refuses a prefix whose objects a rule of the server expires, and no other.
func TestExpirationRule(t *testing.T) {
	s := s3test.Start(t, s3test.Options{})
	if !s.Expire(t, "p/data/") {
		t.Skip("this server has no lifecycle rules; TestProbe has answers of servers that do") //nolint:forbidigo // MinIO has them
	}
	if _, err := on(t, s, s.Endpoint, "p").Probe(t.Context()); err == nil || !strings.Contains(err.Error(), `lifecycle rule "expire" expires objects below "p/data/"`) {
		t.Errorf("below the prefix: %v", err)
	}
	if found, err := on(t, s, s.Endpoint, "q").Probe(t.Context()); err != nil || !strings.Contains(strings.Join(found.Warnings, "\n"), "no lifecycle rule removes unfinished uploads") {
		t.Errorf("elsewhere: %v, %v", found.Warnings, err)
	}
}

// TestFaults saves and loads a file behind a proxy with one fault at a time: it is there whole,
// or the call has failed, and no unfinished upload is left.
func TestFaults(t *testing.T) {
	s := s3test.Start(t, s3test.Options{})
	data := noise(3*smallest + 4097)
	classes := []faultproxy.Class{faultproxy.Put, faultproxy.Create, faultproxy.Part, faultproxy.Complete, faultproxy.Get, faultproxy.Head}
	for name, c := range map[string]struct {
		do    faultproxy.Action
		of    []faultproxy.Class
		times int
	}{
		"kill":         {faultproxy.Kill(), classes, 2},
		"drop answer":  {faultproxy.DropAnswer(), classes, 1},
		"slow down":    {faultproxy.SlowDown(), classes, 2},
		"internal":     {faultproxy.Refuse(500, "InternalError"), classes, 2},
		"200 error":    {faultproxy.Refuse(200, "InternalError"), []faultproxy.Class{faultproxy.Put, faultproxy.Create, faultproxy.Part, faultproxy.Complete}, 1},
		"flip sent":    {faultproxy.FlipSent(100), []faultproxy.Class{faultproxy.Put, faultproxy.Part}, 1},
		"cut sent":     {faultproxy.CutSent(100), []faultproxy.Class{faultproxy.Part}, 2},
		"cut received": {faultproxy.CutReceived(1 << 20), []faultproxy.Class{faultproxy.Get}, 3},
		"shorten":      {faultproxy.Shorten(10), []faultproxy.Class{faultproxy.Get}, 3},
		"extra byte":   {faultproxy.AddByte(10), []faultproxy.Class{faultproxy.Get}, 3},
		"wrong etag":   {faultproxy.WrongETag(), []faultproxy.Class{faultproxy.Get}, 1},
	} {
		for _, class := range c.of {
			for _, size := range []int{1000, len(data)} {
				t.Run(fmt.Sprintf("%s, %v, %d bytes", name, class, size), func(t *testing.T) {
					t.Parallel()
					b, p := behind(t, s, strings.ReplaceAll(t.Name(), "/", "-"))
					hit := p.Inject(faultproxy.Fault{Match: faultproxy.Of(class), Times: c.times, Do: c.do})
					if err := commit(t, b, data[:size], true, object.Exclusive); err != nil {
						t.Fatalf("save: %v", err)
					}
					o, err := b.Open(t.Context(), "f")
					if err != nil {
						t.Fatal(err)
					}
					got := make([]byte, size)
					n, err := o.ReadAt(got, 0)
					if name == "wrong etag" {
						_, err = o.ReadAt(got, 0)
						if !errors.Is(err, errReplaced) {
							t.Errorf("an answer with another ETag: %v", err)
						}
						return
					}
					if n != size || err != nil || !bytes.Equal(got, data[:size]) {
						t.Errorf("load: %d bytes, %v", n, err)
					}
					if err := commit(t, b, data[:size], true, object.Exclusive); !errors.Is(err, fs.ErrExist) {
						t.Errorf("save again: %v", err)
					}
					b.background.Wait()
					if left := s.Do(t, "GET", "?uploads&prefix="+strings.ReplaceAll(b.at.key("f"), " ", "%20"), nil, nil); bytes.Contains(left.Body, []byte("<UploadId>")) && class != faultproxy.Create {
						t.Errorf("unfinished uploads: %s", left.Body)
					}
					t.Logf("hit %d; %v", hit.Hits(), b.Requests())
				})
			}
		}
	}
}

// TestRace commits a name from many goroutines, in one and in several pieces.
func TestRace(t *testing.T) {
	s := s3test.Start(t, s3test.Options{})
	b := on(t, s, s.Endpoint, "race")
	for _, size := range []int{100, smallest + 100} {
		const writers = 8
		var uploads [writers]object.Upload
		var contents [writers][]byte
		name := fmt.Sprint(size)
		for i := range uploads {
			u, err := b.Create(t.Context(), name, int64(size), object.Exclusive)
			if err != nil {
				t.Fatal(err)
			}
			contents[i] = bytes.Repeat([]byte{byte(i)}, size)
			if _, err := u.WriteAt(contents[i], 0); err != nil {
				t.Fatal(err)
			}
			uploads[i] = u
		}
		var winner atomic.Int32
		var won atomic.Int32
		var g sync.WaitGroup
		for i, u := range uploads {
			g.Go(func() {
				switch err := u.Commit(t.Context()); {
				case err == nil:
					won.Add(1)
					winner.Store(int32(i))
				case !errors.Is(err, fs.ErrExist):
					t.Errorf("%d bytes, a loser: %v", size, err)
				}
			})
		}
		g.Wait()
		got, err := b.Get(t.Context(), name, 1<<30)
		if won.Load() != 1 || err != nil || !bytes.Equal(got, contents[winner.Load()]) {
			t.Errorf("%d bytes: %d have won, %v", size, won.Load(), err)
		}
	}
}

// TestMemoryThatChanges changes a piece between its digest and its sending.
func TestMemoryThatChanges(t *testing.T) {
	s := s3test.Start(t, s3test.Options{})
	b := on(t, s, s.Endpoint, "")
	for _, size := range []int{1000, 2 * smallest} {
		u, err := b.Create(t.Context(), "f", int64(size), object.Exclusive)
		if err != nil {
			t.Fatal(err)
		}
		piece := noise(min(size, u.Piece()))
		sum := crc32c.Checksum(piece)
		piece[len(piece)/2] ^= 4
		err = u.(object.Gatherer).WriteFrom([][]byte{piece}, 0, sum)
		if err == nil {
			err = u.Commit(t.Context())
		}
		u.Abort()
		if !errors.Is(err, object.ErrChanged) || !strings.Contains(err.Error(), "s3://bucket/f") {
			t.Errorf("%d bytes: %v", size, err)
		}
		if _, err := b.Get(t.Context(), "f", 1<<30); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%d bytes: the file is there: %v", size, err)
		}
	}
}

// TestErrorsOfAServer reads the texts of failures of a real server.
func TestErrorsOfAServer(t *testing.T) {
	s := s3test.Start(t, s3test.Options{})
	open := func(at Location, keys Source) error {
		at.Endpoint = s.Endpoint
		b, err := New(at, Options{Keys: keys})
		if err != nil {
			return err
		}
		defer func() { _ = b.Close() }()
		_, err = b.Get(t.Context(), "none", 1)
		return err
	}
	good := Static(s.Key.Access, s.Key.Secret)
	for want, err := range map[string]error{
		"AWS_ACCESS_KEY_ID":     open(Location{Bucket: s.Bucket}, Static("unknown", "x")),
		"SignatureDoesNotMatch": open(Location{Bucket: s.Bucket}, Static(s.Key.Access, "x")),
		"NoSuchBucket":          open(Location{Bucket: "another"}, good),
		"region=us-east-1":      open(Location{Bucket: s.Bucket, Region: "eu-west-1"}, good),
		"NoSuchKey":             open(Location{Bucket: s.Bucket}, good),
	} {
		if err == nil || !strings.Contains(err.Error(), want) || want == "NoSuchKey" != errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%v, want %s", err, want)
		}
		t.Log(err)
	}
}

// BenchmarkPut and BenchmarkGet measure this client with a server on the same machine, which
// takes part of the processors.
func BenchmarkPut(b *testing.B) {
	s := s3test.Start(b, s3test.Options{})
	bucket := on(b, s, s.Endpoint, "")
	data := noise(64 << 20)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		u, err := bucket.Create(b.Context(), "f", int64(len(data)), object.Replace)
		if err == nil {
			_, err = u.WriteAt(data, 0)
		}
		if err == nil {
			err = u.Commit(b.Context())
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkGet(b *testing.B) {
	s := s3test.Start(b, s3test.Options{})
	bucket := on(b, s, s.Endpoint, "")
	const size = 4 * span
	u, err := bucket.Create(b.Context(), "f", size, object.Replace)
	if err == nil {
		_, err = u.WriteAt(noise(size), 0)
	}
	if err == nil {
		err = u.Commit(b.Context())
	}
	if err != nil {
		b.Fatal(err)
	}
	o, err := bucket.Open(b.Context(), "f")
	if err != nil {
		b.Fatal(err)
	}
	into := make([]byte, size)
	b.SetBytes(size)
	for b.Loop() {
		var g sync.WaitGroup
		for at := 0; at < size; at += span {
			g.Go(func() {
				if _, err := o.ReadAt(into[at:at+span], int64(at)); err != nil {
					b.Error(err)
				}
			})
		}
		g.Wait()
	}
}
