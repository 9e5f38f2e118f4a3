package cmd_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// fixture describes a checkpoint according to PyTorch, which wrote it.
type fixture struct {
	dir     string
	Tensors map[string]struct {
		DType  string
		Shape  tensor.Shape
		SHA256 string
	}
}

// TestImportEveryFixture imports all available PyTorch checkpoints, copied and in place,
// and compares every tensor with PyTorch's description.
func TestImportEveryFixture(t *testing.T) {
	t.Parallel()
	var fixtures []fixture
	for _, place := range []string{filepath.Join("..", "internal", "format", "dcp", "testdata"), filepath.Join("..", "..", "shared", "fixtures")} {
		found, err := filepath.Glob(filepath.Join(place, "*", "*", ".metadata"))
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%d checkpoints of PyTorch in %s", len(found), place)
		for _, path := range found {
			f := fixture{dir: filepath.Dir(path)}
			text, err := os.ReadFile(f.dir + ".json")
			if err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(text, &f); err != nil || len(f.Tensors) == 0 {
				t.Fatalf("%s.json: %d tensors, %v", f.dir, len(f.Tensors), err)
			}
			fixtures = append(fixtures, f)
		}
	}
	if len(fixtures) == 0 {
		t.Fatal("no PyTorch checkpoint is available")
	}

	dir := filepath.Join(t.TempDir(), "store")
	want := map[string]fixture{}
	for i, f := range fixtures {
		for _, mode := range []string{"copied", "in-place"} {
			run := fmt.Sprintf("%s-%d", mode, i)
			args := []string{"import", f.dir, "--run", run, "--step", "1", "--quiet", "--store", dir}
			if mode == "in-place" {
				args = append(args, "--in-place")
			}
			output(t, 0, "ckptstore", args...)
			want[run] = f
		}
	}
	s, err := store.Open(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	for run, f := range want {
		c, err := query.Ask(t.Context(), s.Views(), query.Resolve, query.Params{Ref: run + "@latest"})
		if err != nil {
			t.Fatal(err)
		}
		f.compare(t, s, c)
		files, err := filepath.Glob(filepath.Join(s.Data.Dir(), store.RefOf(c).String(), "*.safetensors"))
		if copied := strings.HasPrefix(run, "copied"); err != nil || copied != (len(files) > 0) {
			t.Errorf("%s (%s) has the data files %v: %v", run, f.dir, files, err)
		}
	}
}

// compare reads every tensor of a checkpoint as a whole.
func (f fixture) compare(t *testing.T, s *store.Store, c projections.Checkpoint) {
	t.Helper()
	fail := func(err error) {
		if err != nil {
			t.Fatalf("%s, imported as %s: %v", f.dir, c.Run, err)
		}
	}
	r := s.Data.Reader(store.RefOf(c))
	m, err := r.ReadMetadata(t.Context())
	fail(err)
	fail(r.SetUp(t.Context(), m, true))
	if len(m.Layout.Tensors) != len(f.Tensors) {
		t.Errorf("%s: %d tensors, want %d", f.dir, len(m.Layout.Tensors), len(f.Tensors))
	}
	var wants []checkpoint.Want
	var data buffers
	for _, x := range m.Layout.Tensors {
		w := checkpoint.Want{Shard: tensor.Shard{FQN: x.FQN, DType: x.DType, Global: x.Shape, Box: x.Shape.Full()}}
		wants, data = append(wants, w), append(data, make([]byte, w.Shard.Bytes()))
	}
	reads, err := planner.NewLoader(m.Layout).Load(wants)
	fail(err)
	_, err = r.ReadData(t.Context(), wants, reads, data)
	fail(err)
	for i, x := range m.Layout.Tensors {
		said, ok := f.Tensors[x.FQN]
		if !ok || x.DType.String() != strings.TrimPrefix(said.DType, "torch.") || !x.Shape.Equal(said.Shape) {
			t.Errorf("%s: %q is %v %v, PyTorch has %+v", f.dir, x.FQN, x.DType, x.Shape, said)
		}
		if got := fmt.Sprintf("%x", sha256.Sum256(data[i])); got != said.SHA256 {
			t.Errorf("%s, imported as %s: %q has SHA-256 %s, PyTorch has %s", f.dir, c.Run, x.FQN, got, said.SHA256)
		}
	}
}

// TestBenchPlanJSON records what bench plan prints with --json.
func TestBenchPlanJSON(t *testing.T) {
	t.Parallel()
	for _, layout := range []string{"shard0", "fsdp-tp", "hsdp", "replicated"} {
		text := output(t, 0, "ckptstore", "bench", "plan", "--ranks", "8", "--tensors", "20", "--layout", layout, "--json")
		var b struct {
			Items         int
			MetadataBytes int `json:"metadata_bytes"`
			Seconds       map[string]float64
		}
		decode(t, text, &b)
		if b.Items != 160 || b.MetadataBytes == 0 || b.Seconds["total"] <= 0 {
			t.Errorf("%s: %+v", layout, b)
		}
		if layout == "shard0" {
			schema(t, "bench-plan", text)
		}
	}
}
