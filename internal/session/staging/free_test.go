package staging

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestFreeStaging frees what no trainer of a store uses, and nothing of another store.
func TestFreeStaging(t *testing.T) {
	shared := t.TempDir()
	open := func(store, run string) *Arenas {
		a, err := Open(shared, store, run, 0, nil, quiet)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.Take(t.Context(), 0, "save", 5000); err != nil {
			t.Fatal(err)
		}
		return a
	}
	alive, dead, foreign := open(storeA, "alive"), open(storeA, "dead"), open(storeB, "dead")
	for _, a := range []*Arenas{dead, foreign} {
		if err := a.dir.Close(); err != nil { // as the kernel does
			t.Fatal(err)
		}
	}
	other := filepath.Join(filepath.Dir(alive.dir.Path()), "ckptstore-notes")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	freed, bytes, err := Free(shared, storeA)
	if err != nil || !slices.Equal(freed, []string{dead.dir.Path()}) || bytes != 8192 {
		t.Errorf("freed %q, %d bytes, %v", freed, bytes, err)
	}
	for dir, there := range map[string]bool{alive.dir.Path(): true, other: true, foreign.dir.Path(): true, dead.dir.Path(): false} {
		if _, err := os.Stat(dir); (err == nil) != there {
			t.Errorf("%s: %v", dir, err)
		}
	}
	if freed, bytes, err := Free(shared, storeA); len(freed) != 0 || bytes != 0 || err != nil {
		t.Errorf("again: freed %q, %d bytes, %v", freed, bytes, err)
	}
	if freed, bytes, err := FreeAll(shared); err != nil || !slices.Equal(freed, []string{foreign.dir.Path()}) || bytes != 8192 {
		t.Errorf("of every store: freed %q, %d bytes, %v", freed, bytes, err)
	}
	if err := alive.Close(); err != nil {
		t.Error(err)
	}
	if freed, _, err := Free(filepath.Join(shared, "absent"), storeA); len(freed) != 0 || err != nil {
		t.Errorf("where nothing is: %q, %v", freed, err)
	}
}

// TestLeftByOtherNodes checks that a starting trainer logs the memory that a killed one of the same run left on this
// machine as another node, and leaves it in place.
func TestLeftByOtherNodes(t *testing.T) {
	shared := t.TempDir()
	open := func(run string, node int) (a *Arenas, said string) {
		t.Helper()
		var log bytes.Buffer
		a, err := Open(shared, storeA, run, node, nil, slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil {
			t.Fatal(err)
		}
		return a, log.String()
	}
	alive, _ := open("run", 1)
	dead, _ := open("run", 2)
	others, _ := open("run-n2", 0)
	for _, a := range []*Arenas{dead, others} {
		if _, err := a.Take(t.Context(), 0, "peer", 5000); err != nil {
			t.Fatal(err)
		}
		if err := a.dir.Close(); err != nil { // as the kernel does
			t.Fatal(err)
		}
	}
	a, said := open("run", 3)
	for _, want := range []string{"level=WARN", "gc --staging", "bytes=8192", "[" + dead.dir.Path() + "]"} {
		if !strings.Contains(said, want) {
			t.Errorf("%s is not in: %s", want, said)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if a, said = open("run", 2); said != "" {
		t.Errorf("the next trainer of that node: %s", said)
	}
	for _, a := range []*Arenas{a, alive} {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}
