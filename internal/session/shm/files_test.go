package shm_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/internal/session/shm"
)

func newFiles(t *testing.T) *shm.Files {
	t.Helper()
	f := &shm.Files{Shared: t.TempDir(), Kind: "tests", Log: slog.New(slog.DiscardHandler)}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func made(t *testing.T, f *shm.Files) *os.File {
	t.Helper()
	file, err := f.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	return file
}

func TestFiles(t *testing.T) {
	f := newFiles(t)
	a, b := made(t, f), made(t, f)
	if filepath.Dir(a.Name()) != filepath.Dir(b.Name()) || a.Name() == b.Name() || !shm.Linked(a) || !shm.Linked(b) {
		t.Errorf("files %s and %s", a.Name(), b.Name())
	}
	if err := f.Discard(a); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(a.Name()); !os.IsNotExist(err) {
		t.Errorf("a file that was discarded: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(filepath.Dir(filepath.Dir(a.Name()))); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if err := f.Discard(b); err != nil {
		t.Errorf("a file that went with its directory: %v", err)
	}
	if file, err := f.New(); err == nil {
		t.Errorf("%s was made after the end", file.Name())
	}
}

// A directory that another process removed is created again and owned by this
// server.
func TestFilesRemovedFromOutside(t *testing.T) {
	for what, in := range map[string]string{"all of it": "", "its lock": "lock"} {
		t.Run(what, func(t *testing.T) {
			f := newFiles(t)
			old := made(t, f)
			if err := os.RemoveAll(filepath.Join(filepath.Dir(old.Name()), in)); err != nil {
				t.Fatal(err)
			}
			if there := in != ""; shm.Linked(old) != there {
				t.Errorf("%s counts as there: %t", old.Name(), !there)
			}
			file := made(t, f)
			if !shm.Linked(file) {
				t.Errorf("%s counts as gone", file.Name())
			}
			if freed, _, err := shm.Free(f.Shared, "ckptstore-tests-*"); len(freed) > 0 || err != nil {
				t.Errorf("the new directory has no owner: %v, %v", freed, err)
			}
		})
	}
}
