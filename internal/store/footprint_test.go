package store

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/collection"
)

// TestFootprint: of three checkpoints with a common chunk, each shares the chunk and has the rest
// exclusively. Collecting one frees its exclusive bytes; collecting two also frees what only those
// two share.
func TestFootprint(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	var bases []data.Base
	for step := range int64(3) {
		write, commit := largeSave(t, s, step+1)
		write(bases...)
		commit()
		rows := ask(t, s, query.Checkpoints, query.Params{Run: "run"})
		digest, err := checkpoint.ParseDigest(rows[0].Manifest)
		if err != nil {
			t.Fatal(err)
		}
		bases = []data.Base{{Ref: RefOf(rows[0]), Manifest: digest}}
	}
	measure := func(id string) collection.Footprint {
		t.Helper()
		f, err := collection.MeasureFiles(t.Context(), s.Data, refOf("run", id))
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	sum := int64(0)
	for _, id := range []string{"step-1.a1", "step-2.a1", "step-3.a1"} {
		f := measure(id)
		size := int64(0)
		err := filepath.WalkDir(filepath.Join(s.Data.Dir(), refOf("run", id).String()), func(_ string, e os.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				var info os.FileInfo
				if info, err = e.Info(); err == nil {
					size += info.Size()
				}
			}
			return err
		})
		if err != nil || f.Shared < data.MinReuse || f.Exclusive <= 0 || f.Exclusive >= data.MinReuse || f.Shared+f.Exclusive != size {
			t.Errorf("%s has %+v of %d bytes: %v", id, f, size, err)
		}
		sum += f.Exclusive
	}
	dry := func(text string) collection.Collection {
		t.Helper()
		out, err := s.Collect(t.Context(), collection.Options{Policy: policy(t, text)})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	if out := dry("last=2"); went(out) != "delete step-1.a1" || out.Freed != measure("step-1.a1").Exclusive {
		t.Errorf("one: %s, %d bytes freed, want %d", went(out), out.Freed, measure("step-1.a1").Exclusive)
	}
	two := measure("step-1.a1").Exclusive + measure("step-2.a1").Exclusive
	if out := dry("last=1"); out.Freed != two {
		t.Errorf("two of three: %d bytes freed, want %d", out.Freed, two)
	}
	// Without the third, removing both others frees what they share; removing either alone does
	// not.
	if err := os.RemoveAll(filepath.Join(s.Data.Dir(), refOf("run", "step-3.a1").String())); err != nil {
		t.Fatal(err)
	}
	committed(t, s, "run", 4)
	two = measure("step-1.a1").Exclusive + measure("step-2.a1").Exclusive + measure("step-1.a1").Shared
	if out := dry("last=1"); out.Freed != two || two < data.MinReuse {
		t.Errorf("both: %d bytes freed, want %d", out.Freed, two)
	}
	if _, err := collection.MeasureFiles(t.Context(), s.Data, refOf("run", "step-3.a1")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of files that are gone: %v", err)
	}
}
