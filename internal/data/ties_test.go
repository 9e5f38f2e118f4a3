package data_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/tensor"
)

// TestTiesThatChange changes one of two equal tensors, which are
// stored once, between their comparison and the write: neither gets the bytes of the other.
func TestTiesThatChange(t *testing.T) {
	m := newModel()
	m.full(0, "a", tensor.Uint8, data.MinReuse)
	m.full(0, "b", tensor.Uint8, data.MinReuse)
	m.tensors["b"] = m.tensors["a"]
	items, steady := m.layout.Items(0), m.source(0)
	changed := slices.Clone(m.tensors["a"])
	changed[len(changed)-1] ^= 1

	// How often the first is asked for when nothing changes; the last time, it
	// is written.
	asked := 0
	count := source(func(i int) ([]byte, error) {
		if i == 0 {
			asked++
		}
		return steady.Item(i)
	})
	save := func(src data.Source) (*data.Root, data.Written, error) {
		root := open(t, memory(t))
		w := root.Writer(ref).Reusing(nil)
		if err := w.SetUp(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		written, err := w.WriteData(t.Context(), 0, items, src)
		return root, written, err
	}
	root, written, err := save(count)
	if err != nil || written.BytesReused != data.MinReuse {
		t.Fatalf("%+v, %v", written, err)
	}
	if _, err := root.Writer(ref).Finish(t.Context(), m.manifest(map[int]data.Written{0: written}), commit); err != nil {
		t.Fatal(err)
	}
	m.check(t, root.Reader(ref), m.wantAll())

	left := asked
	_, _, err = save(source(func(i int) ([]byte, error) {
		if i == 0 {
			if left--; left == 0 {
				return changed, nil
			}
		}
		return steady.Item(i)
	}))
	if err == nil || !strings.Contains(err.Error(), `bytes of "a" changed while they were saved`) {
		t.Errorf("a tied tensor that changed: %v", err)
	}
}
