package testbed

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// initName is the argument zero by which this program knows that it is a node's pid 1.
const initName = "testbed-node"

// scratch is where a node keeps its own files: a tmpfs, mounted before all others.
const scratch = "/run"

// setUp is what pid 1 does before a node is ready.
type setUp struct {
	Hostname string
	Boot     string            // the node's boot ID
	Shm      int64             // size of /dev/shm
	Private  []string          // directories whose changes stay in the node
	Empty    []string          // directories that begin empty
	Binds    map[string]string // directories of the host by their path in the node
	Files    map[string]string // files of the host by their path in the node
	User     int
}

// mainCalled records that the program calls [Main], so that pid 1 can be this program.
var mainCalled bool

// Main must be called first in TestMain, or in main. In a process that is a node's
// pid 1 it does not return. In any other process it returns at once.
func Main() {
	mainCalled = true
	if os.Args[0] != initName {
		return
	}
	// The set-up comes by descriptor 3, the answer goes to descriptor 4: an error, or
	// nothing.
	in, out := os.NewFile(3, "set-up"), os.NewFile(4, "answer")
	var s setUp
	err := json.NewDecoder(in).Decode(&s)
	if err == nil {
		err = s.apply()
	}
	if err != nil {
		fmt.Fprint(out, err)
		os.Exit(1)
	}
	in.Close()
	out.Close()
	reap()
}

// reap waits for the node's orphans until it is killed. Only SIGKILL ends it: pid 1 of
// a namespace receives no other signal that it does not handle.
func reap() {
	died := make(chan os.Signal, 1)
	signal.Notify(died, unix.SIGCHLD)
	for {
		for {
			if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 && !errors.Is(err, unix.EINTR) {
				break
			}
		}
		<-died
	}
}

// apply gives the calling process's namespaces the content of a node.
func (s *setUp) apply() error {
	if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Directories of the host are cloned first, because the mounts below may hide them.
	type clone struct {
		at string
		fd int
	}
	var clones []clone
	for _, of := range []map[string]string{s.Binds, s.Files} {
		for at, source := range of {
			fd, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
			if err != nil {
				return fmt.Errorf("bind %s: %w", source, err)
			}
			clones = append(clones, clone{at, fd})
		}
	}
	if err := s.mount(); err != nil {
		return err
	}
	// In the order of their paths: a directory before those below it.
	slices.SortFunc(clones, func(a, b clone) int { return strings.Compare(a.at, b.at) })
	for _, c := range clones {
		if _, dir := s.Binds[c.at]; dir {
			if err := os.MkdirAll(c.at, 0o755); err != nil {
				return fmt.Errorf("bind at %s: %w; use a path below /srv or /tmp", c.at, err)
			}
		}
		if err := unix.MoveMount(c.fd, "", unix.AT_FDCWD, c.at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("bind at %s: %w", c.at, err)
		}
		_ = unix.Close(c.fd)
	}
	return nil
}

// mount mounts what every node has.
func (s *setUp) mount() error {
	tmpfs := func(at, options string) error {
		if err := unix.Mount("tmpfs", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
			return fmt.Errorf("mount a tmpfs on %s: %w", at, err)
		}
		return nil
	}
	if err := tmpfs(scratch, "mode=755"); err != nil {
		return err
	}
	if err := tmpfs("/dev/shm", fmt.Sprintf("mode=1777,size=%d", s.Shm)); err != nil {
		return err
	}
	for _, dir := range s.Empty {
		if err := tmpfs(dir, "mode=755"); err != nil {
			return err
		}
	}
	for i, dir := range s.Private {
		if err := overlay(dir, filepath.Join(scratch, "private", fmt.Sprint(i))); err != nil {
			return err
		}
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	runtime := runtimeDirectory(s.User)
	if err := os.MkdirAll(runtime, 0o700); err != nil {
		return err
	}
	if err := os.Chown(runtime, s.User, -1); err != nil {
		return err
	}
	boot := filepath.Join(scratch, "boot_id")
	if err := os.WriteFile(boot, []byte(s.Boot+"\n"), 0o444); err != nil {
		return err
	}
	if err := unix.Mount(boot, "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("give the node a boot ID: %w", err)
	}
	return nil
}

// overlay makes a directory private: the node sees the host's files there, and the host
// does not see what the node changes.
func overlay(dir, upper string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	files, work := filepath.Join(upper, "files"), filepath.Join(upper, "work")
	for _, d := range []string{files, work} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(files, info.Mode()); err != nil {
		return err
	}
	if err := unix.Mount("overlay", dir, "overlay", 0, "lowerdir="+dir+",upperdir="+files+",workdir="+work); err != nil {
		return fmt.Errorf("make %s private with an overlay: %w", dir, err)
	}
	return nil
}

// runtimeDirectory is the XDG_RUNTIME_DIR of a user in a node.
func runtimeDirectory(uid int) string { return fmt.Sprintf("/run/user/%d", uid) }
