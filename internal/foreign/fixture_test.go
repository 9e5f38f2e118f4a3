package foreign

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// fixture is a checkpoint that PyTorch wrote, and what is in it.
type fixture struct {
	dir     string
	Tensors map[string]struct {
		DType  string
		Shape  []int64
		SHA256 string
	}
}

// fixtures returns the fixtures of this repository, and others if they are available.
func fixtures(t *testing.T) map[string]fixture {
	t.Helper()
	places := []string{filepath.Join("..", "format", "dcp", "testdata")}
	if more := os.Getenv("CKPTSTORE_FIXTURES"); more != "" {
		places = append(places, more)
	} else {
		places = append(places, filepath.Join("..", "..", "..", "shared", "fixtures"))
	}
	found := map[string]fixture{}
	for _, place := range places {
		here := 0
		err := filepath.WalkDir(place, func(path string, d os.DirEntry, err error) error {
			if err != nil || d.Name() != ".metadata" {
				return err
			}
			dir, err := filepath.Abs(filepath.Dir(path))
			if err != nil {
				return err
			}
			text, err := os.ReadFile(dir + ".json")
			if err != nil {
				return err
			}
			f := fixture{dir: dir}
			if err := json.Unmarshal(text, &f); err != nil {
				return err
			}
			here++
			found[strings.ReplaceAll(strings.TrimPrefix(path, place), "/", "_")] = f
			return nil
		})
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		t.Logf("%d checkpoints of PyTorch in %s", here, place)
	}
	if len(found) == 0 {
		t.Fatal("no checkpoint of PyTorch is at hand")
	}
	return found
}

// contents are all whole tensors that a reader gives, by name.
func contents(ctx context.Context, r data.Reader, m checkpoint.Manifest) (map[string][]byte, error) {
	if err := r.SetUp(ctx, m, true); err != nil {
		return nil, err
	}
	var wants []checkpoint.Want
	dst := buffersOf{}
	for _, tn := range m.Layout.Tensors {
		s := tensor.Shard{FQN: tn.FQN, DType: tn.DType, Global: tn.Shape, Box: tn.Shape.Full()}
		wants = append(wants, checkpoint.Want{Shard: s})
		dst = append(dst, make([]byte, s.Bytes()))
	}
	for _, v := range m.Layout.Values {
		wants = append(wants, checkpoint.Want{Value: true, Shard: tensor.Shard{FQN: v.FQN}, Rank: v.Rank})
		dst = append(dst, make([]byte, v.Bytes))
	}
	reads, err := planner.NewLoader(m.Layout).Load(wants)
	if err != nil {
		return nil, err
	}
	if _, err := r.ReadData(ctx, wants, reads, dst); err != nil {
		return nil, err
	}
	out := map[string][]byte{}
	for i, w := range wants {
		out[w.Shard.FQN] = dst[i]
	}
	return out, nil
}

type buffersOf [][]byte

// Want implements [data.Destination].
func (b buffersOf) Want(i int) []byte { return b[i] }

// check compares a checkpoint with the fixture's description.
func (f fixture) check(t *testing.T, r data.Reader) map[string][]byte {
	t.Helper()
	m, err := r.ReadMetadata(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	got, err := contents(t.Context(), r, m)
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Layout.Tensors) != len(f.Tensors) {
		t.Errorf("%d tensors, want %d", len(m.Layout.Tensors), len(f.Tensors))
	}
	for _, tn := range m.Layout.Tensors {
		want := f.Tensors[tn.FQN]
		if tn.DType.String() != strings.TrimPrefix(want.DType, "torch.") || !tn.Shape.Equal(want.Shape) {
			t.Errorf("%q is %v %v, want %s %v", tn.FQN, tn.DType, tn.Shape, want.DType, want.Shape)
		}
		if sum := fmt.Sprintf("%x", sha256.Sum256(got[tn.FQN])); sum != want.SHA256 {
			t.Errorf("%q: the bytes are not those of PyTorch", tn.FQN)
		}
	}
	return got
}

func TestForeignReadsPyTorch(t *testing.T) {
	for name, f := range fixtures(t) {
		t.Run(name, func(t *testing.T) {
			r, err := Open(t.Context(), vfs.Default, f.dir)
			if err != nil {
				t.Fatal(err)
			}
			f.check(t, r)
		})
	}
}
