package client

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// A worker copies only into a regular file that its own user alone can access: no
// links, and no file that another user put there or can read.
func TestPlantedArena(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes files of another user: run it as root")
	}
	for what, plant := range map[string]func(path string) error{
		"its own":        func(string) error { return nil },
		"a link":         func(path string) error { return errors.Join(os.Rename(path, path+".2"), os.Symlink(path+".2", path)) },
		"a hard link":    func(path string) error { return os.Link(path, path+".2") },
		"open to all":    func(path string) error { return os.Chmod(path, 0o666) },
		"another user's": func(path string) error { return os.Chown(path, 20002, 20002) },
		"a pipe":         func(path string) error { return errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)) },
	} {
		path := filepath.Join(t.TempDir(), "arena")
		if err := errors.Join(os.WriteFile(path, nil, 0o600), plant(path)); err != nil {
			t.Fatal(err)
		}
		f, err := openArena(path)
		if (err == nil) != (what == "its own") {
			t.Errorf("%s: %v", what, err)
		}
		_ = f.Close() // of nothing, if it was refused
	}
}
