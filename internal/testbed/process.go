package testbed

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Process is a process of a node, as /proc of the host showed it.
type Process struct {
	PID     int    // on the host
	NodePID int    // in the node
	Parent  int    // on the host
	Comm    string // name of the program, at most 15 bytes
	State   string // one letter: R, S, D, T, Z …
	// Started is the time of the start in clock ticks of 10 ms since the host's boot. All
	// nodes have that clock in common, whatever their own clocks show. PID and Started
	// together identify a process for ever.
	Started uint64
	Environ []string // with which it was executed; none for a process that has ended
}

// Getenv returns a variable of the environment that the process was executed with.
func (p Process) Getenv(name string) string {
	for _, e := range p.Environ {
		if value, ok := strings.CutPrefix(e, name+"="); ok {
			return value
		}
	}
	return ""
}

func (p Process) same(other Process) bool { return p.PID == other.PID && p.Started == other.Started }

// processes lists the processes whose pid namespace is the given one. A process that
// ends meanwhile may be missing.
func processes(namespace string) (all []Process, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		dir := filepath.Join("/proc", e.Name())
		if at, err := os.Readlink(filepath.Join(dir, "ns", "pid")); err != nil || at != namespace {
			continue
		}
		p, err := readProcess(dir, pid)
		switch {
		case err == nil:
			all = append(all, p)
		case !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ESRCH):
			return nil, fmt.Errorf("list processes: %w", err)
		}
	}
	return all, nil
}

// readProcess reads one directory of /proc.
func readProcess(dir string, pid int) (p Process, err error) {
	name, fields, err := readStat(dir)
	if err != nil {
		return p, err
	}
	p = Process{PID: pid, Comm: name, State: fields[0]}
	if p.Parent, err = strconv.Atoi(fields[1]); err != nil {
		return p, fmt.Errorf("%s/stat: %w", dir, err)
	}
	if p.Started, err = strconv.ParseUint(fields[19], 10, 64); err != nil {
		return p, fmt.Errorf("%s/stat: %w", dir, err)
	}
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return p, err
	}
	for line := range strings.Lines(string(status)) {
		if pids, ok := strings.CutPrefix(line, "NSpid:"); ok {
			fields := strings.Fields(pids)
			if p.NodePID, err = strconv.Atoi(fields[len(fields)-1]); err != nil {
				return p, fmt.Errorf("%s/status: %w", dir, err)
			}
		}
	}
	environ, err := os.ReadFile(filepath.Join(dir, "environ"))
	if err != nil {
		return p, err
	}
	if text := strings.TrimSuffix(string(environ), "\x00"); text != "" {
		p.Environ = strings.Split(text, "\x00")
	}
	return p, nil
}

// readStat reads the stat file of a process or a thread: its name, and the fields after
// that; the first is the state.
func readStat(dir string) (name string, fields []string, err error) {
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return "", nil, err
	}
	// PID (COMM) STATE PARENT …; the name may contain spaces and parentheses.
	text := string(stat)
	left, right := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if right > left {
		fields = strings.Fields(text[right+1:])
	}
	if len(fields) < 20 {
		return "", nil, fmt.Errorf("%s/stat: %q is not understood", dir, text)
	}
	return text[left+1 : right], fields, nil
}
