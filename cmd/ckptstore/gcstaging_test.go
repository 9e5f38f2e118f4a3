package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/store"
	"github.com/ckptstore/ckptstore/worker/shm"
)

// TestFreeStagingOfOneStore: gc --staging leaves what dead trainers of another
// store have staged.
func TestFreeStagingOfOneStore(t *testing.T) {
	shared, _ := shm.Dir()
	var stores, dirs []string
	for range 2 {
		dir := filepath.Join(t.TempDir(), "store")
		id, err := store.Init(t.Context(), dir, "")
		if err != nil {
			t.Fatal(err)
		}
		left := filepath.Join(shared, "ckptstore-"+id[len(id)-12:]+"-run-n0")
		if err := os.Mkdir(left, 0o700); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(left) })
		if err := os.WriteFile(filepath.Join(left, "r00000.save.1"), make([]byte, 4096), 0o600); err != nil {
			t.Fatal(err)
		}
		stores, dirs = append(stores, dir), append(dirs, left)
	}
	var out, said strings.Builder
	if code := run(t.Context(), []string{"gc", "--staging", "--json", "--store", stores[0]}, &out, &said); code != exitOK {
		t.Fatalf("exit code %d: %s", code, said.String())
	}
	var got freed
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Directories) != 1 || got.Directories[0] != dirs[0] || got.Bytes != 4096 {
		t.Errorf("freed %+v, want %s alone", got, dirs[0])
	}
	if _, err := os.Stat(dirs[0]); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the store's own directory is left: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dirs[1], "r00000.save.1")); err != nil {
		t.Errorf("the other store's save is gone: %v", err)
	}
	if code := run(t.Context(), []string{"gc", "--staging", "--all-stores", "--store", stores[0]}, &out, &said); code != exitUsage {
		t.Errorf("--all-stores with --store: exit code %d", code)
	}
}
