package data_test

import (
	"context"
	"fmt"
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

// TestSomeFilesVanish takes 6 files of 32 ranks away, after they were written
// and after they were committed. Before the commit the log is not asked, and
// the same writes again make it whole. After it, each is found by its name,
// and only what lay in them cannot be loaded.
func TestSomeFilesVanish(t *testing.T) {
	t.Chdir(t.TempDir())
	const ranks = 32
	m := newModel()
	for rank := range ranks {
		m.full(rank, fmt.Sprintf("layers.%02d", rank), tensor.Uint8, 1000)
	}
	root := open(t, vfs.Default)
	w := root.Writer(ref)
	lost := []int{3, 4, 10, 11, 30, 31}
	vanish := func(names []string) {
		t.Helper()
		for _, name := range names {
			if err := os.Remove(filepath.FromSlash(pathOf(name))); err != nil {
				t.Fatal(err)
			}
		}
	}
	written, err := m.write(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, rank := range lost {
		names = append(names, fmt.Sprintf("r%05d.safetensors", rank))
	}
	vanish(names)
	_, err = w.Finish(t.Context(), m.manifest(written), func(context.Context, checkpoint.Digest) (checkpoint.Decision, error) {
		t.Error("the log was asked to commit")
		return decision, nil
	})
	if err == nil || !slices.ContainsFunc(names, func(name string) bool { return strings.Contains(err.Error(), name) }) {
		t.Errorf("the error names no file: %v", err)
	}
	if receipts, err := listed(t, root); len(receipts) > 0 || err != nil {
		t.Errorf("listed %v, %v", receipts, err)
	}

	if written, err = m.write(t.Context(), root); err != nil {
		t.Fatal(err)
	}
	receipt, err := w.Finish(t.Context(), m.manifest(written), commit)
	if err != nil {
		t.Fatal(err)
	}
	m.check(t, root.Reader(ref), m.wantAll())
	names[0], names[4] = "r00003.idx", "r00030.idx"
	vanish(names)
	var found []string
	for _, f := range verify(t, root, receipt.Manifest).Findings {
		if f.Kind != data.Missing {
			t.Errorf("found %v", f)
		}
		found = append(found, f.File)
	}
	slices.Sort(found)
	if found = slices.Compact(found); !slices.Equal(found, names) {
		t.Errorf("missing are %q, want %q", found, names)
	}
	for _, want := range m.wantAll() {
		_, _, err := m.load(t.Context(), root.Reader(ref), []checkpoint.Want{want})
		var rank int
		if _, err := fmt.Sscanf(want.Shard.FQN, "layers.%d", &rank); err != nil {
			t.Fatal(err)
		}
		gone := slices.Contains(lost, rank)
		if gone != (err != nil) || gone && !strings.Contains(err.Error(), fmt.Sprintf("r%05d.", rank)) {
			t.Errorf("%s: %v", want.Shard.FQN, err)
		}
	}
}
