package data_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/tensor"
)

// lasting is a source whose items lie next to each other in one run of memory, as in a slot.
type lasting struct{ items [][]byte }

func (l lasting) Item(i int) ([]byte, error) { return l.items[i], nil }
func (lasting) Lasts()                       {}

// lastingOf copies a rank's items into one run of memory, with gaps between some.
func lastingOf(t interface{ Fatal(...any) }, m *model, rank int, gap int) lasting {
	items, src := m.layout.Items(rank), m.source(rank)
	size := 0
	for _, it := range items {
		size += int(it.Bytes) + gap
	}
	memory, out := make([]byte, size), lasting{}
	for i := range items {
		b, err := src.Item(i)
		if err != nil {
			t.Fatal(err)
		}
		n := copy(memory, b)
		out.items, memory = append(out.items, memory[:n]), memory[n+gap:]
	}
	return out
}

// TestSentFromWhereItLies: the file and the index are the same, byte for byte, whether the
// pieces are copies or runs of the source's memory.
func TestSentFromWhereItLies(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newModel()
		for i := range rapid.IntRange(1, 8).Draw(t, "tensors") {
			m.full(0, fmt.Sprintf("t%d", i), rapid.SampledFrom([]tensor.DType{tensor.Uint8, tensor.Float32}).Draw(t, "type"),
				rapid.OneOf(rapid.Int64Range(0, 300), rapid.Int64Range(60_000, 600_000)).Draw(t, "elements"))
		}
		m.value("step", 0, rapid.Int64Range(1, 70_000).Draw(t, "value"), false)
		gap := rapid.SampledFrom([]int{0, 0, 1, 64}).Draw(t, "gap")
		var files [2][]byte
		var written [2]data.Written
		for i, src := range []data.Source{m.source(0), lastingOf(t, m, 0, gap)} {
			bucket := objecttest.NewBucket()
			root := data.OpenBackend(bucket, vfs.NewMem())
			root.OfStore("store-1")
			var err error
			if written[i], err = root.Writer(ref).WriteData(context.Background(), 0, m.layout.Items(0), src); err != nil {
				t.Fatal(err)
			}
			if files[i], err = bucket.Get(context.Background(), ref.String()+"/"+checkpoint.DataFile(0), 1<<30); err != nil {
				t.Fatal(err)
			}
		}
		if !slices.Equal(files[0], files[1]) || written[0].Index != written[1].Index {
			t.Fatalf("%d and %d bytes, indexes %s and %s", len(files[0]), len(files[1]), written[0].Index, written[1].Index)
		}
	})
}

// changing is a bucket in front of whose network a byte of the source changes.
type changing struct {
	*objecttest.Bucket
	change func(piece int64)
}

func (c changing) Create(ctx context.Context, name string, size int64, mode object.Mode) (object.Upload, error) {
	u, err := c.Bucket.Create(ctx, name, size, mode)
	if err != nil {
		return nil, err
	}
	return changingUpload{u, c}, nil
}

type changingUpload struct {
	object.Upload
	c changing
}

func (u changingUpload) GatherDepth() int { return u.Upload.(object.Gatherer).GatherDepth() }

func (u changingUpload) WriteFrom(p [][]byte, off int64, sum uint32) error {
	u.c.change(off)
	return u.Upload.(object.Gatherer).WriteFrom(p, off, sum)
}

// TestByteChangesBeforeItIsSent flips a byte of a slot after it was digested, in each piece in
// turn: the piece is refused, the rank is named, and no index is written.
func TestByteChangesBeforeItIsSent(t *testing.T) {
	m := newModel()
	m.full(0, "w", tensor.Uint8, 1_300_000)
	for piece := range int64(5) {
		src := lastingOf(t, m, 0, 0)
		var done atomic.Bool
		bucket := changing{objecttest.NewBucket(), func(off int64) {
			if off == piece<<18 && !done.Swap(true) {
				src.items[0][max(off-4096, 0)] ^= 1 // the header is in the first piece
			}
		}}
		root := data.OpenBackend(bucket, vfs.NewMem())
		root.OfStore("store-1")
		_, err := root.Writer(ref).WriteData(t.Context(), 0, m.layout.Items(0), src)
		if !errors.Is(err, object.ErrChanged) || !done.Load() {
			t.Errorf("piece %d: %v", piece, err)
		}
		if _, err := bucket.Get(t.Context(), ref.String()+"/"+checkpoint.IndexFile(0), 1<<20); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("piece %d: the index is there: %v", piece, err)
		}
	}
}
