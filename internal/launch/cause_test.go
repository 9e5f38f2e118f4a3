package launch

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Whatever a worker leaves instead of its error file is handled at once.
func TestErrorFileOfAnyKind(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		make func(path string) error
		says string
		size int
	}{
		"pipe":      {func(p string) error { return unix.Mkfifo(p, 0o600) }, "not a regular file", 0},
		"directory": {func(p string) error { return os.Mkdir(p, 0o700) }, "not a regular file", 0},
		"link":      {func(p string) error { return os.Symlink("/dev/zero", p) }, "is a link", 0},
		"large": {func(p string) error {
			return os.WriteFile(p, bytes.Repeat([]byte("x"), maxErrorFile+1), 0o600)
		}, "has more than 16777216 bytes", maxErrorFile},
		"file": {func(p string) error { return os.WriteFile(p, []byte("a bug"), 0o600) }, "", 5},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "error.json")
			if err := c.make(path); err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				data, err := readErrorFile(path)
				if (err != nil) != (c.says != "") || err != nil && !strings.Contains(err.Error(), c.says) || len(data) != c.size {
					t.Errorf("%d bytes, error %v; want %d and %q", len(data), err, c.size, c.says)
				}
			}()
			select {
			case <-done:
			case <-time.After(5 * time.Second):
				t.Fatal("reading it does not end")
			}
		})
	}
}
