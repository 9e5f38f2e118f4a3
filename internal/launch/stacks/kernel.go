package stacks

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Bounds of what is read from a process.
const (
	maxThreads  = 256
	maxChildren = 16
	maxFile     = 64 << 10
)

// Kernel returns the kernel's view of a process: state, wait channel and kernel
// stack of each thread. If the process only waits for its children, it includes
// them.
func Kernel(pid int) (string, error) {
	var b strings.Builder
	if err := describe(&b, pid); err != nil {
		return b.String(), fmt.Errorf("state of process %d: %w", pid, err)
	}
	for _, child := range children(pid) {
		if err := describe(&b, child); err != nil {
			fmt.Fprintf(&b, "process %d, a child: %v\n", child, err)
		}
	}
	return b.String(), nil
}

func describe(b *strings.Builder, pid int) error {
	dir := fmt.Sprintf("/proc/%d", pid)
	status, err := read(filepath.Join(dir, "status"))
	if err != nil {
		return err
	}
	fmt.Fprintf(b, "process %d (%s): state %s; %s threads\n", pid, field(status, "Name"), field(status, "State"), field(status, "Threads"))
	tasks, err := os.ReadDir(filepath.Join(dir, "task"))
	if err != nil {
		return err
	}
	for i, task := range tasks {
		if i == maxThreads {
			fmt.Fprintf(b, "  %d more threads are left out\n", len(tasks)-i)
			break
		}
		thread(b, filepath.Join(dir, "task", task.Name()), task.Name())
	}
	return nil
}

func thread(b *strings.Builder, dir, id string) {
	status, err := read(filepath.Join(dir, "status"))
	if err != nil {
		fmt.Fprintf(b, "  thread %s: %v\n", id, err)
		return
	}
	fmt.Fprintf(b, "  thread %s (%s): state %s", id, field(status, "Name"), field(status, "State"))
	if at, err := read(filepath.Join(dir, "wchan")); err == nil && at != "" && at != "0" {
		fmt.Fprintf(b, ", waits in %s", at)
	}
	stack, err := read(filepath.Join(dir, "stack"))
	switch {
	case errors.Is(err, fs.ErrPermission):
		fmt.Fprintln(b, " (its kernel stack is for root alone)")
	case err != nil:
		fmt.Fprintf(b, " (no kernel stack: %v)\n", err)
	default:
		fmt.Fprintln(b)
		for line := range strings.Lines(stack) {
			fmt.Fprintf(b, "    %s\n", strings.TrimSpace(strings.TrimPrefix(line, "[<0>]")))
		}
	}
}

// children lists the live children of a process.
func children(pid int) []int {
	var all []int
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) // the pattern is well-formed
	for _, task := range tasks {
		list, err := read(task)
		if err != nil {
			continue // the thread has ended, or the kernel keeps no such list
		}
		for text := range strings.FieldsSeq(list) {
			if child, err := strconv.Atoi(text); err == nil && len(all) < maxChildren {
				all = append(all, child)
			}
		}
	}
	slices.Sort(all)
	return all
}

// field returns a line of a status file, without its name.
func field(status, name string) string {
	for line := range strings.Lines(status) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

// read reads a file of /proc, whose size is not known in advance.
func read(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", gone(err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile))
	return string(text), gone(err)
}

func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("it has ended: %w", err)
	}
	return err
}
