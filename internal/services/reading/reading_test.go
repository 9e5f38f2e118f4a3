package reading

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"hash/crc32"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// oracle reads an item by the library.
func (s *served) oracle(path string, it client.Item) []byte {
	s.Helper()
	f, err := store.OpenForeign(s.Context(), path)
	if err != nil {
		s.Fatal(err)
	}
	src := &source{row: projections.Checkpoint{ID: path}, manifest: f.Manifest(), reader: f, loader: planner.NewLoader(f.Manifest().Layout)}
	w, err := src.plan(Request{Items: []client.Item{it}})
	if err != nil {
		s.Fatal(err)
	}
	if err := w.place(s.Context()); err != nil {
		s.Fatal(err)
	}
	data := make([]byte, w.size)
	if err := w.fill(s.Context(), data); err != nil {
		s.Fatal(err)
	}
	return data[:w.sizes[0]]
}

// TestReadEverything compares a whole checkpoint with its source files, read from
// the store and at its path.
func TestReadEverything(t *testing.T) {
	for _, fixture := range []string{"mesh2x2", "single_nested", "single_dtypes"} {
		t.Run(fixture, func(t *testing.T) { readEverything(t, fixture) })
	}
}

func readEverything(t *testing.T, fixture string) {
	path, err := filepath.Abs(filepath.Join("..", "..", "format", "dcp", "testdata", "torch-2.14", fixture))
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, path)
	for ref, id := range map[string]string{"a": "step-0.a1", "a@latest": "step-0.a1", "step-0.a1": "step-0.a1", path: path} {
		d := ask[Description](s, "describe", Asked{ref}, http.StatusOK)
		if d.Checkpoint != id || len(d.Tensors) == 0 || fixture == "single_nested" && len(d.Values) != 3 {
			t.Fatalf("%s: %+v", ref, d)
		}
		var req Request
		req.Ref = ref
		for fqn := range d.Tensors {
			req.Items = append(req.Items, s.item(d, fqn))
		}
		for fqn := range d.Values {
			req.Items = append(req.Items, s.item(d, fqn))
		}
		r := ask[Reply](s, "read", req, http.StatusOK)
		for i, it := range req.Items {
			if strings.HasPrefix(r.Arenas[r.In[i]].Path, s.shared) && r.Offsets[i]%align != 0 {
				t.Errorf("%s is at %d", it.FQN, r.Offsets[i])
			}
			if got := s.bytesOf(r, i); !bytes.Equal(got, s.oracle(path, it)) {
				t.Errorf("%s of %s is another", it.FQN, ref)
			}
		}
		ask[struct{}](s, "done", Done{r.Read}, http.StatusOK)
	}
}

// TestFilesAreLent checks that no memory is allocated for items that lie in the
// checkpoint's file as wanted, whole or in part, and that damage there is still
// found.
func TestFilesAreLent(t *testing.T) {
	s := serve(t, safetensors(t, 100, 100))
	req := rowsOf("t0", 60, 100)
	for i, box := range [][2][]int64{{{0, 0}, {60, 1024}}, {{7, 0}, {30, 1024}}, {{9, 1000}, {1, 24}}} {
		req.Items[0].DType, req.Items[0].Offsets, req.Items[0].Sizes = tensor.Uint8, box[0], box[1]
		r := ask[Reply](s, "read", req, http.StatusOK)
		from := box[0][0]*1024 + box[0][1]
		if got := s.bytesOf(r, 0); len(s.files()) > 0 || !bytes.Equal(got, pattern(0, 100*1024)[from:from+int64(len(got))]) {
			t.Errorf("box %d is another, or is in memory: %+v", i, r)
		}
		ask[struct{}](s, "done", Done{r.Read}, http.StatusOK)
	}
	r := ask[Reply](s, "read", req, http.StatusOK)
	file, err := os.OpenFile(r.Arenas[0].Path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = file.WriteAt([]byte{255 - pattern(0, 1)[0]}, r.Offsets[0])
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
	if text := s.refused("read", req, http.StatusInternalServerError); !strings.Contains(text, "checksum of the block") {
		t.Errorf("damage is reported as: %q", text)
	}
}

// TestReadBoxAndDType reads a part of a tensor as another type.
func TestReadBoxAndDType(t *testing.T) {
	s := serve(t, safetensors(t, 8))
	req := Request{Ref: "a", Items: []client.Item{{
		FQN: "t0", DType: tensor.Int16, Shape: []int64{8, 1024}, Offsets: []int64{3, 1020}, Sizes: []int64{2, 3},
	}}}
	r := ask[Reply](s, "read", req, http.StatusOK)
	var want []byte
	for _, row := range []int{3, 4} {
		for column := 1020; column < 1023; column++ {
			want = append(want, byte((row*1024+column)%251), 0)
		}
	}
	if got := s.bytesOf(r, 0); !bytes.Equal(got, want) || r.Step != 0 || r.Checkpoint != "step-0.a1" {
		t.Errorf("%v of %+v, want %v", got, r, want)
	}
	req.StrictDType = true
	if text := s.refused("read", req, http.StatusBadRequest); !strings.Contains(text, `dtype mismatch for "t0"`) {
		t.Error(text)
	}
}

// TestPartial checks that only missing items are left out.
func TestPartial(t *testing.T) {
	s := serve(t, safetensors(t, 1))
	d := ask[Description](s, "describe", Asked{"a"}, http.StatusOK)
	req := Request{Ref: "a", Partial: true, Items: []client.Item{{FQN: "x", Value: true}, s.item(d, "t0")}}
	r := ask[Reply](s, "read", req, http.StatusOK)
	if r.Sizes[0] != -1 || !bytes.Equal(s.bytesOf(r, 1), pattern(0, 1024)) {
		t.Errorf("%+v", r)
	}
	// A request without items has a reply too.
	if r := ask[Reply](s, "read", Request{Ref: "a"}, http.StatusOK); len(r.Sizes) != 0 {
		t.Errorf("%+v", r)
	}
}

// TestRefused checks the errors of callers.
func TestRefused(t *testing.T) {
	s := serve(t, safetensors(t, 1))
	box := client.Item{FQN: "t0", DType: tensor.Uint8, Shape: []int64{2, 1024}, Offsets: []int64{0, 0}, Sizes: []int64{1, 1}}
	for _, c := range []struct {
		name    string
		request any
		status  int
		says    []string
	}{
		{"describe", Asked{"aa"}, 404, []string{`"aa"`, `did you mean "a"?`}},
		{"describe", Asked{"a@step-1"}, 404, []string{`"a@step-1"`, `step-0.a1`}},
		{"read", Request{Ref: "/nowhere"}, 404, []string{"/nowhere", "DCP directory"}},
		{"describe", Asked{""}, 400, []string{"ref is empty"}},
		{"describe", Asked{"../a"}, 400, []string{"absolute"}},
		{"read", Request{Ref: "a", Items: []client.Item{{FQN: "x", Value: true}, {FQN: "y", Value: true}, box, {}}}, 400, []string{`missing key "x"`, `missing key "y"`, "size mismatch", "no name"}},
		{"done", Done{7}, 400, []string{"no read 7"}},
		{"list", Listing{Run: "b"}, 404, []string{`"b"`}},
		{"read", "text", 400, []string{"decode request"}},
	} {
		text := s.refused(c.name, c.request, c.status)
		for _, part := range c.says {
			if !strings.Contains(text, part) {
				t.Errorf("%s %v: %q lacks %q", c.name, c.request, text, part)
			}
		}
	}
	if files := s.files(); len(files) > 0 {
		t.Errorf("memory was made for errors: %q", files)
	}
}

// TestList checks that committed checkpoints are listed, newest first.
func TestList(t *testing.T) {
	s := serve(t, safetensors(t, 1), safetensors(t, 2))
	for _, run := range []string{"", "a"} {
		got := ask[Listed](s, "list", Listing{Run: run}, http.StatusOK).Checkpoints
		if len(got) != 2 || got[0].Checkpoint != "step-1.a2" || got[1].Checkpoint != "step-0.a1" || got[0].Bytes != 2048 || got[0].Run != "a" || got[0].State != "committed" {
			t.Errorf("run %q: %+v", run, got)
		}
	}
}

// TestDamage flips a bit of a data file: the error names file, tensor and block,
// nothing is returned, and the file is read again once it is repaired.
func TestDamage(t *testing.T) {
	s := serve(t, safetensors(t, 100, 200))
	d := ask[Description](s, "describe", Asked{"a"}, http.StatusOK)
	files, err := filepath.Glob(filepath.Join(s.dir, "data", "a", "*", "*", "r00000.safetensors"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	flip := func() {
		f, err := os.OpenFile(files[0], os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		info, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		one := make([]byte, 1)
		if _, err := f.ReadAt(one, info.Size()-1); err != nil {
			t.Fatal(err)
		}
		one[0] ^= 1
		if _, err := f.WriteAt(one, info.Size()-1); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	flip()
	last := s.item(d, "t1")
	text := s.refused("read", Request{Ref: "a", Items: []client.Item{last}}, http.StatusInternalServerError)
	for _, part := range []string{"r00000.safetensors", `"t1"`, "block 3", "checksum", "ckptstore ls a"} {
		if !strings.Contains(text, part) {
			t.Errorf("%q lacks %q", text, part)
		}
	}
	if s.server.Busy() != "" {
		t.Error(s.server.Busy())
	}
	// Undamaged blocks are readable.
	first := last
	first.Sizes = []int64{10, 1024}
	r := ask[Reply](s, "read", Request{Ref: "a", Items: []client.Item{first}}, http.StatusOK)
	if !bytes.Equal(s.bytesOf(r, 0), pattern(1, 10*1024)) {
		t.Error("the rest is another")
	}
	flip()
	r = ask[Reply](s, "read", Request{Ref: "a", Items: []client.Item{last}}, http.StatusOK)
	if !bytes.Equal(s.bytesOf(r, 0), pattern(1, 200*1024)) {
		t.Error("what was repaired is another")
	}
}

// TestPerRankValues reads values that each rank has for itself.
func TestPerRankValues(t *testing.T) {
	m := checkpoint.Manifest{Layout: checkpoint.Layout{Values: []checkpoint.Value{
		{FQN: "rng", Rank: 0, Bytes: 3, PerRank: true}, {FQN: "rng", Rank: 2, Bytes: 5, PerRank: true}, {FQN: "step", Rank: 1, Bytes: 8},
	}}}
	s := &source{row: projections.Checkpoint{ID: "c", Run: "a"}, manifest: m, loader: planner.NewLoader(m.Layout)}
	rank := func(n int) *int { return &n }
	_, err := s.plan(Request{Items: []client.Item{{FQN: "rng", Value: true}, {FQN: "rng", Value: true, Rank: rank(1)}}})
	for _, part := range []string{"ranks [0 2]", "rank 1 saved none"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v lacks %q", err, part)
		}
	}
	w, err := s.plan(Request{Items: []client.Item{
		{FQN: "rng", Value: true, Rank: rank(2)}, {FQN: "rng", Value: true, Rank: rank(1), Optional: true}, {FQN: "step", Value: true},
	}})
	if err != nil || w.sizes[0] != 5 || w.sizes[1] != -1 || w.sizes[2] != 8 || w.wants[0].Rank != 2 {
		t.Errorf("%+v, %v", w, err)
	}
	text, err := json.Marshal(s.describe().Values)
	if want := `{"rng":{"bytes":5,"per_rank":true,"ranks":[0,2]},"step":{"bytes":8}}`; err != nil || string(text) != want {
		t.Errorf("%s, %v, want %s", text, err, want)
	}
}

// TestDescribePaths checks that keys are strings and indexes are numbers.
func TestDescribePaths(t *testing.T) {
	m := checkpoint.Manifest{Layout: checkpoint.Layout{Tensors: []checkpoint.Tensor{
		{FQN: "a.0.b", Path: checkpoint.Path{checkpoint.PathKey("a"), checkpoint.PathIndex(0), checkpoint.PathKey("b")}, DType: tensor.BFloat16, Shape: tensor.Shape{}, Chunks: []checkpoint.Chunk{{}}},
		{FQN: "w", Path: checkpoint.Path{checkpoint.PathKey("w")}, DType: tensor.Float32, Shape: tensor.Shape{2}, Chunks: []checkpoint.Chunk{{Box: tensor.Box{Offsets: []int64{0}, Sizes: []int64{2}}}}},
	}}}
	s := &source{manifest: m}
	text, err := json.Marshal(s.describe().Tensors)
	want := `{"a.0.b":{"dtype":"bfloat16","shape":[],"chunks":[{"offsets":[],"sizes":[]}],"path":["a",0,"b"]},"w":{"dtype":"float32","shape":[2],"chunks":[{"offsets":[0],"sizes":[2]}]}}`
	if err != nil || string(text) != want {
		t.Errorf("%s, %v, want %s", text, err, want)
	}
}

// TestCallerVerifies checks that large items are left to the caller, who finds in
// the reply the checksum of each block that holds a part of them.
func TestCallerVerifies(t *testing.T) {
	s := serve(t, safetensors(t, 100, 300))
	files, err := filepath.Glob(filepath.Join(s.dir, "data", "a", "*", "*", "r00000.safetensors"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	raw, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	req := rowsOf("t1", 300, 300)
	req.Verifies, req.Items[0].DType = true, tensor.Uint8
	for _, rows := range [][2]int64{{0, 300}, {64, 64}, {1, 299}, {70, 70}, {63, 65}, {236, 64}, {5, 63}} {
		req.Items[0].Offsets, req.Items[0].Sizes = []int64{rows[0], 0}, []int64{rows[1], 1024}
		r := ask[Reply](s, "read", req, http.StatusOK)
		size, c := r.Sizes[0], r.Checks
		if got := s.bytesOf(r, 0); !bytes.Equal(got, pattern(1, 300*1024)[rows[0]<<10:][:size]) {
			t.Errorf("rows %v are others", rows)
		}
		ask[struct{}](s, "done", Done{r.Read}, http.StatusOK)
		if size < client.SmallestChecked {
			if c != nil {
				t.Errorf("rows %v are left to the caller", rows)
			}
			continue
		}
		if c == nil || len(c.Items) != 1 || c.Before[0] != rows[0]<<10%checkpoint.BlockSize {
			t.Fatalf("rows %v: %+v", rows, c)
		}
		var want []byte
		for block := range slices.Chunk(raw[r.Offsets[0]-c.Before[0]:r.Offsets[0]+size+c.After[0]], checkpoint.BlockSize) {
			want = binary.LittleEndian.AppendUint32(want, crc32.Checksum(block, crc32.MakeTable(crc32.Castagnoli)))
		}
		if !bytes.Equal(c.CRC32C, want) {
			t.Errorf("rows %v have the checksums %x, the reply has %x", rows, want, c.CRC32C)
		}
	}
	// No request has read it yet.
	if err := os.WriteFile(files[0], slices.Repeat([]byte{1}, len(raw)), 0o600); err != nil {
		t.Fatal(err)
	}
	s.refused("read", req, http.StatusInternalServerError)
	req.Items[0].Sizes = []int64{64, 1024}
	if r := ask[Reply](s, "read", req, http.StatusOK); r.Checks == nil {
		t.Error("what the caller verifies was read for it")
	}
}
