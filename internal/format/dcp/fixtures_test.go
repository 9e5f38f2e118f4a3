package dcp_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math"
	"math/big"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/tensor"
)

// expected is the JSON next to a fixture.
type expected struct {
	Torch   string
	Opaque  []string // values that are not of plain kinds
	Tensors map[string]struct {
		DType  tensor.DType
		Shape  tensor.Shape
		SHA256 string
	}
}

// fixture is a directory that PyTorch wrote.
type fixture struct {
	name, dir string
	want      expected
}

// fixtures returns the fixtures in testdata, and others if they are on the machine.
func fixtures(t testing.TB) []fixture {
	t.Helper()
	roots := []string{"testdata/torch-2.6", "testdata/torch-2.14", "testdata/torch-2.15"}
	more := os.Getenv("CKPTSTORE_FIXTURES")
	if more == "" {
		more = "../../../../shared/fixtures"
	}
	others, err := filepath.Glob(filepath.Join(more, "dcp-torch-*"))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("fixtures of testdata, and %d more folders in %s", len(others), more)
	var all []fixture
	for _, root := range append(roots, others...) {
		texts, err := filepath.Glob(filepath.Join(root, "*.json"))
		if err != nil || len(texts) == 0 {
			t.Fatalf("no fixtures in %s: %v", root, err)
		}
		for _, text := range texts {
			f := fixture{name: filepath.Base(root) + "/" + strings.TrimSuffix(filepath.Base(text), ".json"), dir: strings.TrimSuffix(text, ".json")}
			if err := json.Unmarshal(read(t, text), &f.want); err != nil {
				t.Fatal(err)
			}
			all = append(all, f)
		}
	}
	return all
}

func read(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// files are the contents of a checkpoint's directory.
type files map[string][]byte

func load(t testing.TB, dir string) files {
	t.Helper()
	all := files{}
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			all[name] = read(t, filepath.Join(dir, name))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// chunk reads a chunk of tensor t: row-major bytes of its box.
func (all files) chunk(t dcp.Tensor, c dcp.Chunk) ([]byte, error) {
	file, ok := all[c.Where.File]
	if !ok {
		return nil, fmt.Errorf("no file %s", c.Where.File)
	}
	p, err := dcp.ReadArchive(bytes.NewReader(file), c.Where)
	if err != nil {
		return nil, err
	}
	if p.DType != t.DType || !slices.Equal(p.Sizes, c.Box.Sizes) {
		return nil, fmt.Errorf("archive has %v of %v, want %v of %v", p.Sizes, p.DType, c.Box.Sizes, t.DType)
	}
	storage := file[p.Offset : p.Offset+p.Length]
	if crc32.ChecksumIEEE(storage) != p.CRC32 {
		return nil, errors.New("the sum of the storage is wrong")
	}
	dst := make([]byte, p.Volume()*int64(p.DType.Size()))
	p.Gather(dst, storage)
	if lo, n := p.Range(); p.Contiguous() && !bytes.Equal(dst, file[lo:lo+n]) {
		return nil, errors.New("contiguous, and the bytes in the file differ from those gathered")
	}
	return dst, nil
}

// assemble reads all tensors whole: name → bytes.
func (all files) assemble(m dcp.Metadata) (map[string][]byte, error) {
	out := map[string][]byte{}
	for _, t := range m.Tensors {
		full := make([]byte, t.Shape.Volume()*int64(t.DType.Size()))
		covered := int64(0)
		for _, c := range t.Chunks {
			src, err := all.chunk(t, c)
			if err != nil {
				return nil, fmt.Errorf("%s at %v: %w", t.FQN, c.Box, err)
			}
			tensor.CopyRegion(full, t.Shape.Full(), src, c.Box, c.Box, t.DType.Size())
			covered += c.Box.Volume()
		}
		if covered != t.Shape.Volume() {
			return nil, fmt.Errorf("%s: chunks have %d of %d elements", t.FQN, covered, t.Shape.Volume())
		}
		out[t.FQN] = full
	}
	return out, nil
}

func (all files) value(v dcp.Value) (any, error) {
	file := all[v.Where.File]
	if end := v.Where.Offset + v.Where.Length; end > int64(len(file)) {
		return nil, fmt.Errorf("%s ends behind its file", v.FQN)
	}
	return dcp.DecodeValue(file[v.Where.Offset : v.Where.Offset+v.Where.Length])
}

// verify compares a checkpoint with its JSON.
func verify(t *testing.T, all files, m dcp.Metadata, want expected) {
	t.Helper()
	got, err := all.assemble(m)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want.Tensors) {
		t.Errorf("%d tensors, want %d", len(got), len(want.Tensors))
	}
	for _, x := range m.Tensors {
		w, ok := want.Tensors[x.FQN]
		sum := sha256.Sum256(got[x.FQN])
		if !ok || w.DType != x.DType || !w.Shape.Equal(x.Shape) || w.SHA256 != hex.EncodeToString(sum[:]) {
			t.Errorf("tensor %s is %v of shape %v with SHA-256 %x, want %+v", x.FQN, x.DType, x.Shape, sum, w)
		}
	}
}

func TestFixtures(t *testing.T) {
	for _, f := range fixtures(t) {
		t.Run(f.name, func(t *testing.T) {
			all := load(t, f.dir)
			m, err := dcp.ReadMetadata(all[dcp.MetadataFile])
			if err != nil {
				t.Fatal(err)
			}
			verify(t, all, m, f.want)
			if (m.Version == "") != strings.HasPrefix(f.want.Torch, "2.6") || len(m.SaveID) != 36 {
				t.Errorf("PyTorch %s wrote version %q and save ID %q", f.want.Torch, m.Version, m.SaveID)
			}
			for _, x := range m.Tensors {
				if len(x.Path) == 0 {
					t.Errorf("tensor %s has no path", x.FQN)
				}
			}
			for _, v := range m.Values {
				_, err := all.value(v)
				var opaque *dcp.OpaqueError
				if errors.As(err, &opaque) != slices.Contains(f.want.Opaque, v.FQN) || (err != nil && opaque == nil) || len(v.Path) == 0 {
					t.Errorf("value %s at %v: %v", v.FQN, v.Path, err)
				}
			}
		})
	}
}

func TestNestedFixtureInDetail(t *testing.T) {
	all := load(t, "testdata/torch-2.14/single_nested")
	m, err := dcp.ReadMetadata(all[dcp.MetadataFile])
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, v := range m.Values {
		x, err := all.value(v)
		if err != nil {
			t.Fatal(err)
		}
		got[v.FQN] = fmt.Sprintf("%v %T %v", v.Path, x, x)
	}
	want := map[string]string{"step": "[step] int64 1234", "name": "[name] string run-a", "lr": "[lr] []interface {} [0.1 0.01]"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("values %v, want %v", got, want)
	}
	paths := map[string][]any{}
	for _, x := range m.Tensors {
		paths[x.FQN] = x.Path
	}
	if p := paths["model.layers.1.w"]; !slices.Equal(p, []any{"model", "layers", 1, "w"}) {
		t.Errorf("path %#v", p)
	}
	if scalar := m.Tensors[len(m.Tensors)-1]; scalar.FQN != "model.scalar" || len(scalar.Shape) != 0 || len(scalar.Chunks) != 1 || scalar.Chunks[0].Box.Volume() != 1 {
		t.Errorf("the scalar is %+v", scalar)
	}
}

func TestValuesOfEveryKind(t *testing.T) {
	all := load(t, "testdata/torch-2.15/every")
	m, err := dcp.ReadMetadata(all[dcp.MetadataFile])
	if err != nil {
		t.Fatal(err)
	}
	big1, _ := new(big.Int).SetString("1267650600228229401496703205376", 10)
	big2, _ := new(big.Int).SetString("-1180591620717411303424", 10)
	want := map[string]any{
		"plain": dcp.Tuple{
			[]byte{0, 0x80, 0xff},
			[]byte{},
			big1, big2, nil,
			dcp.Tuple{int64(1), dcp.Tuple{int64(2), "ü"}, []any{}},
			math.Inf(1), strings.Repeat("x", 300), int64(-5),
			dcp.Dict{{"a", dcp.Dict{{int64(1), []any{true}}}}},
		},
		"bytesio": "_io.BytesIO", "set": "builtins.set", "tensors": "torch._utils._rebuild_tensor_v2",
	}
	if len(m.Values) != len(want) {
		t.Errorf("%d values, want %d", len(m.Values), len(want))
	}
	for _, v := range m.Values {
		got, err := all.value(v)
		var opaque *dcp.OpaqueError
		if errors.As(err, &opaque) {
			got = opaque.Global
		}
		if !reflect.DeepEqual(got, want[v.FQN]) {
			t.Errorf("value %s is %#v, %v, want %#v", v.FQN, got, err, want[v.FQN])
		}
	}
}
