package staging

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var quiet = slog.New(slog.DiscardHandler)

// Two stores that were created in the same minute have the same beginning.
const (
	storeA = "01990000-0000-7000-8000-00000000000a"
	storeB = "01990000-0000-7000-8000-00000000000b"
)

func TestArenasAreOfOneRun(t *testing.T) {
	shared := t.TempDir()
	open := func(store, run string) *Arenas {
		a, err := Open(shared, store, run, 0, nil, quiet)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	all := []*Arenas{
		open(storeA, "run"), open(storeB, "run"), open(storeA, "other [run]*"),
		open(storeA, strings.Repeat("ü", 80)), open(storeA, strings.Repeat("ü", 79)),
	}
	if _, err := Open(shared, storeA, "run", 0, nil, quiet); err == nil || !strings.Contains(err.Error(), "another trainer of this run is alive") {
		t.Errorf("a second trainer: %v", err)
	}
	for _, a := range all {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
	if left, err := filepath.Glob(filepath.Join(shared, "*", "*")); err != nil || len(left) > 0 {
		t.Errorf("left in shared memory: %v, %v", left, err)
	}
}

// Only the files of a dead trainer are freed.
func TestArenasAreTakenOver(t *testing.T) {
	shared := t.TempDir()
	dead, err := Open(shared, storeA, "run [1]*", 0, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	slot, err := dead.Take(t.Context(), 3, "save", 5000)
	if err != nil {
		t.Fatal(err)
	}
	if len(slot.data) != 8192 {
		t.Errorf("a slot for 5000 bytes has %d", len(slot.data))
	}
	other := filepath.Join(filepath.Dir(filepath.Dir(slot.path)), "someone else's")
	if err := os.WriteFile(other, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// As the kernel does when a process is killed.
	if err := dead.dir.Close(); err != nil {
		t.Fatal(err)
	}
	next, err := Open(shared, storeA, "run [1]*", 0, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	if err := next.freeLeft(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(slot.path); !os.IsNotExist(err) {
		t.Errorf("the dead trainer's slot: %v", err)
	}
	if _, err := os.Stat(other); err != nil {
		t.Error(err)
	}
	if err := next.Close(); err != nil {
		t.Error(err)
	}
}

// A returned arena grows, keeps its memory and never shrinks; its last name is
// gone. A dropped arena is never reused.
func TestArenaGrows(t *testing.T) {
	a, err := Open(t.TempDir(), storeA, "run", 0, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}()
	var before *Arena
	last, same := "", false
	for _, size := range []int64{0, 1, 4096, 100_000, 10} {
		f, err := a.Take(t.Context(), 0, "load", size)
		if err != nil {
			t.Fatal(err)
		}
		if int64(len(f.data)) < size {
			t.Errorf("%d bytes, want %d", len(f.data), size)
		}
		if before != nil && before == f != same {
			t.Errorf("the arena for %d bytes is the last one: %v, want %v", size, before == f, same)
		}
		if _, err := os.Stat(last); last != "" && !os.IsNotExist(err) {
			t.Errorf("the name of the last use: %v", err)
		}
		for i := range f.data {
			f.data[i] = 1
		}
		before, last = f, f.path
		if same = size != 4096; same {
			a.Give(f)
		} else if err := a.Drop(f); err != nil {
			t.Error(err)
		}
	}
	if _, err := a.Take(t.Context(), 0, "load", 1<<60); err == nil || !strings.Contains(err.Error(), "make room in shared memory") {
		t.Errorf("a slot larger than the machine: %v", err)
	}
}
