package data_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"
)

// every is a checkpoint with every dtype and the shapes that are special.
func every() *model {
	m := newModel()
	for d := tensor.Bool; d.Valid(); d++ {
		m.full(0, fmt.Sprintf("%s.scalar", d), d)
		m.full(1, fmt.Sprintf("%s.empty", d), d, 0, 4)
		m.tensor(fmt.Sprintf("%s.3d", d), d, tensor.Shape{5, 3, 4},
			part{0, []int64{0, 0, 0}, []int64{2, 3, 4}},
			part{1, []int64{2, 0, 0}, []int64{3, 1, 4}},
			part{2, []int64{2, 1, 0}, []int64{3, 2, 4}})
	}
	m.value("none", 0, 0, false)
	m.value("bytes", 2, 100_000, false)
	for rank := range 3 {
		m.value("rng", rank, int64(10*rank), true)
	}
	return m
}

func TestRoundTrip(t *testing.T) {
	for name, root := range map[string]*data.Root{"memory": open(t, memory(t)), "disk": onDisk(t)} {
		t.Run(name, func(t *testing.T) {
			m := every()
			receipt := m.save(t, root)
			m.check(t, root.Reader(ref), m.wantAll())
			m.check(t, root.Reader(ref).WithManifest(receipt.Manifest), m.wantAll())
			if report := verify(t, root, receipt.Manifest); !report.Clean() || report.Bytes != m.layout.Bytes() || len(report.Extra) > 0 {
				t.Fatalf("report %+v", report)
			}
		})
	}
}

func onDisk(t testing.TB) *data.Root {
	t.Helper()
	root, err := data.Open(vfs.Default, t.TempDir()+"/data")
	if err != nil {
		t.Fatal(err)
	}
	root.OfStore("store-1")
	return root
}

// TestLarge covers what only large chunks have: many blocks, pieces and
// windows, tasks in parallel, several ranks at once.
func TestLarge(t *testing.T) {
	m := newModel()
	const rows, columns = 1500, 1031
	m.tensor("w", tensor.Float32, tensor.Shape{rows, columns},
		part{0, []int64{0, 0}, []int64{700, columns}}, part{1, []int64{700, 0}, []int64{rows - 700, columns}})
	m.full(1, "odd", tensor.Uint8, 3<<20+1)
	root := onDisk(t)
	w := root.Writer(ref)
	if err := w.SetUp(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	results := make([]data.Written, 2)
	var g errgroup.Group
	for rank := range results {
		g.Go(func() (err error) {
			results[rank], err = w.WriteData(t.Context(), rank, m.layout.Items(rank), m.source(rank))
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Finish(t.Context(), m.manifest(map[int]data.Written{0: results[0], 1: results[1]}), commit); err != nil {
		t.Fatal(err)
	}
	if n := m.check(t, root.Reader(ref), m.wantAll()); n != m.layout.Bytes() {
		t.Errorf("read %d bytes of %d", n, m.layout.Bytes())
	}
	// A block of columns that no chunk has contiguously.
	shard := tensor.Shard{
		FQN: "w", DType: tensor.Float32, Global: tensor.Shape{rows, columns},
		Box: tensor.Box{Offsets: []int64{3, 17}, Sizes: []int64{1400, 500}},
	}
	wants := []checkpoint.Want{{Shard: shard}, {Shard: shard}}
	if n := m.check(t, root.Reader(ref), wants); n > rows*columns*4 {
		t.Errorf("read %d bytes for two equal wants in %d: a block was read twice", n, rows*columns*4)
	}
	// Three rows are 12 kB: one or two blocks.
	shard.Box = tensor.Box{Offsets: []int64{100, 0}, Sizes: []int64{3, columns}}
	if n := m.check(t, root.Reader(ref), []checkpoint.Want{{Shard: shard}}); n > 2*checkpoint.BlockSize {
		t.Errorf("read %d bytes for three rows", n)
	}
}

// grid cuts a shape into boxes at drawn places and gives each to a rank.
func grid(t *rapid.T, shape tensor.Shape, label string) []part {
	parts := []part{{sizes: nil}}
	for d, n := range shape {
		cuts := rapid.SliceOfNDistinct(rapid.Int64Range(0, n), 0, 3, rapid.ID[int64]).Draw(t, fmt.Sprintf("%s cuts %d", label, d))
		edges := map[int64]bool{0: true, n: true}
		for _, c := range cuts {
			edges[c] = true
		}
		var next []part
		for _, p := range parts {
			from := int64(0)
			for at := int64(1); at <= n; at++ {
				if edges[at] {
					next = append(next, part{
						offsets: append(append([]int64{}, p.offsets...), from),
						sizes:   append(append([]int64{}, p.sizes...), at-from),
					})
					from = at
				}
			}
		}
		parts = next
	}
	for i := range parts {
		parts[i].rank = rapid.IntRange(0, 2).Draw(t, label+" rank")
	}
	return parts
}

// TestReshard saves in one layout and loads in another.
func TestReshard(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		shape := tensor.Shape(rapid.SliceOfN(rapid.Int64Range(1, 40), 0, 4).Draw(rt, "shape"))
		for shape.Volume() > 200_000 {
			shape = shape[1:]
		}
		dtype := rapid.SampledFrom([]tensor.DType{tensor.Int8, tensor.BFloat16, tensor.Float32, tensor.Complex128}).Draw(rt, "dtype")
		m := newModel()
		m.tensor("w", dtype, shape, grid(rt, shape, "saved")...)
		fs := vfs.NewMem()
		if err := fs.MkdirAll("store", 0o755); err != nil {
			rt.Fatal(err)
		}
		root := open(t, fs)
		m.save(t, root)
		var wants []checkpoint.Want
		for _, p := range grid(rt, shape, "wanted") {
			wants = append(wants, checkpoint.Want{Shard: tensor.Shard{
				FQN: "w", DType: dtype, Global: shape,
				Box: tensor.Box{Offsets: p.offsets, Sizes: p.sizes},
			}})
		}
		dst, _, err := m.load(t.Context(), root.Reader(ref), wants)
		if err != nil {
			rt.Fatal(err)
		}
		for i, want := range wants {
			if !bytes.Equal(dst[i], m.cut(want.Shard)) {
				rt.Fatalf("%v of %v differs", want.Shard.Box, shape)
			}
		}
	})
}

// TestRefusedReads holds ReadData to its checks: no plan can make it write
// outside a buffer or read another tensor.
func TestRefusedReads(t *testing.T) {
	m := small()
	root := open(t, memory(t))
	m.save(t, root)
	want := checkpoint.Want{Shard: tensor.Shard{FQN: "w", DType: tensor.Float32, Global: tensor.Shape{4, 6}, Box: tensor.Shape{4, 6}.Full()}}
	read := m.reads([]checkpoint.Want{want})[0]
	cases := map[string]func(w *checkpoint.Want, r *checkpoint.Read, buffer *[]byte){
		"want out of range": func(_ *checkpoint.Want, r *checkpoint.Read, _ *[]byte) { r.Want = 1 },
		"negative want":     func(_ *checkpoint.Want, r *checkpoint.Read, _ *[]byte) { r.Want = -1 },
		"unknown tensor":    func(_ *checkpoint.Want, r *checkpoint.Read, _ *[]byte) { r.FQN = "v" },
		"unknown chunk":     func(_ *checkpoint.Want, r *checkpoint.Read, _ *[]byte) { r.Chunk = tensor.Shape{4, 6}.Full() },
		"unknown rank":      func(_ *checkpoint.Want, r *checkpoint.Read, _ *[]byte) { r.Rank = 7 },
		"region outside the chunk": func(_ *checkpoint.Want, r *checkpoint.Read, _ *[]byte) {
			r.Region = tensor.Box{Offsets: []int64{0, 1}, Sizes: []int64{4, 2}}
		},
		"region of other dimensions": func(_ *checkpoint.Want, r *checkpoint.Read, _ *[]byte) { r.Region = tensor.Shape{4}.Full() },
		"region outside the want": func(w *checkpoint.Want, _ *checkpoint.Read, b *[]byte) {
			w.Shard.Box = tensor.Box{Offsets: []int64{1, 0}, Sizes: []int64{3, 6}}
			*b = make([]byte, 72)
		},
		"short buffer":  func(_ *checkpoint.Want, _ *checkpoint.Read, b *[]byte) { *b = (*b)[1:] },
		"refused dtype": func(w *checkpoint.Want, _ *checkpoint.Read, _ *[]byte) { w.Shard.DType = tensor.Bool },
		"wider dtype":   func(w *checkpoint.Want, _ *checkpoint.Read, _ *[]byte) { w.Shard.DType = tensor.Int64 },
		"other shape":   func(w *checkpoint.Want, _ *checkpoint.Read, _ *[]byte) { w.Shard.Global = tensor.Shape{4, 7} },
		"value instead": func(w *checkpoint.Want, _ *checkpoint.Read, _ *[]byte) { w.Value = true },
	}
	for name, change := range cases {
		t.Run(name, func(t *testing.T) {
			w, r, buffer := want, read, make([]byte, 96)
			change(&w, &r, &buffer)
			reader := root.Reader(ref)
			manifest, err := reader.ReadMetadata(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := reader.SetUp(t.Context(), manifest, false); err != nil {
				t.Fatal(err)
			}
			if n, err := reader.ReadData(t.Context(), []checkpoint.Want{w}, []checkpoint.Read{r}, destination{buffer}); err == nil || n > 0 {
				t.Errorf("read %d bytes, error %v", n, err)
			}
		})
	}
}

func TestRefusedWrites(t *testing.T) {
	m := small()
	root := open(t, memory(t))
	w := root.Writer(ref)
	items := m.layout.Items(0)
	if _, err := w.WriteData(t.Context(), 0, items, m.source(0)); err == nil {
		t.Error("wrote without SetUp")
	}
	if err := w.SetUp(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	boom := errors.New("boom")
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	cases := map[string]func() error{
		"short item": func() error {
			_, err := w.WriteData(t.Context(), 0, items, source(func(int) ([]byte, error) { return []byte{1}, nil }))
			return err
		},
		"failing source": func() error {
			_, err := w.WriteData(t.Context(), 0, items, source(func(int) ([]byte, error) { return nil, boom }))
			if !errors.Is(err, boom) {
				return nil
			}
			return err
		},
		"twice the same": func() error {
			_, err := w.WriteData(t.Context(), 0, append(items[:1:1], items[0]), m.source(0))
			return err
		},
		"negative rank": func() error {
			_, err := w.WriteData(t.Context(), -1, nil, nil)
			return err
		},
		"wrong size": func() error {
			it := items[0]
			it.Bytes++
			_, err := w.PrepareLocalPlan(t.Context(), checkpoint.Local{Items: []checkpoint.Item{it}})
			return err
		},
		"cancelled": func() error {
			_, err := w.WriteData(cancelled, 0, items, m.source(0))
			return err
		},
		"missing rank": func() error {
			_, err := w.Finish(t.Context(), m.manifest(nil), commit)
			return err
		},
	}
	for name, call := range cases {
		if call() == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if names, err := listed(t, root); len(names) > 0 || err != nil {
		t.Errorf("listed %v, %v", names, err)
	}
}

// listed is the checkpoints that a reader without the log sees.
func listed(t testing.TB, root *data.Root) ([]checkpoint.Receipt, error) {
	t.Helper()
	receipts, damaged, err := root.Checkpoints(t.Context())
	if len(damaged) > 0 {
		t.Errorf("damaged receipts: %+v", damaged)
	}
	return receipts, err
}
