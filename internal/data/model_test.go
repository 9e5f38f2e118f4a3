package data_test

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
)

var ref = checkpoint.Ref{Run: "run", Trial: "t0", Checkpoint: "step-100.a1"}

// model is a checkpoint in memory: what the files have to hold.
type model struct {
	layout  checkpoint.Layout
	tensors map[string][]byte // whole tensors, row-major
	values  map[valueKey][]byte
}

type valueKey struct {
	fqn  string
	rank int
}

func newModel() *model {
	return &model{tensors: map[string][]byte{}, values: map[valueKey][]byte{}}
}

// part is a box with the rank that writes it.
type part struct {
	rank           int
	offsets, sizes []int64
}

func (m *model) tensor(fqn string, dtype tensor.DType, shape tensor.Shape, parts ...part) {
	t := checkpoint.Tensor{FQN: fqn, DType: dtype, Shape: shape}
	for _, p := range parts {
		t.Chunks = append(t.Chunks, checkpoint.Chunk{Rank: p.rank, Box: tensor.Box{Offsets: p.offsets, Sizes: p.sizes}})
	}
	m.layout.Tensors = append(m.layout.Tensors, t)
	slices.SortFunc(m.layout.Tensors, func(a, b checkpoint.Tensor) int { return cmp.Compare(a.FQN, b.FQN) })
	m.tensors[fqn] = noise(fqn, shape.Volume()*int64(dtype.Size()))
}

// full is a tensor that rank writes alone.
func (m *model) full(rank int, fqn string, dtype tensor.DType, shape ...int64) {
	b := tensor.Shape(shape).Full()
	m.tensor(fqn, dtype, shape, part{rank, b.Offsets, b.Sizes})
}

func (m *model) value(fqn string, rank int, size int64, perRank bool) {
	m.layout.Values = append(m.layout.Values, checkpoint.Value{FQN: fqn, Rank: rank, Bytes: size, PerRank: perRank})
	m.values[valueKey{fqn, rank}] = noise(fmt.Sprint(fqn, rank), size)
}

// noise is bytes that depend on the name alone.
func noise(name string, size int64) []byte {
	seed := checkpoint.Sum([]byte(name))
	b := make([]byte, size)
	_, _ = rand.NewChaCha8(seed).Read(b)
	return b
}

func (m *model) ranks() []int {
	var ranks []int
	for _, t := range m.layout.Tensors {
		for _, c := range t.Chunks {
			ranks = append(ranks, c.Rank)
		}
	}
	for _, v := range m.layout.Values {
		ranks = append(ranks, v.Rank)
	}
	slices.Sort(ranks)
	return slices.Compact(ranks)
}

// source is the bytes of rank's items.
type source func(i int) ([]byte, error)

func (s source) Item(i int) ([]byte, error) { return s(i) }

func (m *model) source(rank int) data.Source {
	items := m.layout.Items(rank)
	return source(func(i int) ([]byte, error) {
		it := items[i]
		if it.Value {
			return m.values[valueKey{it.Shard.FQN, rank}], nil
		}
		return m.cut(it.Shard), nil
	})
}

// cut is the bytes of a box, copied element by element.
func (m *model) cut(s tensor.Shard) []byte {
	full, size := m.tensors[s.FQN], int64(s.DType.Size())
	out := make([]byte, 0, s.Bytes())
	at := slices.Clone(s.Box.Offsets)
	for range s.Box.Volume() {
		pos := int64(0)
		for d := range at {
			pos = pos*s.Global[d] + at[d]
		}
		out = append(out, full[pos*size:(pos+1)*size]...)
		for d := len(at) - 1; d >= 0; d-- {
			if at[d]++; at[d] < s.Box.Offsets[d]+s.Box.Sizes[d] {
				break
			}
			at[d] = s.Box.Offsets[d]
		}
	}
	return out
}

// manifest is the manifest for what was written.
func (m *model) manifest(written map[int]data.Written) checkpoint.Manifest {
	out := checkpoint.Manifest{
		Store: "store-1", Run: "run", Trial: "t0", Checkpoint: ref.Checkpoint, Name: "step-100",
		Step: 100, Attempt: 1, WorldSize: 2, Layout: m.layout,
	}
	for _, rank := range m.ranks() {
		out.Ranks = append(out.Ranks, checkpoint.RankIndex{Rank: rank, Index: written[rank].Index})
	}
	return out
}

var decision = checkpoint.Decision{Sequence: 42, Event: "0198-event", Time: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)}

func commit(context.Context, checkpoint.Digest) (checkpoint.Decision, error) { return decision, nil }

// open is a root over fs.
func open(t testing.TB, fs vfs.FS) *data.Root {
	t.Helper()
	root, err := data.Open(fs, "store/data")
	if err != nil {
		t.Fatal(err)
	}
	root.OfStore("store-1")
	return root
}

// memory is a filesystem in memory with an empty store.
func memory(t testing.TB) *vfs.MemFS {
	t.Helper()
	fs := vfs.NewCrashableMem()
	prepare(t, fs)
	return fs
}

func prepare(t testing.TB, fs vfs.FS) {
	t.Helper()
	if err := fs.MkdirAll("store", 0o755); err != nil {
		t.Fatal(err)
	}
	dir, err := fs.OpenDir("")
	if err != nil {
		t.Fatal(err)
	}
	if err := dir.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := dir.Close(); err != nil {
		t.Fatal(err)
	}
}

// write does the steps up to the data.
func (m *model) write(ctx context.Context, root *data.Root) (map[int]data.Written, error) {
	w := root.Writer(ref)
	if err := w.SetUp(ctx, true); err != nil {
		return nil, err
	}
	for _, rank := range m.ranks() {
		if _, err := w.PrepareLocalPlan(ctx, checkpoint.Local{Rank: rank, Items: m.layout.Items(rank)}); err != nil {
			return nil, err
		}
	}
	layout, err := w.PrepareGlobalPlan(ctx, m.layout)
	if err != nil {
		return nil, err
	}
	written := map[int]data.Written{}
	for _, rank := range m.ranks() {
		if written[rank], err = w.WriteData(ctx, rank, layout.Items(rank), m.source(rank)); err != nil {
			return nil, err
		}
	}
	return written, nil
}

// save writes and commits the model.
func (m *model) save(t testing.TB, root *data.Root) checkpoint.Receipt {
	t.Helper()
	written, err := m.write(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	receipt, err := root.Writer(ref).Finish(t.Context(), m.manifest(written), commit)
	if err != nil {
		t.Fatal(err)
	}
	return receipt
}

// destination is buffers to load into.
type destination [][]byte

func (d destination) Want(i int) []byte { return d[i] }

// wantAll is a want for each stored chunk and value.
func (m *model) wantAll() []checkpoint.Want {
	var wants []checkpoint.Want
	for _, rank := range m.ranks() {
		for _, it := range m.layout.Items(rank) {
			wants = append(wants, checkpoint.Want{Value: it.Value, Shard: it.Shard, Rank: rank})
		}
	}
	return wants
}

// reads is the overlaps of the wants with the stored chunks.
func (m *model) reads(wants []checkpoint.Want) []checkpoint.Read {
	var reads []checkpoint.Read
	for i, want := range wants {
		for _, v := range m.layout.Values {
			if want.Value && v.FQN == want.Shard.FQN && (!v.PerRank || v.Rank == want.Rank) {
				reads = append(reads, checkpoint.Read{Want: i, FQN: v.FQN, Rank: v.Rank})
			}
		}
		for _, t := range m.layout.Tensors {
			if want.Value || t.FQN != want.Shard.FQN {
				continue
			}
			for _, c := range t.Chunks {
				if region, ok := want.Shard.Box.Intersect(c.Box); ok {
					reads = append(reads, checkpoint.Read{Want: i, FQN: t.FQN, Rank: c.Rank, Chunk: c.Box, Region: region})
				}
			}
		}
	}
	return reads
}

// load does the five steps of a reader for wants.
func (m *model) load(ctx context.Context, r *data.FileReader, wants []checkpoint.Want) (destination, int64, error) {
	manifest, err := r.ReadMetadata(ctx)
	if err != nil {
		return nil, 0, err
	}
	if err := r.SetUp(ctx, manifest, true); err != nil {
		return nil, 0, err
	}
	reads, err := r.PrepareLocalPlan(ctx, m.reads(wants))
	if err != nil {
		return nil, 0, err
	}
	global, err := r.PrepareGlobalPlan(ctx, [][]checkpoint.Read{reads})
	if err != nil {
		return nil, 0, err
	}
	dst := make(destination, len(wants))
	for i, want := range wants {
		if dst[i] = make([]byte, want.Shard.Bytes()); want.Value {
			dst[i] = make([]byte, len(m.wanted(want)))
		}
	}
	n, err := r.ReadData(ctx, wants, global[0], dst)
	return dst, n, err
}

// wanted returns the bytes that a want must receive.
func (m *model) wanted(want checkpoint.Want) []byte {
	if !want.Value {
		return m.cut(want.Shard)
	}
	for _, v := range m.layout.Values {
		if v.FQN == want.Shard.FQN && (!v.PerRank || v.Rank == want.Rank) {
			return m.values[valueKey{v.FQN, v.Rank}]
		}
	}
	return nil
}

// check loads wants and compares every byte.
func (m *model) check(t testing.TB, r *data.FileReader, wants []checkpoint.Want) int64 {
	t.Helper()
	dst, n, err := m.load(t.Context(), r, wants)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range wants {
		if !bytes.Equal(dst[i], m.wanted(want)) {
			t.Fatalf("want %d, %q %v: loaded bytes differ", i, want.Shard.FQN, want.Shard.Box)
		}
	}
	return n
}

// verify is the report of a verification that had no other error.
func verify(t testing.TB, root *data.Root, digest checkpoint.Digest) data.Report {
	t.Helper()
	report, err := root.Verify(t.Context(), ref, digest, nil)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

// small is a checkpoint of two ranks with one of everything.
func small() *model {
	m := tiny()
	m.full(0, "blocks", tensor.Uint8, 3*checkpoint.BlockSize/2)
	return m
}

// tiny is small without the chunk of several blocks.
func tiny() *model {
	m := newModel()
	m.tensor("w", tensor.Float32, tensor.Shape{4, 6}, part{0, []int64{0, 0}, []int64{4, 2}}, part{1, []int64{0, 2}, []int64{4, 4}})
	m.full(0, "bias", tensor.BFloat16, 7)
	m.full(1, "scale", tensor.Float64)
	m.full(0, "empty", tensor.Int64, 3, 0)
	m.full(1, "phase", tensor.Complex64, 5)
	m.value("config", 0, 33, false)
	m.value("none", 1, 0, false)
	m.value("rng", 0, 17, true)
	m.value("rng", 1, 17, true)
	return m
}
