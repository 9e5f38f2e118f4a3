package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/store"
)

// TestFreeStagingOfOneStore: gc --staging frees the memory of the store's dead trainers,
// including those of former versions, and keeps that of other stores.
func TestFreeStagingOfOneStore(t *testing.T) {
	shared, _ := shm.Dir()
	own := filepath.Join(shared, fmt.Sprintf("ckptstore-memory-%d", os.Geteuid()))
	var stores, ids []string
	for range 2 {
		dir := filepath.Join(t.TempDir(), "store")
		id, err := store.Init(t.Context(), dir, "")
		if err != nil {
			t.Fatal(err)
		}
		stores, ids = append(stores, dir), append(ids, id[len(id)-12:])
	}
	mine := []string{filepath.Join(own, "ckptstore-"+ids[0]+"-run-n0"), filepath.Join(shared, "ckptstore-"+ids[0]+"-old-n0")}
	others := filepath.Join(own, "ckptstore-"+ids[1]+"-run-n0")
	for _, left := range append(mine, others) {
		if err := os.MkdirAll(left, 0o700); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(left) })
		if err := os.WriteFile(filepath.Join(left, "r00000.save.1"), make([]byte, 4096), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var out, said strings.Builder
	if code := run(t.Context(), []string{"gc", "--staging", "--json", "--store", stores[0]}, &out, &said); code != exitOK {
		t.Fatalf("exit code %d: %s", code, said.String())
	}
	var got freed
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got.Directories, mine) || got.Bytes != 2*4096 {
		t.Errorf("freed %+v, want %q", got, mine)
	}
	for _, dir := range mine {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the store's own directory is left: %v", err)
		}
	}
	if _, err := os.Stat(filepath.Join(others, "r00000.save.1")); err != nil {
		t.Errorf("the other store's save is gone: %v", err)
	}
	if code := run(t.Context(), []string{"gc", "--staging", "--all-stores", "--store", stores[0]}, &out, &said); code != 2 {
		t.Errorf("--all-stores with --store: exit code %d", code)
	}
}
