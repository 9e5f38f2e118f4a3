package testbed

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// freezeLimit bounds how long all processes of a node may take to stop. A process that
// waits for a disk in the kernel stops only when the disk answers.
const freezeLimit = 10 * time.Second

// freezer stops and continues all processes of a node except pid 1.
type freezer interface {
	// place has a process started in the freezer's reach.
	place(attr *syscall.SysProcAttr)
	// freeze returns when no process runs.
	freeze() error
	thaw() error
	// close is called when no process of the node is left.
	close() error
}

var (
	_ freezer = (*cgroup)(nil)
	_ freezer = (*stopper)(nil)
)

// cgroup freezes by the freezer of cgroup v2. Processes cannot see it: no parent
// receives a signal, and SIGCONT does not end it.
type cgroup struct {
	dir string
	fd  *os.File
}

// cgroups counts the groups of this process, for their names.
var cgroups atomic.Int64

// newCgroup makes a group below that of this process. It returns an error if the
// machine has no cgroup v2 that can be written.
func newCgroup() (*cgroup, error) {
	parent, err := ownCgroup()
	if err != nil {
		return nil, err
	}
	sweep(parent)
	g := &cgroup{dir: filepath.Join(parent, fmt.Sprintf("testbed-%d-%d", os.Getpid(), cgroups.Add(1)))}
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		return nil, err
	}
	g.fd, err = os.Open(g.dir)
	if err == nil {
		_, err = os.Stat(filepath.Join(g.dir, "cgroup.freeze"))
	}
	if err != nil {
		return nil, errors.Join(err, os.Remove(g.dir))
	}
	return g, nil
}

// sweep removes groups of processes that were killed. A group with a process stays.
func sweep(parent string) {
	dirs, _ := filepath.Glob(filepath.Join(parent, "testbed-*-*"))
	for _, dir := range dirs {
		pid := strings.Split(filepath.Base(dir), "-")[1]
		if _, err := os.Stat(filepath.Join("/proc", pid)); errors.Is(err, os.ErrNotExist) {
			_ = os.Remove(dir)
		}
	}
}

// ownCgroup returns the directory of this process's group in the mounted hierarchy.
func ownCgroup() (string, error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(mounts)) {
		at, fs, _ := strings.Cut(line, " - ")
		if fields := strings.Fields(at); strings.HasPrefix(fs, "cgroup2 ") && len(fields) > 4 {
			_, group, _ := strings.Cut("\n"+string(own), "\n0::")
			group, _, _ = strings.Cut(group, "\n")
			if below, err := filepath.Rel(fields[3], group); err == nil {
				return filepath.Join(fields[4], below), nil
			}
		}
	}
	return "", errors.New("no cgroup v2 is mounted")
}

func (g *cgroup) place(attr *syscall.SysProcAttr) {
	attr.UseCgroupFD, attr.CgroupFD = true, int(g.fd.Fd())
}

func (g *cgroup) freeze() error {
	if err := g.set("1"); err != nil {
		return err
	}
	events := filepath.Join(g.dir, "cgroup.events")
	return poll(freezeLimit, "the processes did not freeze", func() (bool, error) {
		text, err := os.ReadFile(events)
		return bytes.Contains(text, []byte("frozen 1")), err
	})
}

func (g *cgroup) thaw() error { return g.set("0") }

func (g *cgroup) set(to string) error {
	return os.WriteFile(filepath.Join(g.dir, "cgroup.freeze"), []byte(to), 0)
}

func (g *cgroup) close() error {
	g.fd.Close()
	return poll(freezeLimit, "a process is left in the node's cgroup", func() (bool, error) {
		err := os.Remove(g.dir)
		if errors.Is(err, unix.EBUSY) {
			return false, nil
		}
		return err == nil, err
	})
}

// stopper freezes by SIGSTOP, where there is no cgroup v2. A parent in the node can
// see that by WUNTRACED.
type stopper struct {
	list    func() ([]Process, error)
	stopped []Process
}

func (s *stopper) place(*syscall.SysProcAttr) {}

// freeze sends SIGSTOP until a list shows nothing but stopped processes: a process may
// start another one between the list and its own stop.
func (s *stopper) freeze() error {
	return poll(freezeLimit, "the processes did not stop", func() (bool, error) {
		still := true
		all, err := s.list()
		for _, p := range all {
			sent := slices.ContainsFunc(s.stopped, p.same)
			if p.NodePID == 1 || stopped(p.PID, sent) {
				continue
			}
			still = false
			if err := unix.Kill(p.PID, unix.SIGSTOP); err != nil && !errors.Is(err, unix.ESRCH) {
				return false, err
			}
			if !sent {
				s.stopped = append(s.stopped, p)
			}
		}
		return still, err
	})
}

// stopped reports whether no thread of a process runs code of its own, now or before a
// SIGCONT. sent states that SIGSTOP was sent: then a thread that waits in the kernel
// cannot leave it. Such a thread may wait for a child of vfork, which is stopped.
func stopped(pid int, sent bool) bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil || len(threads) == 0 {
		return true // it has ended
	}
	for _, dir := range threads {
		_, fields, err := readStat(dir)
		if err != nil {
			continue
		}
		if state := fields[0]; !strings.Contains("TtZX", state) && (!sent || state != "D") {
			return false
		}
	}
	return true
}

// thaw continues what freeze has stopped: not a process that was paused before.
func (s *stopper) thaw() error {
	var errs []error
	for _, p := range s.stopped {
		if err := unix.Kill(p.PID, unix.SIGCONT); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, err)
		}
	}
	s.stopped = nil
	return errors.Join(errs...)
}

func (s *stopper) close() error { return nil }

// poll calls done until it returns true or an error. It returns an error after limit.
func poll(limit time.Duration, otherwise string, done func() (bool, error)) error {
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			return fmt.Errorf("%s within %v", otherwise, limit)
		}
	}
}
