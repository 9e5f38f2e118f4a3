package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestLockRepair: a second repair is refused, and told of the first, whichever
// of the two owns the store; after the first it is let in.
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
		t.Errorf("the lock says %q when nobody has it", left)
	}
}

// TestLockRepairNowhere: data that is in no directory cannot be locked.
func TestLockRepairNowhere(t *testing.T) {
	t.Parallel()
	s := &Store{DataDir: filepath.Join(t.TempDir(), "gone", "data")}
	if _, err := s.LockRepair(); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), s.DataDir) {
		t.Errorf("%v", err)
	}
}
