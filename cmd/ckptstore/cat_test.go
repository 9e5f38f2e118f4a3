package main

import (
	"context"
	"errors"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/foreign"
	"github.com/ckptstore/ckptstore/tensor"
)

// ordinal returns the index of a box's first element in row-major order.
func ordinal(shape tensor.Shape, offsets []int64) int64 {
	at := int64(0)
	for d, n := range shape {
		at = at*n + offsets[d]
	}
	return at
}

func TestWindowsFollowEachOther(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		shape := tensor.Shape(rapid.SliceOfN(rapid.Int64Range(0, 7), 0, 4).Draw(t, "shape"))
		limit := rapid.Int64Range(1, 60).Draw(t, "limit")
		next, first := int64(0), int64(0)
		for box := range windows(shape.Full(), limit) {
			if err := box.Validate(shape); err != nil {
				t.Fatal(err)
			}
			if box.Volume() > limit || ordinal(shape, box.Offsets) != next {
				t.Fatalf("%v of at most %d begins at %d, want %d", box, limit, ordinal(shape, box.Offsets), next)
			}
			// Contiguous: the dimensions after a split one are complete.
			if len(shape) > 0 && tensor.Run(shape.Full(), box) != box.Volume() {
				t.Fatalf("%v is not contiguous in %v", box, shape)
			}
			if next == 0 {
				first = box.Volume()
			}
			if box.Volume() > first {
				t.Fatalf("%v is larger than the first window of %d", box, first)
			}
			next += box.Volume()
		}
		if next != shape.Volume() {
			t.Fatalf("%d elements of %v, want %d", next, shape, shape.Volume())
		}
	})
}

// endless reads a tensor that is larger than memory.
type endless struct {
	data.Reader
	most, sum int64
}

func (r *endless) ReadData(_ context.Context, _ []checkpoint.Want, reads []checkpoint.Read, dst data.Destination) (int64, error) {
	n := int64(0)
	for i := range reads {
		n += int64(len(dst.Want(reads[i].Want)))
	}
	r.most, r.sum = max(r.most, n), r.sum+n
	return n, nil
}

var errFull = errors.New("the disk is full")

// limited accepts a number of writes, then fails.
type limited int

func (w *limited) Write(p []byte) (int, error) {
	if *w--; *w < 0 {
		return 0, errFull
	}
	return len(p), nil
}

// sourceOf is a checkpoint of one tensor, in as many chunks as boxes.
func sourceOf(r data.Reader, shape tensor.Shape, boxes ...tensor.Box) source {
	x := checkpoint.Tensor{FQN: "x", DType: tensor.Float32, Shape: shape}
	for rank, box := range boxes {
		x.Chunks = append(x.Chunks, checkpoint.Chunk{Box: box, Rank: rank})
	}
	return source{reader: r, name: "c", manifest: checkpoint.Manifest{Layout: checkpoint.Layout{Tensors: []checkpoint.Tensor{x}}}}
}

func TestCatHoldsOneWindow(t *testing.T) {
	for name, shape := range map[string]tensor.Shape{
		"rows":           {1 << 20, 100},
		"one row":        {1, 100 << 20},
		"beyond memory":  {1 << 59},
		"rows beyond it": {2, math.MaxInt32, 1 << 27},
	} {
		t.Run(name, func(t *testing.T) {
			r, w := &endless{}, limited(3)
			a := &app{Console: &console.Console{Raw: &w, Err: io.Discard}}
			if err := a.cat(t.Context(), sourceOf(r, shape, shape.Full()), "x", catOptions{rank: -1, format: formatRaw}); !errors.Is(err, errFull) {
				t.Errorf("error %v, want that of the disk", err)
			}
			if r.most > catWindow || r.most < catWindow/2 || r.sum != 4*r.most {
				t.Errorf("%d bytes at a time, %d in all; a window has %d", r.most, r.sum, catWindow)
			}
		})
	}
}

// TestCatOfAHole: cat writes nothing, not even the data before the hole.
func TestCatOfAHole(t *testing.T) {
	shape := tensor.Shape{1 << 30}
	r, w := &endless{}, limited(0)
	a := &app{Console: &console.Console{Raw: &w, Err: io.Discard}}
	err := a.cat(t.Context(), sourceOf(r, shape, tensor.Box{Offsets: []int64{0}, Sizes: []int64{1 << 29}}), "x", catOptions{rank: -1, format: formatRaw})
	if errors.Is(err, errFull) || err == nil || r.sum != 0 {
		t.Errorf("%v after %d bytes", err, r.sum)
	}
}

// told is a reader with a manifest.
type told struct {
	endless
	manifest checkpoint.Manifest
}

func (r *told) ReadMetadata(context.Context) (checkpoint.Manifest, error) { return r.manifest, nil }
func (r *told) SetUp(context.Context, checkpoint.Manifest, bool) error    { return nil }
func (r *told) PrepareLocalPlan(_ context.Context, reads []checkpoint.Read) ([]checkpoint.Read, error) {
	return reads, nil
}

// TestExportSaysHoles: an export writes the existing chunks and warns of missing ones.
func TestExportSaysHoles(t *testing.T) {
	var said strings.Builder
	r := &told{}
	from := sourceOf(r, tensor.Shape{4}, tensor.Box{Offsets: []int64{0}, Sizes: []int64{3}})
	from.manifest.Ranks = []checkpoint.RankIndex{{}}
	r.manifest = from.manifest
	a := &app{Console: &console.Console{Name: "ckptstore", Out: io.Discard, Err: &said}}
	if err := a.export(t.Context(), from, filepath.Join(t.TempDir(), "out"), foreign.ExportOptions{Format: data.DCP}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(said.String(), `exported as it is: tensor "x"`) {
		t.Errorf("printed %q", said.String())
	}
}

func TestWindowsStop(t *testing.T) {
	for box := range windows(tensor.Shape{4, 4, 4}.Full(), 2) {
		if !slices.Equal(box.Offsets, []int64{0, 0, 0}) {
			t.Errorf("%v comes after the end", box)
		}
		break
	}
}
