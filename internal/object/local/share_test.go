package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/object"
)

// TestDirectoryOfAGroup makes directories and files that the group can write, and
// again those that a member has left who was killed over them.
func TestDirectoryOfAGroup(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("run this test as root: it gives directories to another user")
	}
	const gid, other, member = 30000, 20001, 20002
	const dirs = fs.ModeDir | fs.ModeSetgid | 0o770
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	top, err := os.MkdirTemp("/tmp", "ckd") //nolint:usetesting // other users cannot enter t.TempDir
	must(err)
	t.Cleanup(func() { _ = os.RemoveAll(top) })
	must(os.Chmod(top, 0o755))
	dir := filepath.Join(top, "data")
	must(os.Mkdir(dir, 0o700))
	must(os.Chown(dir, -1, gid))
	must(os.Chmod(dir, 0o770|fs.ModeSetgid))
	for name, mode := range map[string]fs.FileMode{"closed": 0o700, "open": 0o755, "used": 0o755} {
		must(os.Mkdir(filepath.Join(dir, name), 0o700))
		must(os.Chmod(filepath.Join(dir, name), mode|fs.ModeSetgid))
		must(os.Chown(filepath.Join(dir, name), other, gid))
	}
	must(os.WriteFile(filepath.Join(dir, "used", "file"), nil, 0o600))

	// A member makes them, on a thread with that user's rights.
	ended := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread goes with its rights
		groups := []uint32{gid}
		for _, call := range [][4]uintptr{
			{unix.SYS_SETGROUPS, 1, uintptr(unsafe.Pointer(&groups[0]))},
			{unix.SYS_SETRESGID, member, member, member},
			{unix.SYS_SETRESUID, member, member, member},
		} {
			if _, _, errno := unix.RawSyscall(call[0], call[1], call[2], call[3]); errno != 0 {
				ended <- errno
				return
			}
		}
		ended <- save(t.Context(), New(vfs.Default, dir))
	}()
	must(<-ended)
	for name, want := range map[string]fs.FileMode{
		"closed": dirs, "closed/a": dirs, "open": dirs, "open/a": dirs, "open/a/b": dirs, "open/a/b/file": 0o660, "used": fs.ModeDir | fs.ModeSetgid | 0o755,
	} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode() != want {
			t.Errorf("%s has %v, want %v: %v", name, info.Mode(), want, err)
		}
	}
}

// save makes a file in each of the directories.
func save(ctx context.Context, d *Dir) error {
	for _, name := range []string{"closed/a", "open/a/b"} {
		if err := d.MakeDir(ctx, name); err != nil {
			return err
		}
		u, err := d.Create(ctx, name+"/file", 5, object.Replace)
		if err != nil {
			return err
		}
		if _, err := u.WriteAt([]byte("bytes"), 0); err != nil {
			return err
		}
		if err := u.Commit(ctx); err != nil {
			return err
		}
	}
	if err := d.MakeDir(ctx, "used/a"); !errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("in a directory that another member keeps closed: %w", err)
	}
	return nil
}
