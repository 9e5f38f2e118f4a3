package store

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/beneath"
)

// TestSecondIncident: each incident of a damaged log gets its own copy, which the error names;
// opening the same log again makes none.
func TestSecondIncident(t *testing.T) {
	t.Parallel()
	whole, _ := spacious(t)
	dir := filepath.Join(t.TempDir(), "store")
	if err := os.CopyFS(dir, os.DirFS(whole)); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{damagedName, damagedName + "-2", damagedName + "-3"} {
		if err := os.RemoveAll(filepath.Join(dir, "log")); err != nil {
			t.Fatal(err)
		}
		if err := os.CopyFS(filepath.Join(dir, "log"), os.DirFS(filepath.Join(whole, "log"))); err != nil {
			t.Fatal(err)
		}
		blocks := blocksInOrder(t, dir)
		last := blocks[len(blocks)-1]
		flip(t, last, 1500+100*i)
		remove(t, filepath.Dir(last), "index.db")
		was := read(t, last)
		for range 3 {
			refused(t, Options{Location: dir}, ErrDamaged, filepath.Join(dir, name)+";")
		}
		if kept := filepath.Join(dir, name, "msgs", filepath.Base(last)); read(t, kept) != was {
			t.Errorf("%s is not the block as it was", kept)
		}
		if got := len(incidents(dir)); got != i+1 {
			t.Errorf("%d copies after %d incidents", got, i+1)
		}
	}
}

// TestLargeLog: of a log larger than the limit, the last block is copied, and the error reports
// the rest.
func TestLargeLog(t *testing.T) {
	t.Parallel()
	whole, _ := spacious(t)
	blocks := blocksInOrder(t, whole)
	files, err := sizeOf(filepath.Dir(filepath.Dir(blocks[0])))
	if err != nil {
		t.Fatal(err)
	}
	s := &Store{space: roomy()}
	for limit, want := range map[int64]int{0: 1, files - 1: len(blocks) - 1, maxCopy: len(blocks)} {
		if canClone(t, whole) {
			want = len(blocks)
		}
		had, err := keepLog(s, whole, true, limit)
		kept, gerr := filepath.Glob(filepath.Join(whole, copyName, "msgs", "*.blk"))
		if had != "" || gerr != nil || len(kept) != want {
			t.Errorf("up to %d bytes: %q, %d of %d blocks copied, want %d (%v)", limit, had, len(kept), len(blocks), want, gerr)
		}
		last := filepath.Base(blocks[len(blocks)-1])
		if read(t, filepath.Join(whole, copyName, "msgs", last)) != read(t, blocks[len(blocks)-1]) {
			t.Error("the last block is not copied")
		}
		if lacks := want < len(blocks); (err != nil) != lacks || lacks && !strings.Contains(err.Error(), "1.blk") {
			t.Errorf("up to %d bytes: %v", limit, err)
		}
		why := keepCopy(whole, had, err, ErrDamaged)
		parts := []string{filepath.Join(whole, damagedName)}
		if want < len(blocks) {
			parts = append(parts, "for a copy of ", "1.blk")
		}
		wrong(t, why, ErrDamaged, parts...)
		remove(t, whole, damagedName)
	}
}

func canClone(t *testing.T, dir string) bool {
	t.Helper()
	path := filepath.Join(dir, "store.json")
	c := copying{root: beneath.At(dir)}
	can, err := c.clone(path, path+".clone")
	if err != nil {
		t.Fatal(err)
	}
	remove(t, dir, "store.json.clone")
	return can
}

// sizeOf returns the total size of the files below dir.
func sizeOf(dir string) (size int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			size += info.Size()
		}
		return err
	})
	return size, err
}
