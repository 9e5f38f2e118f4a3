package data_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// series is a training whose checkpoints share chunks: tensors of two
// ranks, each with its bytes.
type series struct {
	root  *data.Root
	items [][]checkpoint.Item // by rank
	now   map[string][]byte
	// past are the checkpoints that exist.
	past []saved
	told []error // why something was not reused
}

// saved is a checkpoint of a series.
type saved struct {
	ref     checkpoint.Ref
	receipt checkpoint.Receipt
	m       checkpoint.Manifest
	bytes   map[string][]byte
	written map[int]data.Written
}

// newSeries has tensors of these sizes on each rank, with a value and a small
// tensor in addition.
func newSeries(t testing.TB, fs vfs.FS, ranks int, sizes ...int64) *series {
	t.Helper()
	s := &series{root: open(t, fs), now: map[string][]byte{}}
	for rank := range ranks {
		var items []checkpoint.Item
		for i, size := range append(sizes, 1000) {
			shard := tensor.Shard{FQN: fmt.Sprintf("layers.%d.r%d", i, rank), DType: tensor.Uint8, Global: tensor.Shape{size}, Box: tensor.Shape{size}.Full()}
			items = append(items, checkpoint.Item{Shard: shard, Bytes: size})
			s.now[shard.FQN] = noise(shard.FQN, size)
		}
		s.items = append(s.items, items)
	}
	return s
}

// change gives a tensor new bytes, from its k-th on.
func (s *series) change(fqn string, k int64, seed uint64) {
	b := slices.Clone(s.now[fqn])
	copy(b[k:], noise(fmt.Sprint(fqn, seed), int64(len(b))-k))
	s.now[fqn] = b
}

func (s *series) manifest(ref checkpoint.Ref, written map[int]data.Written) checkpoint.Manifest {
	m := checkpoint.Manifest{Store: "store-1", Run: ref.Run, Trial: ref.Trial, Checkpoint: ref.Checkpoint, Name: ref.Checkpoint, Step: 1, Attempt: 1, WorldSize: len(s.items)}
	for rank, items := range s.items {
		for _, it := range items {
			m.Layout.Tensors = append(m.Layout.Tensors, checkpoint.Tensor{
				FQN: it.Shard.FQN, DType: it.Shard.DType, Shape: it.Shard.Global, Chunks: []checkpoint.Chunk{{Rank: rank, Box: it.Shard.Box}},
			})
		}
		m.Ranks = append(m.Ranks, checkpoint.RankIndex{Rank: rank, Index: written[rank].Index})
	}
	slices.SortFunc(m.Layout.Tensors, func(a, b checkpoint.Tensor) int { return strings.Compare(a.FQN, b.FQN) })
	return m
}

func (s *series) bases() []data.Base {
	var bases []data.Base
	for i := len(s.past) - 1; i >= 0 && len(bases) < 2; i-- {
		bases = append(bases, data.Base{Ref: s.past[i].ref, Manifest: s.past[i].receipt.Manifest})
	}
	return bases
}

func (s *series) source(rank int) data.Source {
	now := s.now
	return source(func(i int) ([]byte, error) { return now[s.items[rank][i].Shard.FQN], nil })
}

// try saves everything, and returns what was written before an error.
func (s *series) try(ctx context.Context, root *data.Root, name string) (out saved, err error) {
	out = saved{ref: checkpoint.RefOf("run", "t0", name), bytes: map[string][]byte{}, written: map[int]data.Written{}}
	for fqn, b := range s.now {
		out.bytes[fqn] = b
	}
	w := root.Writer(out.ref).Reusing(func(err error) { s.told = append(s.told, err) }, s.bases()...)
	if err := w.SetUp(ctx, true); err != nil {
		return out, err
	}
	for rank, items := range s.items {
		if out.written[rank], err = w.WriteData(ctx, rank, items, s.source(rank)); err != nil {
			delete(out.written, rank)
			return out, err
		}
	}
	out.m = s.manifest(out.ref, out.written)
	out.receipt, err = w.Finish(ctx, out.m, commit)
	return out, err
}

func (s *series) save(t testing.TB, name string) saved {
	t.Helper()
	out, err := s.try(t.Context(), s.root, name)
	if err != nil {
		t.Fatal(err)
	}
	s.past = append(s.past, out)
	return out
}

func (s *series) remove(t testing.TB, i int) {
	t.Helper()
	if err := s.root.RemoveCommitted(t.Context(), s.past[i].ref); err != nil {
		t.Fatal(err)
	}
	s.past = slices.Delete(s.past, i, i+1)
}

// load reads all of a checkpoint.
func (c saved) load(ctx context.Context, root *data.Root) (map[string][]byte, error) {
	r := root.Reader(c.ref)
	m, err := r.ReadMetadata(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.SetUp(ctx, m, true); err != nil {
		return nil, err
	}
	out := map[string][]byte{}
	for _, tn := range m.Layout.Tensors {
		shard := tensor.Shard{FQN: tn.FQN, DType: tn.DType, Global: tn.Shape, Box: tn.Shape.Full()}
		buf := make([]byte, shard.Bytes())
		read := checkpoint.Read{FQN: tn.FQN, Rank: tn.Chunks[0].Rank, Chunk: shard.Box, Region: shard.Box}
		if _, err := r.ReadData(ctx, []checkpoint.Want{{Shard: shard}}, []checkpoint.Read{read}, destination{buf}); err != nil {
			return nil, err
		}
		out[tn.FQN] = buf
	}
	return out, nil
}

// whole compares every byte of a checkpoint, by a reader and by Verify.
func (c saved) whole(t testing.TB, root *data.Root) {
	t.Helper()
	got, err := c.load(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	for fqn, want := range c.bytes {
		if !bytes.Equal(got[fqn], want) {
			t.Fatalf("%s: %q has other bytes", c.ref, fqn)
		}
	}
	if report, err := root.Verify(t.Context(), c.ref, c.receipt.Manifest, nil); err != nil || !report.Clean() || len(report.Extra) > 0 {
		t.Fatalf("%s: %v, extra %v, %v", c.ref, report.Findings, report.Extra, err)
	}
}

func (c saved) bytesOf() (written, reused int64) {
	for _, w := range c.written {
		written += w.BytesWritten
		reused += w.BytesReused
	}
	return written, reused
}

func links(c saved, rank int) (names []string) {
	for _, f := range c.written[rank].Files {
		if strings.HasSuffix(f.Name, ".link") {
			names = append(names, f.Name)
		}
	}
	return names
}

const mib = 1 << 20

// TestReuse follows a series with the rules one by one.
func TestReuse(t *testing.T) {
	s := newSeries(t, memory(t), 1, 2*mib, 2*mib, mib, mib/2)
	want := func(name string, written, reused int64, files int) saved {
		t.Helper()
		c := s.save(t, strings.ReplaceAll(name, " ", "-"))
		if w, r := c.bytesOf(); w != written || r != reused || len(links(c, 0)) != files {
			t.Errorf("%s: %d bytes written, %d reused, links %v; want %d, %d, %d links", name, w, r, links(c, 0), written, reused, files)
		}
		c.whole(t, s.root)
		return c
	}
	const small = mib/2 + 1000
	want("first", 5*mib+small, 0, 0)
	second := want("the same", small, 5*mib, 1)
	s.change("layers.0.r0", 0, 1)
	third := want("one changed", 2*mib+small, 3*mib, 1)
	if links(third, 0)[0] != links(second, 0)[0] {
		t.Errorf("the same file is named %v, then %v", links(second, 0), links(third, 0))
	}
	// Its last byte: the first blocks look the same.
	s.change("layers.1.r0", 2*mib-1, 1)
	want("less than half of the old file", 3*mib+small, 2*mib, 1)
	s.now["layers.1.r0"] = s.now["layers.0.r0"]
	want("tied", mib+small, 4*mib, 1)
	for range 4 {
		s.remove(t, 0)
		for _, c := range s.past {
			c.whole(t, s.root)
		}
	}
	if len(s.told) > 0 {
		t.Errorf("told %v", s.told)
	}
}

// TestTied saves equal tensors: they lie in the file once.
func TestTied(t *testing.T) {
	s := newSeries(t, memory(t), 1, mib, mib, mib, mib)
	s.now["layers.3.r0"] = s.now["layers.0.r0"]
	s.now["layers.2.r0"] = s.now["layers.0.r0"]
	c := s.save(t, "tied")
	if w, r := c.bytesOf(); w != 2*mib+1000 || r != 2*mib {
		t.Errorf("%d bytes written, %d reused", w, r)
	}
	c.whole(t, s.root)
}

// TestReuseAlways saves with random changes and removes at random: whatever
// is left is whole.
func TestReuseAlways(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 3))
			s := newSeries(t, vfs.NewMem(), 2, mib, mib+70_000, 2*mib, 500_000)
			var names []string
			for fqn := range s.now {
				names = append(names, fqn)
			}
			slices.Sort(names)
			reused := int64(0)
			for step := range 6 {
				for range rng.IntN(3) {
					fqn := names[rng.IntN(len(names))]
					switch other := names[rng.IntN(len(names))]; {
					case rng.IntN(4) == 0 && len(s.now[other]) == len(s.now[fqn]):
						s.now[fqn] = s.now[other]
					default:
						s.change(fqn, rng.Int64N(int64(len(s.now[fqn]))), rng.Uint64())
					}
				}
				_, r := s.save(t, fmt.Sprintf("step-%d.a1", step)).bytesOf()
				reused += r
				for len(s.past) > 0 && rng.IntN(2) == 0 {
					s.remove(t, rng.IntN(len(s.past)))
				}
				for _, c := range s.past {
					c.whole(t, s.root)
				}
			}
			if reused == 0 {
				t.Error("nothing was reused")
			}
		})
	}
}

// TestReuseCrash crashes a save that reuses at every operation: the base stays
// whole, the save is all or nothing, and another goes through in its place.
func TestReuseCrash(t *testing.T) {
	for k := 1; ; k++ {
		fs := memory(t)
		s := newSeries(t, fs, 2, mib)
		base := s.save(t, "base")
		s.change("layers.1.r0", 0, 1)
		var crashed []snapshot
		var promised saved
		injected, _ := faulty(fs, k, true, errDisk, func() { crashed = snapshots(fs, k) })
		promised, err := s.try(t.Context(), open(t, injected), "next")
		if err == nil {
			crashed = snapshots(fs, k)
		}
		for _, c := range crashed {
			root := open(t, c.fs)
			base.whole(t, root)
			again := s
			if len(promised.written) == 2 && err != nil {
				// All ranks know that they are durable.
				w := root.Writer(promised.ref)
				if promised.receipt, err = w.Finish(t.Context(), s.manifest(promised.ref, promised.written), commit); err != nil {
					t.Fatalf("%s: %v", c.name, err)
				}
				promised.whole(t, root)
				continue
			}
			next, err := again.try(t.Context(), root, "next")
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			for rank, w := range promised.written {
				if next.written[rank].Index != w.Index {
					t.Errorf("%s: rank %d got another index", c.name, rank)
				}
			}
			if err := root.RemoveCommitted(t.Context(), base.ref); err != nil {
				t.Fatal(err)
			}
			next.whole(t, root)
		}
		if err == nil && len(crashed) == 4 && promised.receipt.Event != "" && k > 20 {
			return
		}
		if k > 200 {
			t.Fatal("it does not end")
		}
	}
}

var errDisk = errors.New("the disk is gone")

// collector removes a base at a moment of a save.
type collector struct {
	vfs.FS
	before, after func(from string)
}

func (c collector) Link(from, to string) error {
	if strings.HasSuffix(to, ".link") {
		c.before(from)
	}
	err := c.FS.Link(from, to)
	if strings.HasSuffix(to, ".link") {
		c.after(from)
	}
	return err
}

// TestReuseOfWhatIsCollected removes the base, or puts other bytes where it
// was, just before and just after each link.
func TestReuseOfWhatIsCollected(t *testing.T) {
	nothing := func(string) {}
	for name, before := range map[string]bool{"before": true, "after": false} {
		for _, replaced := range []string{"", "other bytes", "cut"} {
			t.Run(name+" "+replaced, func(t *testing.T) {
				fs := memory(t)
				s := newSeries(t, fs, 2, mib, mib)
				base := s.save(t, "base")
				held := map[string][]byte{}
				collect := func(from string) {
					held[from] = read(t, fs, from)
					if err := s.root.RemoveCommitted(t.Context(), base.ref); err != nil {
						t.Error(err)
					}
					if replaced == "" {
						return
					}
					data := noise("other", base.written[0].Files[0].Size)
					if replaced == "cut" {
						data = held[from][:len(held[from])-100_000]
					}
					_ = fs.MkdirAll(fs.PathDir(from), 0o755)
					f, err := fs.Create(from, vfs.WriteCategoryUnspecified)
					if err == nil {
						_, err = f.Write(data)
						err = errors.Join(err, f.Close())
					}
					if err != nil {
						t.Error(err)
					}
				}
				c := collector{FS: fs, before: collect, after: nothing}
				if !before {
					c.before, c.after = nothing, collect
				}
				next, err := s.try(t.Context(), open(t, c), "next")
				if err != nil {
					t.Fatal(err)
				}
				got, err := next.load(t.Context(), s.root)
				if err != nil {
					t.Fatal(err)
				}
				for fqn, want := range next.bytes {
					if !bytes.Equal(got[fqn], want) {
						t.Errorf("%q has other bytes", fqn)
					}
				}
				if report, err := s.root.Verify(t.Context(), next.ref, next.receipt.Manifest, nil); err != nil || !report.Clean() {
					t.Errorf("%v %v", report.Findings, err)
				}
				if _, reused := next.bytesOf(); before == (reused > 0) && replaced == "" {
					t.Errorf("%d bytes reused", reused)
				}
				if before && len(s.told) == 0 {
					t.Error("no reason was reported")
				}
			})
		}
	}
}

// read is a file's bytes; nil if it is gone.
func read(t testing.TB, fs vfs.FS, name string) []byte {
	t.Helper()
	f, err := fs.Open(name)
	if err != nil {
		return nil
	}
	b, err := io.ReadAll(f)
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	return b
}

// TestRewriteCrash crashes the second write of a rank, of other bytes in as
// many, at every operation: the index never describes other data than the file next to it.
func TestRewriteCrash(t *testing.T) {
	for k, done := 1, false; !done; k++ {
		fs := memory(t)
		s := newSeries(t, fs, 1, 5000)
		w := s.root.Writer(checkpoint.RefOf("run", "t0", "next"))
		if err := w.SetUp(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		if _, err := w.WriteData(t.Context(), 0, s.items[0], s.source(0)); err != nil {
			t.Fatal(err)
		}
		s.change("layers.0.r0", 0, 1)
		var crashed []snapshot
		injected, _ := faulty(fs, k, true, errDisk, func() {
			for seed := range 20 {
				crashed = append(crashed, snapshots(fs, 100*k+seed)...)
			}
		})
		_, err := s.try(t.Context(), open(t, injected), "next")
		done = err == nil
		for _, c := range crashed {
			root := open(t, c.fs)
			next, err := s.try(t.Context(), root, "next")
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			next.whole(t, root)
		}
	}
}

// TestReuseWithoutLinks saves where there are no hard links.
func TestReuseWithoutLinks(t *testing.T) {
	fs := memory(t)
	s := newSeries(t, fs, 1, mib, mib)
	s.save(t, "base")
	refused := errors.New("no hard links here")
	s.root = open(t, linkless{fs, refused})
	c := s.save(t, "next")
	c.whole(t, s.root)
	if _, reused := c.bytesOf(); reused > 0 || len(s.told) != 1 || !errors.Is(s.told[0], refused) {
		t.Errorf("%d bytes reused, told %v", reused, s.told)
	}
}

type linkless struct {
	vfs.FS
	err error
}

func (l linkless) Link(from, to string) error {
	if strings.HasSuffix(to, ".link") {
		return l.err
	}
	return l.FS.Link(from, to)
}

// TestRepeatedWriteKeepsItsChoice repeats a write whose answer was lost, when
// what it had reused is gone: the log may know the first answer.
func TestRepeatedWriteKeepsItsChoice(t *testing.T) {
	fs := memory(t)
	s := newSeries(t, fs, 1, mib, mib)
	s.save(t, "base")
	w := s.root.Writer(checkpoint.Ref{Run: "run", Trial: "t0", Checkpoint: "next"}).Reusing(nil, s.bases()...)
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	first, err := w.WriteData(t.Context(), 0, s.items[0], s.source(0))
	if err != nil {
		t.Fatal(err)
	}
	s.remove(t, 0)
	again, err := w.Reusing(nil).WriteData(t.Context(), 0, s.items[0], s.source(0))
	if err != nil || again.Index != first.Index || again.BytesReused != 2*mib {
		t.Errorf("first %+v, then %+v, %v", first, again, err)
	}
	s.change("layers.0.r0", 0, 1)
	other, err := w.WriteData(t.Context(), 0, s.items[0], s.source(0))
	if err != nil || other.Index == first.Index || other.BytesReused != 0 {
		t.Errorf("other bytes: %+v, %v", other, err)
	}
}

// TestDamagedLinks damages files on a real disk: each is named, by Verify and
// by a load, in every checkpoint that uses it.
func TestDamagedLinks(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(path string) error
		want   data.Kind
	}{
		"a flip": {func(path string) error {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			b := make([]byte, 1)
			_, err = f.ReadAt(b, 2*mib)
			b[0] ^= 8
			_, err2 := f.WriteAt(b, 2*mib)
			return errors.Join(err, err2, f.Close())
		}, data.Corrupt},
		"of the header": {func(path string) error {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt([]byte("{\"x"), 8)
			return errors.Join(err, f.Close())
		}, data.Corrupt},
		"cut":  {func(path string) error { return os.Truncate(path, mib) }, data.Truncated},
		"gone": {os.Remove, data.Missing},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			root, err := data.Open(vfs.Default, filepath.Join(dir, "data"))
			if err != nil {
				t.Fatal(err)
			}
			root.OfStore("store-1")
			s := newSeries(t, vfs.Default, 1, mib, mib, mib)
			s.root = root
			s.save(t, "base")
			s.change("layers.0.r0", 0, 1)
			next := s.save(t, "next")
			link := links(next, 0)[0]
			if err := c.damage(filepath.Join(dir, "data", next.ref.String(), link)); err != nil {
				t.Fatal(err)
			}
			report, err := root.Verify(t.Context(), next.ref, next.receipt.Manifest, nil)
			if err != nil || report.Clean() || report.Findings[0].File != link || report.Findings[0].Kind != c.want {
				t.Errorf("findings %v, %v", report.Findings, err)
			}
			var corrupt *data.CorruptError
			if _, err := next.load(t.Context(), root); name != "of the header" && !errors.As(err, &corrupt) && !errors.Is(err, os.ErrNotExist) {
				t.Errorf("load: %v", err)
			}
			if _, err := root.Writer(next.ref).Finish(t.Context(), next.m, commit); (name == "gone" || name == "cut") && err == nil {
				t.Error("it can be committed")
			}
			report, err = root.Verify(t.Context(), s.past[0].ref, s.past[0].receipt.Manifest, nil)
			if err != nil || report.Clean() != (name == "gone") {
				t.Errorf("base: findings %v, %v", report.Findings, err)
			}
		})
	}
}

// TestCopiedWithLinks copies a checkpoint as cp does: the copy is whole without
// the store, and is not taken for a leftover.
func TestCopiedWithLinks(t *testing.T) {
	dir := t.TempDir()
	s := newSeries(t, vfs.Default, 1, mib, mib)
	var err error
	if s.root, err = data.Open(vfs.Default, filepath.Join(dir, "data")); err != nil {
		t.Fatal(err)
	}
	s.root.OfStore("store-1")
	s.save(t, "base")
	next := s.save(t, "next")
	copied := filepath.Join(dir, "copy", next.ref.String())
	if err := os.CopyFS(copied, os.DirFS(filepath.Join(dir, "data", next.ref.String()))); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(dir, "data")); err != nil {
		t.Fatal(err)
	}
	other, err := data.Open(vfs.Default, filepath.Join(dir, "copy"))
	if err != nil {
		t.Fatal(err)
	}
	next.whole(t, other)
	other.OfStore("store-2")
	if err := os.Remove(filepath.Join(copied, checkpoint.ReceiptFile)); err != nil {
		t.Fatal(err)
	}
	var taken *data.TakenError
	if err := other.Remove(t.Context(), next.ref); !errors.As(err, &taken) {
		t.Errorf("a copy without its receipt was removed: %v", err)
	}
}
