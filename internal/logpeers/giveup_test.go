package logpeers

import (
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// A peer that waits for the others in vain leaves its copy: unlocked and unclaimed.
func TestGivesUpItsCopy(t *testing.T) {
	t.Parallel()
	c := config(t.TempDir(), 0)
	c.Wait = 300 * time.Millisecond
	if _, _, err := Join(t.Context(), c); !slices.Contains(problem.Kinds(err), problem.Unavailable) {
		t.Fatalf("error %v", err)
	}
	f, err := os.Open(CopyDir(c.Store, 0))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB), f.Close()); err != nil {
		t.Errorf("lock of the copy: %v", err)
	}
}
