package data_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"
)

func pathOf(file string) string { return "store/data/" + ref.String() + "/" + file }

// content is a copy of a file.
func content(t testing.TB, fs *vfs.MemFS, file string) []byte {
	t.Helper()
	data, err := fs.UnsafeGetFileDataBuffer(pathOf(file))
	if err != nil {
		t.Fatal(err)
	}
	return slices.Clone(data)
}

// put replaces a file.
func put(t testing.TB, fs *vfs.MemFS, file string, data []byte) {
	t.Helper()
	f, err := fs.Create(pathOf(file), vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(slices.Clone(data)); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// regions is the parts of a file in which damage is planted, by offset.
func regions(t testing.TB, fs *vfs.MemFS, file string) (names []string, ranges map[string][2]int64) {
	t.Helper()
	data := content(t, fs, file)
	size := int64(len(data))
	ranges = map[string][2]int64{"start": {0, 8}, "end": {size - 8, size}, "anywhere": {0, size}}
	if strings.HasSuffix(file, ".safetensors") {
		f, err := fs.Open(pathOf(file))
		if err != nil {
			t.Fatal(err)
		}
		h, err := safetensors.Parse(f, size)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		json := int64(strings.LastIndexByte(string(data[:h.DataStart]), '}') + 1)
		ranges["json"], ranges["padding"] = [2]int64{8, json}, [2]int64{json, h.DataStart}
		for _, e := range h.Tensors {
			if e.End > e.Start {
				ranges["chunk "+e.Name] = [2]int64{h.DataStart + e.Start, h.DataStart + e.End}
			}
		}
	}
	for name := range ranges {
		names = append(names, name)
	}
	slices.Sort(names)
	return names, ranges
}

// TestFlippedBit flips one bit anywhere in a checkpoint. Verify names the
// file, and in the data also the chunk and the block; loading that chunk
// fails, and loading any other does not.
func TestFlippedBit(t *testing.T) {
	m := small()
	fs := memory(t)
	root := open(t, fs)
	receipt := m.save(t, root)
	files, err := fs.List("store/data/" + ref.String())
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(files)
	if len(files) != 6 {
		t.Fatalf("files %v", files)
	}
	rapid.Check(t, func(rt *rapid.T) {
		file := rapid.SampledFrom(files).Draw(rt, "file")
		names, ranges := regions(t, fs, file)
		region := ranges[rapid.SampledFrom(names).Draw(rt, "region")]
		at := rapid.Int64Range(region[0], region[1]-1).Draw(rt, "offset")
		whole := content(t, fs, file)
		broken := slices.Clone(whole)
		broken[at] ^= 1 << rapid.IntRange(0, 7).Draw(rt, "bit")
		put(t, fs, file, broken)
		defer put(t, fs, file, whole)

		for _, digest := range []checkpoint.Digest{receipt.Manifest, {}} {
			report, err := root.Verify(t.Context(), ref, digest, nil)
			if err != nil {
				rt.Fatal(err)
			}
			found := slices.IndexFunc(report.Findings, func(f data.Finding) bool { return f.File == file })
			if found < 0 {
				rt.Fatalf("no finding names %s: %v", file, report.Findings)
			}
		}
		damaged := damagedChunk(rt, root, receipt.Manifest, file, at)
		for i, want := range m.wantAll() {
			reader := root.Reader(ref).WithManifest(receipt.Manifest)
			_, _, err := m.load(t.Context(), reader, []checkpoint.Want{want})
			var corrupt *data.CorruptError
			switch {
			case damaged != "" && damaged == describe(want):
				if !errors.As(err, &corrupt) || corrupt.FQN != want.Shard.FQN || corrupt.File != pathOf(file) {
					rt.Fatalf("loading the damaged chunk: error %v", err)
				}
			case strings.HasPrefix(file, "manifest-") || file == fmt.Sprintf("r%05d.idx", want.Rank):
				if !errors.As(err, &corrupt) && (!want.Value && want.Shard.Box.Volume() > 0 || want.Value) {
					rt.Fatalf("want %d loads with a damaged %s: %v", i, file, err)
				}
			case err != nil:
				rt.Fatalf("want %d does not load: %v", i, err)
			}
		}
	})
}

// describe names a chunk or value, with its rank.
func describe(w checkpoint.Want) string {
	if w.Value {
		return fmt.Sprint(w.Rank, w.Shard.FQN)
	}
	return fmt.Sprint(w.Rank, w.Shard.FQN, w.Shard.Box)
}

// damagedChunk is the chunk that Verify blames for a flip, after checking the
// block; empty if the flip is not in the data.
func damagedChunk(t *rapid.T, root *data.Root, digest checkpoint.Digest, file string, at int64) string {
	report, err := root.Verify(context.Background(), ref, digest, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range report.Findings {
		if f.FQN == "" {
			continue
		}
		if f.Block < 0 || f.Offset > at || f.Offset+checkpoint.BlockSize <= at || f.Kind != data.Corrupt || len(report.Findings) != 1 {
			t.Fatalf("flip at %d: findings %v", at, report.Findings)
		}
		var rank int
		if _, err := fmt.Sscanf(file, "r%d", &rank); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(rank, f.FQN, f.Chunk)
	}
	if strings.HasSuffix(file, ".safetensors") && at >= 4096 {
		t.Fatalf("flip at %d in the data: findings %v", at, report.Findings)
	}
	return ""
}

// TestAllDamage plants several kinds at once: all are reported.
func TestAllDamage(t *testing.T) {
	m := small()
	fs := memory(t)
	root := open(t, fs)
	receipt := m.save(t, root)
	raw := content(t, fs, "r00000.safetensors")
	for at := len(raw) - 1; at > 4096; at -= 20_000 {
		raw[at] ^= 1
	}
	put(t, fs, "r00000.safetensors", raw)
	one := content(t, fs, "r00001.safetensors")
	put(t, fs, "r00001.safetensors", one[:4096+60])
	put(t, fs, "r00009.safetensors.tmp", nil)
	report := verify(t, root, receipt.Manifest)
	kinds := map[data.Kind]int{}
	for _, f := range report.Findings {
		kinds[f.Kind]++
	}
	if kinds[data.Corrupt] < 3 || kinds[data.Truncated] < 2 || !slices.Equal(report.Extra, []string{"r00009.safetensors.tmp"}) {
		t.Errorf("report %+v", report)
	}
	if !slices.IsSortedFunc(report.Findings, func(a, b data.Finding) int { return strings.Compare(a.File, b.File) }) {
		t.Error("not sorted")
	}
	if err := fs.Remove(pathOf("r00001.idx")); err != nil {
		t.Fatal(err)
	}
	if err := fs.Remove(pathOf("manifest-" + receipt.Manifest.String())); err != nil {
		t.Fatal(err)
	}
	report = verify(t, root, checkpoint.Digest{})
	if n := len(report.Findings); n < 4 || report.Findings[0].Kind != data.Missing {
		t.Errorf("without a manifest: findings %v", report.Findings)
	}
}

// TestTruncatedAndMissing cuts off and removes every file in turn.
func TestTruncatedAndMissing(t *testing.T) {
	m := small()
	fs := memory(t)
	root := open(t, fs)
	receipt := m.save(t, root)
	files, err := fs.List("store/data/" + ref.String())
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		whole := content(t, fs, file)
		for _, size := range []int{-1, 0, 1, len(whole) / 2, len(whole) - 1} {
			if size < 0 {
				if err := fs.Remove(pathOf(file)); err != nil {
					t.Fatal(err)
				}
			} else {
				put(t, fs, file, whole[:size])
			}
			report := verify(t, root, receipt.Manifest)
			at := slices.IndexFunc(report.Findings, func(f data.Finding) bool { return f.File == file })
			if at < 0 {
				t.Fatalf("%s cut to %d: findings %v", file, size, report.Findings)
			}
			if f := report.Findings[at]; size < 0 && f.Kind != data.Missing || size >= 0 && strings.HasSuffix(file, "tensors") && f.Kind != data.Truncated {
				t.Errorf("%s cut to %d: %v", file, size, f)
			}
			_, _, err := m.load(t.Context(), root.Reader(ref), m.wantAll())
			if err == nil {
				t.Errorf("%s cut to %d: loads", file, size)
			}
			if err != nil && !strings.Contains(err.Error(), file) {
				t.Errorf("%s cut to %d: error names no file: %v", file, size, err)
			}
		}
		put(t, fs, file, whole)
	}
	put(t, fs, "r00000.safetensors", append(content(t, fs, "r00000.safetensors"), 0))
	if report := verify(t, root, receipt.Manifest); len(report.Findings) != 1 || report.Findings[0].Kind != data.Corrupt {
		t.Errorf("one byte more: %v", report.Findings)
	}
}

// TestMixedUp puts whole files of another save in the place of the right ones.
func TestMixedUp(t *testing.T) {
	m, other := small(), newModel()
	other.full(0, "w", tensor.Float32, 4)
	fs, from := memory(t), memory(t)
	root := open(t, fs)
	receipt := m.save(t, root)
	other.save(t, open(t, from))
	put(t, fs, "r00000.idx", content(t, from, "r00000.idx"))
	report := verify(t, root, receipt.Manifest)
	if report.Clean() || report.Findings[0].Kind == "" {
		t.Errorf("another index: %v", report.Findings)
	}
	for _, f := range report.Findings {
		if f.File == "r00000.idx" && f.Kind != data.Mismatch {
			t.Errorf("another index: %v", f)
		}
	}
	put(t, fs, "COMMIT.json", content(t, from, "COMMIT.json"))
	report = verify(t, root, receipt.Manifest)
	if f := report.Findings[0]; f.File != "COMMIT.json" || f.Kind != data.Mismatch {
		t.Errorf("another receipt: %v", report.Findings)
	}
}

func TestVerifyProgress(t *testing.T) {
	m := small()
	root := open(t, memory(t))
	receipt := m.save(t, root)
	last := int64(0)
	_, err := root.Verify(t.Context(), ref, receipt.Manifest, func(bytes int64) {
		if bytes <= last {
			t.Errorf("progress went from %d to %d", last, bytes)
		}
		last = bytes
	})
	if err != nil || last != m.layout.Bytes() {
		t.Errorf("%d of %d bytes, %v", last, m.layout.Bytes(), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := root.Verify(ctx, ref, receipt.Manifest, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	gone := checkpoint.Ref{Run: "r", Trial: "t", Checkpoint: "c"}
	report, err := root.Verify(t.Context(), gone, receipt.Manifest, nil)
	if err != nil || report.Clean() {
		t.Errorf("a checkpoint that is not there: %v, %v", report, err)
	}
}
