package staging

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// What no trainer uses is freed, and nothing else.
func TestFreeStaging(t *testing.T) {
	shared := t.TempDir()
	open := func(run string) *Arenas {
		a, err := Open(shared, storeA, run, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.Take(t.Context(), 0, "save", 5000); err != nil {
			t.Fatal(err)
		}
		return a
	}
	alive, dead := open("alive"), open("dead")
	if err := dead.lock.Close(); err != nil { // as the kernel does
		t.Fatal(err)
	}
	other := filepath.Join(shared, "ckptstore-notes")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	freed, bytes, err := Free(shared)
	if err != nil || !slices.Equal(freed, []string{dead.dir}) || bytes != 8192 {
		t.Errorf("freed %q, %d bytes, %v", freed, bytes, err)
	}
	for dir, there := range map[string]bool{alive.dir: true, other: true, dead.dir: false} {
		if _, err := os.Stat(dir); (err == nil) != there {
			t.Errorf("%s: %v", dir, err)
		}
	}
	if freed, bytes, err := Free(shared); len(freed) != 0 || bytes != 0 || err != nil {
		t.Errorf("again: freed %q, %d bytes, %v", freed, bytes, err)
	}
	if err := alive.Close(); err != nil {
		t.Error(err)
	}
	if freed, _, err := Free(filepath.Join(shared, "absent")); len(freed) != 0 || err != nil {
		t.Errorf("where nothing is: %q, %v", freed, err)
	}
}
