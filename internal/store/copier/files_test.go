package copier

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestCopyOfChangingFiles: a copy equals its original, or the copy fails.
func TestCopyOfChangingFiles(t *testing.T) {
	t.Parallel()
	from, to := t.TempDir(), t.TempDir()
	c := New(from, to, false, nil)
	copied := func(name string) error {
		return c.File(t.Context(), filepath.Join(from, name), filepath.Join(to, name))
	}
	for i, text := range []string{"first", "first", "second, longer"} {
		if err := os.WriteFile(filepath.Join(from, "a"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := copied("a"); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(filepath.Join(to, "a")); err != nil || string(got) != text {
			t.Errorf("copy %d is %q, want %q: %v", i, got, text, err)
		}
	}
	if err := copied("b"); !errors.Is(err, ErrVanished) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a file that is gone: %v", err)
	}
	if err := syscall.Mkfifo(filepath.Join(from, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := copied("pipe"); err == nil || !strings.Contains(err.Error(), "is not a regular file") {
		t.Errorf("of a pipe: %v", err)
	}
}
