package trainer

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/internal/launch"
)

// A job over several nodes that serves no copies of a log that has them is refused at once.
func TestJobWithoutCopies(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	check := func(copies, nodes int, refused bool) {
		t.Helper()
		o := runOptions{store: dir}
		o.logReplicas = copies
		if err := o.unreplicated(placement{max: nodes}); errors.Is(err, launch.ErrConfig) != refused {
			t.Errorf("%d copies, %d nodes: %v", copies, nodes, err)
		}
	}
	check(1, 3, false)
	at := filepath.Join(dir, "join", "log")
	if err := os.MkdirAll(at, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(at, "secret.json"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	check(1, 3, true)
	check(3, 3, false)
	check(1, 1, false)
}
