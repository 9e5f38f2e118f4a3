package s3

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/faultproxy"
	"github.com/ckptstore/ckptstore/internal/object/s3test"
)

// leastPart is the least part size of servers.
const leastPart = 5 << 20

// guarded returns a bucket behind a proxy, in front of a real server.
func guarded(t *testing.T) (*Bucket, *faultproxy.Proxy) {
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
	return bucketOf(t, server, p.URL(), "p"), p
}

func bucketOf(tb testing.TB, server *s3test.Server, endpoint, prefix string) *Bucket {
	tb.Helper()
	b, err := New(Location{Bucket: server.Bucket, Prefix: prefix, Endpoint: endpoint, Region: server.Region},
		Options{PartSize: leastPart, Keys: Static(server.Key.Access, server.Key.Secret)})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = b.Close() })
	return b
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

// TestBytesChangedOnTheWay flips a bit of what is sent: the server refuses it, the part is
// sent again, and what is stored is right. If each attempt is damaged, nothing is stored.
func TestBytesChangedOnTheWay(t *testing.T) {
	b, p := guarded(t)
	for _, size := range []int{100, 2*leastPart + 1} {
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
	b, p := guarded(t)
	for _, checks := range []bool{true, false} {
		name := fmt.Sprintf("checks-%v", checks)
		first, second := noise(2*leastPart+1), noise(2*leastPart+2)
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
		if !checks {
			defer p.Inject(faultproxy.Fault{Do: faultproxy.DropHeaders("If-None-Match")}).Remove()
		}
		err = u.Commit(t.Context())
		got, _ := b.Get(t.Context(), name, 1<<30)
		if checks && (!errors.Is(err, fs.ErrExist) || !bytes.Equal(got, second)) {
			t.Errorf("the late commit: %v", err)
		}
		if !checks && !bytes.Equal(got, first) {
			t.Errorf("without If-None-Match the late commit does not win: %v", err)
		}
	}
}
