package dcp_test

import (
	"archive/zip"
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"math/big"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/tensor"
)

// appendTensor writes an archive behind a file.
func (all files) appendTensor(t testing.TB, name string, dtype tensor.DType, sizes []int64, payload []byte) dcp.Location {
	t.Helper()
	f, err := dcp.TensorArchive(dtype, sizes)
	if err != nil {
		t.Fatal(err)
	}
	where := dcp.Location{File: name, Offset: int64(len(all[name])), Length: f.Size}
	if len(f.Prefix)%64 != 0 {
		t.Errorf("the payload of %v begins at %d", sizes, len(f.Prefix))
	}
	all[name] = append(all[name], f.Prefix...)
	all[name] = append(all[name], payload...)
	all[name] = append(all[name], f.Suffix(crc32.ChecksumIEEE(payload))...)
	if got := int64(len(all[name])) - where.Offset; got != f.Size {
		t.Errorf("archive of %d bytes, Size is %d", got, f.Size)
	}
	return where
}

func (all files) appendBytes(name string, b []byte) dcp.Location {
	where := dcp.Location{File: name, Offset: int64(len(all[name])), Length: int64(len(b))}
	all[name] = append(all[name], b...)
	return where
}

// rewrite writes a checkpoint again, each rank's values first.
func rewrite(t testing.TB, all files, m dcp.Metadata) (files, dcp.Metadata) {
	t.Helper()
	out := files{}
	m2 := dcp.Metadata{Version: m.Version, SaveID: m.SaveID}
	for _, v := range m.Values {
		b := all[v.Where.File][v.Where.Offset : v.Where.Offset+v.Where.Length]
		x, err := all.value(v)
		var opaque *dcp.OpaqueError
		if !errors.As(err, &opaque) {
			if err != nil {
				t.Fatal(err)
			}
			if b, err = dcp.ValueArchive(x); err != nil {
				t.Fatal(err)
			}
		}
		v.Where = out.appendBytes(v.Where.File, b)
		m2.Values = append(m2.Values, v)
	}
	for _, x := range m.Tensors {
		chunks := x.Chunks
		x.Chunks = nil
		for _, c := range chunks {
			payload, err := all.chunk(x, c)
			if err != nil {
				t.Fatal(err)
			}
			c.Where = out.appendTensor(t, c.Where.File, x.DType, c.Box.Sizes, payload)
			x.Chunks = append(x.Chunks, c)
		}
		m2.Tensors = append(m2.Tensors, x)
	}
	b, err := dcp.WriteMetadata(m2)
	if err != nil {
		t.Fatal(err)
	}
	out[dcp.MetadataFile] = b
	return out, m2
}

func TestRewriteFixtures(t *testing.T) {
	for _, f := range fixtures(t) {
		t.Run(f.name, func(t *testing.T) {
			all := load(t, f.dir)
			m, err := dcp.ReadMetadata(all[dcp.MetadataFile])
			if err != nil {
				t.Fatal(err)
			}
			out, wrote := rewrite(t, all, m)
			got, err := dcp.ReadMetadata(out[dcp.MetadataFile])
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, wrote) {
				t.Errorf("read\n%+v\nwant\n%+v", got, wrote)
			}
			verify(t, out, got, f.want)
			for i, v := range got.Values {
				a, err := out.value(v)
				b, err2 := all.value(m.Values[i])
				if (err == nil) != (err2 == nil) || !reflect.DeepEqual(a, b) {
					t.Errorf("value %s is %v, want %v; %v, %v", v.FQN, a, b, err, err2)
				}
			}
			if dir := os.Getenv("CKPTSTORE_WRITE"); dir != "" {
				save(t, filepath.Join(dir, f.name), out)
			}
		})
	}
}

func save(t testing.TB, dir string, all files) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, b := range all {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// small is a checkpoint with each form once.
func small(t testing.TB) files {
	all := files{}
	value := func(v any) dcp.Location {
		b, err := dcp.ValueArchive(v)
		if err != nil {
			t.Fatal(err)
		}
		return all.appendBytes(dcp.DataFile(0, 0), b)
	}
	m := dcp.Metadata{Version: "1.0.0", SaveID: "00000000-0000-4000-8000-000000000000"}
	m.Values = []dcp.Value{
		{FQN: "step", Path: []any{"step"}, Where: value(int64(7))},
		{FQN: "optim.groups", Path: []any{"optim", "groups"}, Where: value(dcp.Dict{
			{"lr", 0.5},
			{"betas", dcp.Tuple{0.9, 0.95}},
			{int64(3), []any{nil, true, "name", []byte{0, 200}, []byte{}}},
			{"big", new(big.Int).Lsh(big.NewInt(-1), 70)},
		})},
	}
	elements := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(i)
		}
		return b
	}
	m.Tensors = []dcp.Tensor{
		{FQN: "layers.0.w", Path: []any{"layers", 0, "w"}, DType: tensor.Float32, Shape: tensor.Shape{4, 3}, RequiresGrad: true, Chunks: []dcp.Chunk{
			{tensor.Box{Offsets: []int64{0, 0}, Sizes: []int64{2, 3}}, all.appendTensor(t, dcp.DataFile(0, 0), tensor.Float32, []int64{2, 3}, elements(24))},
			{tensor.Box{Offsets: []int64{2, 0}, Sizes: []int64{2, 3}}, all.appendTensor(t, dcp.DataFile(1, 0), tensor.Float32, []int64{2, 3}, elements(24))},
		}},
		{FQN: "scale", DType: tensor.Float8E4M3, Shape: tensor.Shape{}, Chunks: []dcp.Chunk{
			{tensor.Box{Offsets: []int64{}, Sizes: []int64{}}, all.appendTensor(t, dcp.DataFile(0, 0), tensor.Float8E4M3, nil, elements(1))},
		}},
		{FQN: "none", DType: tensor.Uint16, Shape: tensor.Shape{0, 70000}, Chunks: []dcp.Chunk{
			{tensor.Box{Offsets: []int64{0, 0}, Sizes: []int64{0, 70000}}, all.appendTensor(t, dcp.DataFile(1, 0), tensor.Uint16, []int64{0, 70000}, nil)},
		}},
	}
	b, err := dcp.WriteMetadata(m)
	if err != nil {
		t.Fatal(err)
	}
	got, err := dcp.ReadMetadata(b)
	if err != nil || !reflect.DeepEqual(got, m) {
		t.Errorf("read %+v, %v, want %+v", got, err, m)
	}
	all[dcp.MetadataFile] = b
	return all
}

// Set CKPTSTORE_GOLDEN to rewrite it, and load the result with PyTorch.
func TestGoldenDirectory(t *testing.T) {
	got := small(t)
	if os.Getenv("CKPTSTORE_GOLDEN") != "" {
		save(t, "testdata/written", got)
	}
	want := load(t, "testdata/written")
	if len(got) != len(want) {
		t.Errorf("%d files, want %d", len(got), len(want))
	}
	for name, b := range got {
		if !bytes.Equal(b, want[name]) {
			t.Errorf("%s differs from testdata/written", name)
		}
	}
}

// A reader that is not ours finds the records, with their sums.
func TestArchivesAreZIPFiles(t *testing.T) {
	all := files{}
	where := all.appendTensor(t, "f", tensor.Int16, []int64{3}, []byte("abcdef"))
	z, err := zip.NewReader(bytes.NewReader(all["f"]), where.Length)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range z.File {
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatalf("%s: %v", f.Name, err)
		}
		if f.Name == "archive/data/0" && string(b) != "abcdef" {
			t.Errorf("data/0 is %q", b)
		}
		names = append(names, f.Name)
	}
	want := "[archive/data.pkl archive/.format_version archive/.storage_alignment archive/byteorder archive/data/0 archive/version]"
	if fmt.Sprint(names) != want {
		t.Errorf("records %v", names)
	}
}

// sparse is a file of a frame around zeros that need no memory.
type sparse struct {
	prefix, suffix []byte
	payload        int64
}

func (s sparse) ReadAt(b []byte, off int64) (int, error) {
	n := copyAt(b, s.prefix, off, 0)
	n = max(n, copyAt(b, s.suffix, off, int64(len(s.prefix))+s.payload))
	return max(n, len(b)), nil
}

// copyAt copies what of src, which begins at start, lies in b at off.
func copyAt(b, src []byte, off, start int64) int {
	lo, hi := max(off, start), min(off+int64(len(b)), start+int64(len(src)))
	if lo >= hi {
		return 0
	}
	return copy(b[lo-off:hi-off], src[lo-start:])
}

func TestArchivesOfMoreThan4GiB(t *testing.T) {
	for _, n := range []int64{math.MaxUint32 - 1, math.MaxUint32, math.MaxUint32 + 1, 1 << 40} {
		f, err := dcp.TensorArchive(tensor.Uint8, []int64{n})
		if err != nil {
			t.Fatal(err)
		}
		s := sparse{f.Prefix, f.Suffix(77), n}
		p, err := dcp.ReadArchive(s, dcp.Location{File: "f", Length: f.Size})
		if err != nil {
			t.Fatal(err)
		}
		if p.Length != n || p.Offset != int64(len(f.Prefix)) || p.CRC32 != 77 || !p.Contiguous() || len(f.Prefix)%64 != 0 {
			t.Errorf("payload %+v of %d bytes", p, n)
		}
		if z, err := zip.NewReader(s, f.Size); err != nil || z.File[4].UncompressedSize64 != uint64(n) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}
