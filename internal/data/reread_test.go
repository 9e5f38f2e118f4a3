package data_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/tensor"
)

// noisy is a bucket behind a network that flips bits of the next few reads of data files.
type noisy struct {
	*objecttest.Bucket
	flips atomic.Int64
}

func (n *noisy) Open(ctx context.Context, name string) (object.Object, error) {
	f, err := n.Bucket.Open(ctx, name)
	if err != nil || !strings.HasSuffix(name, ".safetensors") {
		return f, err
	}
	return noisyFile{f, n}, nil
}

type noisyFile struct {
	object.Object
	n *noisy
}

func (f noisyFile) flip(p []byte) {
	if len(p) > 0 && f.n.flips.Add(-1) >= 0 {
		p[len(p)/2] ^= 8
	}
}

func (f noisyFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.Object.ReadAt(p, off)
	f.flip(p[:n])
	return n, err
}

func (f noisyFile) ReadRange(off, n int64) (io.ReadCloser, error) {
	body, err := f.Object.(object.Ranger).ReadRange(off, n)
	return noisyBody{body, f}, err
}

type noisyBody struct {
	io.ReadCloser
	f noisyFile
}

func (b noisyBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.f.flip(p[:n])
	return n, err
}

// TestDamageOnTheWay: a window that arrives damaged is requested twice more. What stays damaged
// is an error, and is never in the destination.
func TestDamageOnTheWay(t *testing.T) {
	m := newModel()
	m.full(0, "w", tensor.Uint8, 900_000)
	bucket := &noisy{Bucket: objecttest.NewBucket()}
	root := data.OpenBackend(bucket, vfs.NewMem())
	root.OfStore("store-1")
	m.save(t, root)
	for flips := range int64(5) {
		bucket.flips.Store(flips)
		dst, _, err := m.load(t.Context(), root.Reader(ref), m.wantAll())
		var corrupt *data.CorruptError
		if flips <= 2 && err != nil || flips > 2 && !errors.As(err, &corrupt) {
			t.Errorf("%d damaged answers: %v", flips, err)
		}
		if flips > 2 {
			for _, got := range dst {
				if strings.Trim(string(got), "\x00") != "" {
					t.Errorf("%d damaged answers: bytes of the window are in place", flips)
				}
			}
		}
	}
}
