package storage

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/tensor"
)

// adoptedScene is a checkpoint of PyTorch in a directory of its own, adopted.
type adoptedScene struct {
	dir    string
	root   *Root
	ref    Ref
	digest plan.Digest
}

func adopt(t *testing.T, from fixture) *adoptedScene {
	t.Helper()
	s := &adoptedScene{dir: filepath.Join(t.TempDir(), "saved"), ref: Ref{"run", "main", "step-1.a1"}}
	if err := os.CopyFS(s.dir, os.DirFS(from.dir)); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.root, err = Open(vfs.Default, filepath.Join(t.TempDir(), "data")); err != nil {
		t.Fatal(err)
	}
	s.root.OfStore("s")
	f := openForeign(t, s.dir)
	w := s.root.Writer(s.ref)
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	m := f.Manifest()
	m.Store, m.Run, m.Trial, m.Checkpoint, m.Attempt = "s", "run", "main", s.ref.Checkpoint, 1
	var locals []plan.Local
	for _, r := range m.Ranks {
		locals = append(locals, plan.Local{Rank: r.Rank, Items: f.Items(r.Rank)})
	}
	// As a save plans it, which may leave out what is empty.
	made, err := planner.Global(locals)
	if err != nil {
		t.Fatal(err)
	}
	m.Layout = made.Layout
	for i, r := range m.Ranks {
		written, err := w.AdoptData(t.Context(), r.Rank, m.Layout.Items(r.Rank), f)
		if err != nil {
			t.Fatal(err)
		}
		m.Ranks[i].Index = written.Index
	}
	receipt, err := w.Finish(t.Context(), m, func(_ context.Context, d plan.Digest) (Decision, error) {
		s.digest = d
		return Decision{Sequence: 7, Event: "e", Time: time.Unix(1, 0)}, nil
	})
	if err != nil || receipt.Manifest != s.digest {
		t.Fatal(err)
	}
	return s
}

func (s *adoptedScene) file() string { return filepath.Join(s.dir, "__0_0.distcp") }

// read reads everything anew.
func (s *adoptedScene) read(t *testing.T) (map[string][]byte, error) {
	t.Helper()
	r := s.root.Reader(s.ref)
	m, err := r.ReadMetadata(t.Context())
	if err != nil {
		return nil, err
	}
	return contents(t.Context(), r, m)
}

func (s *adoptedScene) learn(t *testing.T, recorded map[string]plan.Digest) Report {
	t.Helper()
	report, err := s.root.Learn(t.Context(), s.ref, s.digest, LearnOptions{Recorded: recorded})
	if err != nil {
		t.Fatal(err)
	}
	return report
}

// rewrite changes a file and gives it back its time, as a fault of the disk
// would.
func rewrite(t *testing.T, name string, change func([]byte) []byte) {
	t.Helper()
	info, err := os.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, change(data), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(name, info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
}

func TestAdopted(t *testing.T) {
	for name, f := range fixtures(t) {
		t.Run(name, func(t *testing.T) {
			s := adopt(t, f)
			told := 0
			s.root.OnUnverified(func(Ref) { told++ })
			f.check(t, s.root.Reader(s.ref))
			f.check(t, s.root.Reader(s.ref))
			if told != 1 {
				t.Errorf("told %d times that the bytes are not verified", told)
			}
			ranks, err := s.root.Unlearned(s.ref)
			if err != nil || len(ranks) == 0 {
				t.Errorf("unlearned %v, %v", ranks, err)
			}
			first := s.learn(t, nil)
			if !first.Clean() || len(first.Sums) != len(ranks) || first.Unknown > 0 {
				t.Errorf("learned %+v", first)
			}
			if left, err := s.root.Unlearned(s.ref); err != nil || len(left) > 0 {
				t.Errorf("still unlearned %v, %v", left, err)
			}
			again := s.learn(t, nil)
			for i := range again.Sums {
				if again.Sums[i].New || again.Sums[i].Digest != first.Sums[i].Digest {
					t.Errorf("learned %+v, then %+v", first.Sums[i], again.Sums[i])
				}
			}
			f.check(t, s.root.Reader(s.ref))
			if err := s.root.RemoveCommitted(t.Context(), s.ref); err != nil {
				t.Fatal(err)
			}
			f.check(t, openForeign(t, s.dir))
		})
	}
}

// nested is a fixture of this repository.
func nested(t *testing.T) fixture {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join("dcp", "testdata", "torch-2.14", "single_nested"))
	if err != nil {
		t.Fatal(err)
	}
	return fixture{dir: dir}
}

func TestAdoptedFileThatChanges(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, name string) error{
		"touched":   func(_ *testing.T, name string) error { return os.Chtimes(name, time.Unix(9, 0), time.Unix(9, 0)) },
		"truncated": func(_ *testing.T, name string) error { return os.Truncate(name, 10) },
		"longer":    func(_ *testing.T, name string) error { return os.Truncate(name, 1<<20) },
		"removed":   func(_ *testing.T, name string) error { return os.Remove(name) },
		"a truncation in disguise": func(t *testing.T, name string) error {
			rewrite(t, name, func(b []byte) []byte { return b[:len(b)-1] })
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := adopt(t, nested(t))
			if err := change(t, s.file()); err != nil {
				t.Fatal(err)
			}
			_, err := s.read(t)
			var changed *ChangedError
			if !errors.As(err, &changed) || changed.File != s.file() || !strings.Contains(err.Error(), "import it again") {
				t.Errorf("reading gives %v", err)
			}
			report := s.learn(t, nil)
			if report.Clean() || len(report.Sums) > 0 {
				t.Errorf("learned %+v", report)
			}
		})
	}
}

func TestAdoptedFlip(t *testing.T) {
	x := openForeign(t, nested(t).dir).ranks[0].index
	i := slices.IndexFunc(x.entries, func(e entry) bool { return !e.item.Value && e.item.Bytes > 0 })
	middle := func(b []byte) []byte { b[x.entries[i].offset+1] ^= 4; return b }
	t.Run("before it is learned", func(t *testing.T) {
		s := adopt(t, nested(t))
		rewrite(t, s.file(), middle)
		report := s.learn(t, nil)
		if report.Clean() || len(report.Sums) > 0 {
			t.Errorf("learned %+v", report)
		}
	})
	t.Run("after it is learned", func(t *testing.T) {
		s := adopt(t, nested(t))
		s.learn(t, nil)
		rewrite(t, s.file(), middle)
		var corrupt *CorruptError
		if _, err := s.read(t); !errors.As(err, &corrupt) || corrupt.File != s.file() {
			t.Errorf("reading gives %v", err)
		}
		if report := s.learn(t, nil); report.Clean() {
			t.Error("verify finds nothing")
		}
	})
	t.Run("when the sums are gone and the log has them", func(t *testing.T) {
		s := adopt(t, nested(t))
		sums := s.learn(t, nil).Sums[0]
		path := s.root.path(s.ref, sums.Name)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		recorded := map[string]plan.Digest{sums.Name: plan.Sum([]byte("others"))}
		if report := s.learn(t, recorded); report.Clean() || len(report.Sums) > 0 {
			t.Errorf("learned %+v", report)
		}
		recorded[sums.Name] = sums.Digest
		if report := s.learn(t, recorded); !report.Clean() || report.Sums[0].Digest != sums.Digest {
			t.Errorf("learned %+v", report)
		}
	})
	t.Run("of the sums", func(t *testing.T) {
		s := adopt(t, nested(t))
		path := s.root.path(s.ref, s.learn(t, nil).Sums[0].Name)
		rewrite(t, path, func(b []byte) []byte { b[50] ^= 1; return b })
		var corrupt *CorruptError
		if _, err := s.read(t); !errors.As(err, &corrupt) || corrupt.File != path {
			t.Errorf("reading gives %v", err)
		}
		if report := s.learn(t, nil); report.Clean() {
			t.Error("verify finds nothing")
		}
	})
}

// adoptedSample has every kind of entry.
func adoptedSample() index {
	shard := func(fqn string, sizes ...int64) plan.Item {
		s := tensor.Shard{FQN: fqn, DType: tensor.Float32, Global: append(tensor.Shape{}, sizes...), Box: tensor.Shape(append([]int64{}, sizes...)).Full()}
		return plan.Item{Shard: s, Bytes: s.Bytes()}
	}
	return index{
		rank: 3, files: []File{{"/a/__3_0.distcp", 5000}, {"/a/__3_1.distcp", 1 << 40}}, modified: []int64{1, 1700000000123456789},
		entries: []entry{
			{item: plan.Item{Value: true, PerRank: true, Bytes: 7, Shard: tensor.Shard{FQN: "v"}}, offset: 3},
			{item: shard("w", 3, 4), file: 1, offset: 64, record: &record{64, 48, 0xdeadbeef}},
			{item: shard("t", 3, 4), offset: 128, strides: []int64{1, 3}, record: &record{128, 48, 1}},
			{item: shard("empty", 0, 4), offset: 0},
			{item: shard("scalar"), offset: 4996},
		},
	}
}

func TestAdoptedIndex(t *testing.T) {
	x := adoptedSample()
	data := x.encode()
	back, err := decodeIndex(data)
	if err != nil || !reflect.DeepEqual(back, x) {
		t.Fatalf("decoded %+v, %v", back, err)
	}
	for at := range data {
		broken := slices.Clone(data)
		broken[at] ^= 1
		if _, err := decodeIndex(broken); err == nil {
			t.Errorf("a flip at %d is not noticed", at)
		}
		if _, err := decodeIndex(data[:at]); err == nil {
			t.Errorf("cut at %d: not noticed", at)
		}
	}
	for name, change := range map[string]func(*index){
		"relative path":     func(x *index) { x.files[0].Name = "a/b" },
		"path that climbs":  func(x *index) { x.files[0].Name = "/a/../b" },
		"beyond the file":   func(x *index) { x.entries[4].offset++ },
		"strides too large": func(x *index) { x.entries[2].strides[0] = 1 << 40 },
		"strides overflow":  func(x *index) { x.entries[2].strides = []int64{1 << 62, 1 << 62} },
		"record beyond":     func(x *index) { x.entries[2].record.size = 4873 },
		"no such file":      func(x *index) { x.entries[0].file = 2 },
	} {
		x := adoptedSample()
		change(&x)
		if _, err := decodeIndex(x.encode()); err == nil {
			t.Errorf("%s: not noticed", name)
		}
	}
}

func FuzzAdoptedIndex(f *testing.F) {
	data := adoptedSample().encode()
	f.Add(data[:len(data)-4])
	f.Add([]byte("CKIX\x02\x00\x01\x02/a\x05\x00\x01\x04\x01w\x00\x00\x00\x0c\x40"))
	f.Fuzz(func(t *testing.T, body []byte) {
		data := binary.LittleEndian.AppendUint32(slices.Clone(body), crc32.Checksum(body, castagnoli))
		x, err := decodeIndex(data)
		if err != nil {
			return
		}
		again, err := decodeIndex(x.encode())
		if err != nil || !reflect.DeepEqual(x, again) {
			t.Errorf("decoded %+v, then %+v, %v", x, again, err)
		}
	})
}

// learnedSample is adoptedSample with sums.
func learnedSample() (index, plan.Digest) {
	x := adoptedSample()
	of := plan.Sum(x.encode())
	for i := range x.entries {
		e := &x.entries[i]
		e.digest = plan.Sum([]byte{byte(i)})
		e.sums = make([]uint32, blocks(e.item.Bytes))
		for k := range e.sums {
			e.sums[k] = uint32(i + k)
		}
	}
	return x, of
}

func TestSums(t *testing.T) {
	x, of := learnedSample()
	data := encodeSums(&x, of)
	back := adoptedSample()
	if err := decodeSums(data, &back, of); err != nil || !reflect.DeepEqual(back, x) {
		t.Fatalf("decoded %+v, %v", back, err)
	}
	if err := decodeSums(data, &back, plan.Sum(nil)); err == nil {
		t.Error("sums of another index are taken")
	}
	for at := range data {
		broken := slices.Clone(data)
		broken[at] ^= 1
		if err := decodeSums(broken, &back, of); err == nil {
			t.Errorf("a flip at %d is not noticed", at)
		}
		if err := decodeSums(data[:at], &back, of); err == nil {
			t.Errorf("cut at %d: not noticed", at)
		}
	}
}

func FuzzSums(f *testing.F) {
	x, of := learnedSample()
	data := encodeSums(&x, of)
	f.Add(data[:len(data)-4])
	f.Add(data[:40])
	f.Fuzz(func(t *testing.T, body []byte) {
		data := binary.LittleEndian.AppendUint32(slices.Clone(body), crc32.Checksum(body, castagnoli))
		x := adoptedSample()
		if err := decodeSums(data, &x, of); err != nil {
			if !reflect.DeepEqual(x, adoptedSample()) {
				t.Errorf("the index is half filled after %v", err)
			}
		}
	})
}

// TestStrided compares every window of strided chunks with an element by
// element walk.
func TestStrided(t *testing.T) {
	for _, c := range []struct{ sizes, strides []int64 }{
		{[]int64{3, 4}, []int64{1, 3}},
		{[]int64{3, 4}, []int64{9, 2}},
		{[]int64{2, 3, 4}, []int64{1, 8, 2}},
		{[]int64{5, 2}, []int64{0, 1}},
		{[]int64{4}, []int64{3}},
		{[]int64{2, 1, 2}, []int64{2, 1 << 50, 1}},
	} {
		s := tensor.Shard{FQN: "w", DType: tensor.Int16, Global: c.sizes, Box: tensor.Shape(c.sizes).Full()}
		e := entry{item: plan.Item{Shard: s, Bytes: s.Bytes()}, strides: c.strides}
		size, ok := e.span(1 << 20)
		if !ok {
			t.Fatalf("%v: no span", c)
		}
		span := make([]byte, size)
		for i := range span {
			span[i] = byte(i + 1)
		}
		var want []byte
		var walk func(d int, pos int64)
		walk = func(d int, pos int64) {
			if d == len(c.sizes) {
				want = append(want, span[2*pos:2*pos+2]...)
				return
			}
			for i := range c.sizes[d] {
				walk(d+1, pos+i*c.strides[d])
			}
		}
		walk(0, 0)
		for from := int64(0); from < s.Bytes(); from += 2 {
			for to := from + 2; to <= s.Bytes(); to += 2 {
				got := make([]byte, to-from)
				e.gather(got, span, from)
				if !slices.Equal(got, want[from:to]) {
					t.Fatalf("%v: bytes %d to %d are %v, want %v", c, from, to, got, want[from:to])
				}
			}
		}
		if _, ok := e.span(size - 2); ok {
			t.Errorf("%v: fits in less than its span", c)
		}
	}
}
