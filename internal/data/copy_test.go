package data_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// elsewhere is another root on a disk.
func elsewhere(t testing.TB) *data.Root {
	t.Helper()
	root, err := data.Open(vfs.Default, filepath.Join(t.TempDir(), "copy", "data"))
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// alone checks that no file below a directory has another name.
func alone(t testing.TB, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err == nil && info.Sys().(*syscall.Stat_t).Nlink != 1 {
			t.Errorf("%s has other names", path)
		}
		if strings.HasSuffix(path, ".link") {
			t.Errorf("%s is linked in", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestCopyTo copies a checkpoint that shares files with others: the copy is
// whole when all of the store is gone, its chunks have the digests of before,
// and a copy of a checkpoint that shares nothing is identical to the last byte.
func TestCopyTo(t *testing.T) {
	from := onDisk(t)
	s := newSeries(t, vfs.Default, 2, 2<<20, 1<<20+5, 3<<20)
	s.root = from
	s.now["layers.1.r0"] = s.now["layers.1.r1"][:1<<20+5]
	first := s.save(t, "step-1")
	s.change("layers.2.r0", 7, 1)
	second := s.save(t, "step-2")
	if len(links(second, 0))+len(links(second, 1)) == 0 {
		t.Fatal("nothing is shared")
	}
	to := elsewhere(t)
	for _, c := range []saved{first, second} {
		read := int64(0)
		copied, err := from.CopyTo(t.Context(), c.ref, c.receipt.Manifest, to, func(n int64) { read += n })
		if err != nil {
			t.Fatal(err)
		}
		if rewritten := copied.Original != copied.Receipt.Manifest; rewritten != (c.ref == second.ref) {
			t.Errorf("%s: rewritten is %v", c.ref, rewritten)
		}
		if copied.Original != c.receipt.Manifest || copied.Receipt.Event != c.receipt.Event || copied.Receipt.Sequence != c.receipt.Sequence || copied.Bytes != read {
			t.Errorf("%s: %+v, of %+v; %d bytes read", c.ref, copied, c.receipt, read)
		}
		c.receipt = copied.Receipt
		c.whole(t, to)
	}
	alone(t, to.Dir())
	for _, file := range []string{"r00000.safetensors", "r00000.idx", "r00001.safetensors", checkpoint.ReceiptFile} {
		a, err := os.ReadFile(filepath.Join(from.Dir(), first.ref.String(), file))
		b, err2 := os.ReadFile(filepath.Join(to.Dir(), first.ref.String(), file))
		if err != nil || err2 != nil || !bytes.Equal(a, b) {
			t.Errorf("%s is not the same: %v, %v", file, err, err2)
		}
	}
	if err := os.RemoveAll(from.Dir()); err != nil {
		t.Fatal(err)
	}
	var left []string
	if err := to.Examine(t.Context(), func(x data.Examined) error {
		left = append(left, x.Ref.Checkpoint)
		return x.Err
	}); err != nil || !slices.Equal(left, []string{"step-1", "step-2"}) {
		t.Errorf("the copies are %v: %v", left, err)
	}
}

// TestCopyOfDamage copies nothing that it cannot vouch for.
func TestCopyOfDamage(t *testing.T) {
	m := small()
	fs := memory(t)
	root := open(t, fs)
	receipt := m.save(t, root)
	raw := content(t, fs, "r00000.safetensors")
	raw[len(raw)-1] ^= 1
	put(t, fs, "r00000.safetensors", raw)
	to := elsewhere(t)
	var corrupt *data.CorruptError
	if _, err := root.CopyTo(t.Context(), ref, receipt.Manifest, to, nil); !errors.As(err, &corrupt) || corrupt.FQN == "" {
		t.Errorf("error %v", err)
	}
	if list, _, err := to.Checkpoints(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
	if _, err := root.CopyTo(t.Context(), ref, checkpoint.Sum([]byte("another")), elsewhere(t), nil); err == nil {
		t.Error("a manifest that is not there is copied")
	}
}
