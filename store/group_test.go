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
)

// TestMembersOnly has users connect to a socket that its path would let them all
// reach.
func TestMembersOnly(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Fatal("run this test as root: it connects as other users")
	}
	const gid = 30000
	dir, err := os.MkdirTemp("/tmp", "ckm") //nolint:usetesting // other users cannot enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := errors.Join(os.Chmod(dir, 0o755), os.Chmod(path, 0o777)); err != nil {
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
		said, err := connectAs(c.uid, c.gid, c.groups, path)
		if err != nil || (said == "in") != c.in {
			t.Errorf("user %d, group %d, groups %v: %q, %v", c.uid, c.gid, c.groups, said, err)
		}
	}
}

// connectAs reads from a socket with the rights of another user, which one thread
// takes, and ends.
func connectAs(uid, gid int, groups []uint32, path string) (said string, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread goes with its rights
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
		fd, serr := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err = serr; err != nil {
			return
		}
		defer func() { _ = unix.Close(fd) }()
		limit := unix.NsecToTimeval(int64(10 * time.Second))
		buffer := make([]byte, 16)
		n := 0
		if err = errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit), unix.Connect(fd, &unix.SockaddrUnix{Name: path})); err == nil {
			n, err = unix.Read(fd, buffer)
		}
		said = string(buffer[:max(0, n)])
	}()
	<-done
	return said, err
}

// TestSharedAgain keeps the group of a store that is recovered, and refuses a store
// whose directories are another group's.
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
	// What the kernel has not let a killed member give away is named.
	closed := filepath.Join(dir, "log", "jetstream")
	if err := os.Chmod(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := reachable(dir); err != nil {
		t.Errorf("to its user: %v", err)
	}

	long := filepath.Join(shortDir(t, ""), strings.Repeat("x", 90))
	if _, err := InitWith(t.Context(), long, InitOptions{Shared: true, Group: "30000"}); !errors.Is(err, ErrLocation) {
		t.Errorf("in a directory whose sockets have no room: %v", err)
	}
}
