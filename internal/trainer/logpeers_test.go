package trainer

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

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

// A node that waits in vain for node 0 to create the store ends with the code of a job that can be started
// again.
func TestStoreAwaitedInVain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		o := runOptions{}
		o.endpointWait = 10 * time.Minute
		err := inVain(o.awaitFormed(t.Context(), dir))
		if err == nil || exitCode(err) != exitPreempted {
			t.Errorf("%v: exit code %d", err, exitCode(err))
		}
		ended, end := context.WithCancelCause(t.Context())
		end(errors.New("the job was ended"))
		if err := inVain(o.awaitFormed(ended, dir)); err == nil || exitCode(err) == exitPreempted {
			t.Errorf("%v: exit code %d", err, exitCode(err))
		}
	})
}
