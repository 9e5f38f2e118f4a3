package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/data"
)

// TestLockRepair: a second repair is refused with an error that names the first, whichever process
// owns the store; after the first has ended, it may run.
func TestLockRepair(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner, other := open(t, dir), open(t, dir)
	if !owner.Owns() || other.Owns() {
		t.Fatal("the first does not own the store")
	}
	for _, of := range [][2]*Store{{owner, other}, {other, owner}} {
		unlock, err := of[0].LockRepair()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range of {
			_, err = s.LockRepair()
			if !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), fmt.Sprintf("process %d on ", os.Getpid())) || !strings.Contains(err.Error(), "wait until it ends") {
				t.Errorf("a second repair: %v", err)
			}
		}
		if err := unlock(); err != nil {
			t.Fatal(err)
		}
	}
	if left := read(t, filepath.Join(dir, repairName)); left != "" {
		t.Errorf("the lock has %q when no process holds it", left)
	}
}

// TestLockRepairNowhere: data that is not in a directory cannot be locked.
func TestLockRepairNowhere(t *testing.T) {
	t.Parallel()
	gone := filepath.Join(t.TempDir(), "gone")
	root, err := data.Open(vfs.Default, filepath.Join(gone, "data"))
	if err != nil {
		t.Fatal(err)
	}
	s := &Store{top: gone, Data: root}
	if _, err := s.LockRepair(); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), s.Data.Dir()) {
		t.Errorf("%v", err)
	}
}
