package foreign

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// failAt fails the k-th write operation, and all later ones too if forever is
// set. Just before, it calls at.
func failAt(on vfs.FS, k int, forever bool, at func()) (vfs.FS, *int) {
	n := new(int)
	return errorfs.Wrap(on, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() != errorfs.OpIsWrite {
			return nil
		}
		if *n++; *n == k {
			at()
		}
		if *n == k || *n > k && forever {
			return syscall.EIO
		}
		return nil
	})), n
}

// whole opens what is at dir, which is nothing, or one of these checkpoints.
func whole(t *testing.T, on vfs.FS, dir string, oneOf ...data.Reader) (there bool) {
	t.Helper()
	names, err := on.List(dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(names) == 0 {
		return false
	}
	got, err := Open(t.Context(), on, dir)
	if err != nil {
		t.Fatalf("something is there that is no checkpoint: %v", err)
	}
	for _, want := range oneOf {
		if len(want.(*data.Foreign).Manifest().Layout.Tensors) == len(got.Manifest().Layout.Tensors) {
			same(t, got, want, got.Format() == data.DCP)
		}
	}
	return true
}

// TestExportCrash crashes and fails an export at every write operation until
// none is left, into a new directory and in place of another export.
func TestExportCrash(t *testing.T) {
	from := openForeign(t, nested(t).dir)
	old := openForeign(t, strings.Replace(nested(t).dir, "single_nested", "mesh2x2", 1))
	const dir = "/new/out/export"
	for _, format := range []data.Format{data.DCP, data.HuggingFace} {
		for _, replace := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, replaces %v", format, replace), func(t *testing.T) {
				ops := 0
				for k := 1; ; k++ {
					ops = k
					mem := vfs.NewCrashableMem()
					if replace {
						if _, err := Export(t.Context(), old, mem, dir, ExportOptions{Format: data.DCP}); err != nil {
							t.Fatal(err)
						}
					}
					var crashed []*vfs.MemFS
					faulty, n := failAt(mem, k, k%2 == 0, func() {
						for _, percent := range []int{0, 50, 100} {
							crashed = append(crashed, mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(uint64(k), 1))}))
						}
					})
					_, err := Export(t.Context(), from, faulty, dir, ExportOptions{Format: format, Replace: replace, MaxShard: 100})
					for _, c := range crashed {
						if there := whole(t, c, dir, from, old); replace && !there {
							// Then both are next to it, under the names of leftovers.
							beside, err := c.List(path.Dir(dir))
							if err != nil || len(beside) < 2 || !whole(t, c, path.Join(path.Dir(dir), beside[len(beside)-1]), old) {
								t.Fatalf("operation %d: what was to be replaced is gone: %v, %v", k, beside, err)
							}
						}
					}
					there := whole(t, mem, dir, from, old)
					if err == nil && !there {
						t.Fatalf("operation %d: success, and nothing is there", k)
					}
					if left, _ := mem.List(path.Dir(dir)); err != nil && k%2 == 1 && len(left) > 1 && !strings.Contains(err.Error(), "the export is whole") {
						t.Fatalf("operation %d: %v leaves %v", k, err, left)
					}
					if *n < k {
						if err != nil {
							t.Fatal(err)
						}
						// A reported export is durable.
						if !whole(t, mem.CrashClone(vfs.CrashCloneCfg{}), dir, from) {
							t.Fatal("the export is not durable")
						}
						break
					}
				}
				if ops < 10 {
					t.Errorf("only %d operations", ops)
				}
			})
		}
	}
}
