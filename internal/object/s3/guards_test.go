package s3

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/faultproxy"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/internal/object/s3test"
)

// serverPart is the least part size of servers.
const serverPart = 5 << 20

// behind returns a bucket behind a proxy, in front of a real server.
func behind(t *testing.T) (*Bucket, *faultproxy.Proxy) {
	t.Helper()
	server := s3test.Start(t, s3test.Options{})
	p, err := faultproxy.Start(faultproxy.Options{Target: server.Endpoint, Key: server.Key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return of(t, server, p.URL(), "p"), p
}

func of(tb testing.TB, server *s3test.Server, endpoint, prefix string) *Bucket {
	tb.Helper()
	b, err := New(Location{Bucket: server.Bucket, Prefix: prefix, Endpoint: endpoint, Region: server.Region},
		Options{PartSize: serverPart, Keys: Static(server.Key.Access, server.Key.Secret)})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = b.Close() })
	return b
}

// TestConformance runs the suite on a real server, and finds there what a store needs.
func TestConformance(t *testing.T) {
	server := s3test.Start(t, s3test.Options{})
	n := 0
	objecttest.Test(t, func(tb testing.TB) object.Backend {
		n++
		return of(tb, server, server.Endpoint, fmt.Sprintf("p%d", n))
	})
	can, err := of(t, server, server.Endpoint, "probe").Probe(t.Context())
	if err != nil || !can.ExclusivePut || !can.ExclusiveComplete || !can.Checksums || !can.Conditions || !can.Consistent {
		t.Errorf("%+v, %v", can, err)
	}
	if left, _ := filepath.Glob(filepath.Join(server.Dir, "probe", "*")); len(left) > 0 {
		t.Errorf("the probe has left %v", left)
	}
}

// gathered commits data that lies in one run of memory.
func gathered(t *testing.T, b *Bucket, name string, data []byte, mode object.Mode) error {
	t.Helper()
	u, err := b.Create(t.Context(), name, int64(len(data)), mode)
	if err != nil {
		return err
	}
	defer u.Abort()
	for at := 0; at < len(data); at += u.Piece() {
		p := data[at:min(at+u.Piece(), len(data))]
		if err := u.(object.Gatherer).WriteFrom([][]byte{p}, int64(at), crc32c.Checksum(p)); err != nil {
			return err
		}
	}
	return u.Commit(t.Context())
}

// TestAnswersLostByAServer loses the answer to each request of a commit once, after the server
// has acted: the commit is a success, and there is one object with the right bytes.
func TestAnswersLostByAServer(t *testing.T) {
	b, p := behind(t)
	for _, class := range []faultproxy.Class{faultproxy.Put, faultproxy.Create, faultproxy.Part, faultproxy.Complete} {
		for _, mode := range []object.Mode{object.Exclusive, object.Replace} {
			data, name := noise(100), fmt.Sprintf("%v-%d", class, mode)
			if class != faultproxy.Put {
				data = noise(2*serverPart + 1)
			}
			fault := p.Inject(faultproxy.Fault{Match: faultproxy.Of(class), Times: 1, Do: faultproxy.DropAnswer()})
			err := gathered(t, b, name, data, mode)
			fault.Remove()
			got, get := b.Get(t.Context(), name, 1<<30)
			if err != nil || fault.Hits() != 1 || get != nil || !bytes.Equal(got, data) {
				t.Errorf("%s: %v, %d answers lost; it has %d bytes, %v", name, err, fault.Hits(), len(got), get)
			}
		}
	}
}

// TestBytesChangedOnTheWay flips a bit of what is sent: the server refuses it, the part is
// sent again, and what is stored is right. If each attempt is damaged, nothing is stored.
func TestBytesChangedOnTheWay(t *testing.T) {
	b, p := behind(t)
	for _, size := range []int{100, 2*serverPart + 1} {
		data, name := noise(size), fmt.Sprint(size)
		once := p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Put, faultproxy.Part), Times: 1, Do: faultproxy.FlipSent(50)})
		err := gathered(t, b, name, data, object.Exclusive)
		once.Remove()
		if got, _ := b.Get(t.Context(), name, 1<<30); err != nil || once.Hits() != 1 || !bytes.Equal(got, data) {
			t.Errorf("%d bytes, one bit flipped: %v, %d hits", size, err, once.Hits())
		}
	}
	// A server without checksums takes it: this test would notice.
	drop := p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Put), Do: faultproxy.DropHeaders("X-Amz-Checksum-*")})
	flip := p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Put), Times: 1, Do: faultproxy.FlipSent(50)})
	_ = gathered(t, b, "unguarded", noise(100), object.Replace)
	drop.Remove()
	flip.Remove()
	if got, err := b.Get(t.Context(), "unguarded", 100); err == nil && bytes.Equal(got, noise(100)) {
		t.Error("without checksums the flipped bit is not stored: the test does not flip it")
	}
}

// TestZombie: a writer that was taken for dead completes its upload after another has made the
// object. It is refused, and the object stays.
func TestZombie(t *testing.T) {
	b, p := behind(t)
	for _, guarded := range []bool{true, false} {
		name := fmt.Sprintf("guarded-%v", guarded)
		first, second := noise(2*serverPart+1), noise(2*serverPart+2)
		u, err := b.Create(t.Context(), name, int64(len(first)), object.Exclusive)
		if err != nil {
			t.Fatal(err)
		}
		for at := 0; at < len(first); at += u.Piece() {
			if _, err := u.WriteAt(first[at:min(at+u.Piece(), len(first))], int64(at)); err != nil {
				t.Fatal(err)
			}
		}
		if err := gathered(t, b, name, second, object.Exclusive); err != nil {
			t.Fatal(err)
		}
		if !guarded {
			defer p.Inject(faultproxy.Fault{Do: faultproxy.DropHeaders("If-None-Match")}).Remove()
		}
		err = u.Commit(t.Context())
		got, _ := b.Get(t.Context(), name, 1<<30)
		if guarded && (!errors.Is(err, fs.ErrExist) || !bytes.Equal(got, second)) {
			t.Errorf("the late commit: %v", err)
		}
		if !guarded && !bytes.Equal(got, first) {
			t.Errorf("without If-None-Match the late commit does not win: %v", err)
		}
	}
}

// TestDamagedAnswers breaks the bodies of reads by a real server: every read is right or an
// error. Other bytes under the right headers are found by the checksums of blocks: see
// TestDamageOnTheWay in package data.
func TestDamagedAnswers(t *testing.T) {
	b, p := behind(t)
	data := noise(serverPart)
	if err := gathered(t, b, "f", data, object.Exclusive); err != nil {
		t.Fatal(err)
	}
	for name, do := range map[string]faultproxy.Action{
		"cut": faultproxy.CutReceived(70_000), "shorter": faultproxy.Shorten(9), "a byte more": faultproxy.AddByte(5000),
		"another etag": faultproxy.WrongETag(), "slow down": faultproxy.SlowDown(),
	} {
		f, err := b.Open(t.Context(), "f")
		if err != nil {
			t.Fatal(err)
		}
		fault := p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Get), Times: 1, Do: do})
		got := make([]byte, 1<<20)
		n, err := f.ReadAt(got, 4096)
		fault.Remove()
		if fault.Hits() != 1 || !bytes.Equal(got[:n], data[4096:4096+n]) || err == nil && n < len(got) {
			t.Errorf("%s: %d bytes, %v, %d hits", name, n, err, fault.Hits())
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestRefusals: what a server refuses is an error with the next step.
func TestRefusals(t *testing.T) {
	server := s3test.Start(t, s3test.Options{})
	for name, c := range map[string]struct {
		at   Location
		keys Source
		want string
	}{
		"key":      {Location{Bucket: server.Bucket}, Static("nobody", "x"), "access key"},
		"secret":   {Location{Bucket: server.Bucket}, Static(server.Key.Access, "x"), "AWS_SECRET_ACCESS_KEY"},
		"bucket":   {Location{Bucket: "nowhere"}, Static(server.Key.Access, server.Key.Secret), "nowhere"},
		"endpoint": {Location{Bucket: server.Bucket, Endpoint: "http://127.0.0.1:1"}, Static("a", "b"), "no server answers"},
	} {
		if c.at.Endpoint == "" {
			c.at.Endpoint = server.Endpoint
		}
		c.at.Region = server.Region
		b, err := New(c.at, Options{Keys: c.keys})
		if err != nil {
			t.Fatal(err)
		}
		b.law.tries = 1
		_, err = b.List(t.Context(), "x")
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
}
