package store

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/share"
)

// TestMembersOnly: several users connect to a socket whose path is open to all of them.
func TestMembersOnly(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Fatal("run this test as root: it connects as other users")
	}
	const gid = 30000
	path := filepath.Join(forAll(t), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if err := os.Chmod(path, 0o777); err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			conn, err := (members{l, gid}).Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, "in")
			_ = conn.Close()
		}
	}()
	for _, c := range []struct {
		uid, gid int
		groups   []uint32
		in       bool
	}{
		{20001, 20001, []uint32{5, gid, 7}, true},
		{20001, gid, nil, true},
		{20003, 20003, []uint32{gid + 1}, false},
		{20003, 20003, nil, false},
		{0, 0, nil, true},
	} {
		var said string
		err := as(c.uid, c.gid, c.groups, func() (err error) {
			said, err = heard(path)
			return err
		})
		if err != nil || (said == "in") != c.in {
			t.Errorf("user %d, group %d, groups %v: %q, %v", c.uid, c.gid, c.groups, said, err)
		}
	}
}

// as runs do with another user's rights, on a thread that ends afterwards.
func as(uid, gid int, groups []uint32, do func() error) (err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, so that the thread ends with its rights
		var first unsafe.Pointer
		if len(groups) > 0 {
			first = unsafe.Pointer(&groups[0])
		}
		for _, call := range [][4]uintptr{
			{unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(first)},
			{unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)},
			{unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)},
		} {
			if _, _, errno := unix.RawSyscall(call[0], call[1], call[2], call[3]); errno != 0 {
				err = errno
				return
			}
		}
		err = do()
	}()
	<-done
	return err
}

// heard returns what a client receives from a socket.
func heard(path string) (said string, err error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(fd) }()
	limit := unix.NsecToTimeval(int64(10 * time.Second))
	buffer := make([]byte, 16)
	n := 0
	if err = errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit), unix.Connect(fd, &unix.SockaddrUnix{Name: path})); err == nil {
		// The runtime's own signals interrupt a read with a deadline.
		for err = unix.EINTR; errors.Is(err, unix.EINTR); {
			n, err = unix.Read(fd, buffer)
		}
	}
	return string(buffer[:max(0, n)]), err
}

// TestKilledBeforeItWasShared: a member was killed before it shared a file of the log. The next
// member's error names the file, and leaves it as it is.
func TestKilledBeforeItWasShared(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Fatal("run this test as root: it opens a store as other users")
	}
	dir := filepath.Join(forAll(t), "store")
	if _, err := InitWith(t.Context(), dir, InitOptions{Shared: true, Group: "30000"}); err != nil {
		t.Fatal(err)
	}
	next := func() error { return as(20002, 20002, []uint32{30000}, func() error { return reachable(dir) }) }
	if err := next(); err != nil {
		t.Errorf("to a member: %v", err)
	}
	blocks, err := filepath.Glob(filepath.Join(dir, "log", "jetstream", "*", "streams", "*", "msgs", "*.blk"))
	if err != nil || len(blocks) == 0 {
		t.Fatal(blocks, err)
	}
	if err := errors.Join(os.Chown(blocks[0], 20001, -1), os.Chmod(blocks[0], 0o600)); err != nil {
		t.Fatal(err)
	}
	wrong(t, next(), os.ErrPermission, blocks[0], "user 20001", "ckptstore ls --store "+dir)
	// That user opens the store, and shareFiles does this first.
	if err := as(20001, 20001, []uint32{30000}, func() error { return share.Tree(filepath.Join(dir, "log"), nil) }); err != nil {
		t.Fatal(err)
	}
	if err := next(); err != nil {
		t.Errorf("after its user has given it to the group: %v", err)
	}
}

// forAll returns a directory that every user can enter.
func forAll(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "ckm") //nolint:usetesting // other users cannot enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // so that they can
		t.Fatal(err)
	}
	return dir
}

// TestSharedAgain: a recovered store keeps its group, and a store whose directories have another
// group is refused.
func TestSharedAgain(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("run this test as root: it gives files to groups")
	}
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	dir := filepath.Join(shortDir(t, ""), "store")
	if _, err := InitWith(t.Context(), dir, InitOptions{Shared: true, Group: "30000"}); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	committed(t, s, "run", 1)
	shut(t, s)
	data := filepath.Join(dir, "data")
	if err := os.Chown(data, -1, 30001); err != nil {
		t.Fatal(err)
	}
	refused(t, Options{Location: dir}, ErrUntrusted, data, "group 30001")
	if err := os.Chown(data, -1, 30000); err != nil {
		t.Fatal(err)
	}
	remove(t, dir, "log")
	if _, err := Recover(t.Context(), RecoverOptions{Location: dir}); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	if gid, shared := s.group(); !shared || gid != 30000 {
		t.Errorf("recovered, it is of group %d, %v", gid, shared)
	}
	shut(t, s)
	long := filepath.Join(shortDir(t, ""), strings.Repeat("x", 90))
	if _, err := InitWith(t.Context(), long, InitOptions{Shared: true, Group: "30000"}); !errors.Is(err, ErrLocation) {
		t.Errorf("in a directory whose sockets have no room: %v", err)
	}
}
