package staging

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// WhenBusy is what a save does if it finds no free staging slot.
type WhenBusy string

// A save is skipped or fails on all its participants: the first participant that
// asks decides, and reserves a slot for each.
const (
	BusyWait WhenBusy = "wait" // until a slot is free, within the save's timeout
	BusySkip WhenBusy = "skip" // there is no such checkpoint, and the training continues
	BusyFail WhenBusy = "fail" // the save is an error
)

// Memory bounds the memory of all staging slots of a node. The zero value is
// [DefaultMemory], but allows every rank its first slot.
type Memory struct {
	Bytes   int64 // the bound in bytes, unless 0
	Percent int   // of the memory limit, and of the free shared memory
}

// DefaultMemory leaves the training more than half of the memory.
var DefaultMemory = Memory{Percent: 40}

// ParseMemory parses a percentage such as "40%", or a number of bytes with a unit
// of 1024 or 1000: "8GiB", "8G", "8GB".
func ParseMemory(text string) (Memory, error) {
	bad := fmt.Errorf("%q is neither a percentage from 1%% to 100%% nor a size such as 8GiB", text)
	if number, ok := strings.CutSuffix(text, "%"); ok {
		n, err := strconv.Atoi(number)
		if err != nil || n < 1 || n > 100 {
			return Memory{}, bad
		}
		return Memory{Percent: n}, nil
	}
	at := strings.IndexFunc(text, func(r rune) bool { return (r < '0' || r > '9') && r != '.' })
	if at < 0 {
		at = len(text)
	}
	n, err := strconv.ParseFloat(text[:at], 64)
	unit, ok := map[string]float64{
		"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40,
		"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
	}[strings.ToUpper(strings.TrimSpace(text[at:]))]
	if bytes := n * unit; err == nil && ok && bytes >= 1 && bytes < math.MaxInt64 {
		return Memory{Bytes: int64(bytes)}, nil
	}
	return Memory{}, bad
}

// resolve returns the bound in bytes, given that the slots already have held
// bytes of shared memory.
func (m Memory) resolve(dir string, held int64) (int64, error) {
	if m.Bytes > 0 {
		return m.Bytes, nil
	}
	if m.Percent == 0 {
		m = DefaultMemory
	}
	limit, err := memoryLimit("/proc/self/cgroup", "/sys/fs/cgroup")
	if err != nil {
		return 0, fmt.Errorf("how much memory there is for staging: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("how much room there is in %s: %w", dir, err)
	}
	limit = min(limit, int64(st.Bavail)*st.Bsize+held)
	return int64(float64(limit) * float64(m.Percent) / 100), nil
}

// memoryLimit returns the memory of this machine in bytes, or the part of it that
// the control groups of this process allow.
func memoryLimit(groups, root string) (int64, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, err
	}
	limit := int64(info.Totalram) * int64(info.Unit)
	lines, err := os.ReadFile(groups)
	if errors.Is(err, fs.ErrNotExist) {
		return limit, nil
	}
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(lines)) {
		// hierarchy:controllers:path; version 2 has no controllers.
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) < 3 {
			continue
		}
		dir, file := root, "memory.max"
		if part[1] != "" {
			if part[1] != "memory" {
				continue
			}
			dir, file = filepath.Join(root, "memory"), "memory.limit_in_bytes"
		}
		// A group is bound by its parents too. In a container, the path may be
		// that of the host: then the root is the container's own group.
		for path := part[2]; ; path = filepath.Dir(path) {
			text, err := os.ReadFile(filepath.Join(dir, path, file))
			if n, perr := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && perr == nil && n > 0 {
				limit = min(limit, n)
			}
			if path == "/" || path == "." {
				break
			}
		}
	}
	return limit, nil
}
