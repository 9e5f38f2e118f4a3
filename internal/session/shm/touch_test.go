package shm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestTouch checks that the memory of a file is allocated from an offset on, and
// that cancellation stops it. Touching ahead leaves no thread with a low priority
// behind.
func TestTouch(t *testing.T) {
	const size, from = 40 << 20, 8 << 20
	dir, _ := Dir()
	for name, touch := range map[string]func(context.Context, *os.File, []byte, int) error{"now": Touch, "ahead": TouchAhead} {
		path := filepath.Join(dir, "touch-test-"+name+filepath.Base(t.TempDir()))
		file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = errors.Join(os.Remove(path), file.Close()) }()
		if err := file.Truncate(size); err != nil {
			t.Fatal(err)
		}
		data, err := unix.Mmap(int(file.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Munmap(data) }()
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := touch(ended, file, data, from); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: not wanted: %v", name, err)
		}
		if err := touch(t.Context(), file, data, from); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var stat unix.Stat_t
		if err := unix.Fstat(int(file.Fd()), &stat); err != nil || stat.Blocks*512 < size-from {
			t.Errorf("%s: %d bytes are there, want %d: %v", name, stat.Blocks*512, size-from, err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	look := time.NewTicker(time.Millisecond) // a thread ends after its goroutine
	defer look.Stop()
	for left := quietThreads(t); left > 0; left = quietThreads(t) {
		select {
		case <-look.C:
		case <-ctx.Done():
			t.Fatalf("%d threads have a low priority", left)
		}
	}
}

// TestUnhurried checks that work has a thread of low priority until it is needed, and continues in the
// caller's.
func TestUnhurried(t *testing.T) {
	hurry := make(chan struct{})
	var steps []bool
	err := Unhurried(hurry, func(until <-chan struct{}) error {
		for len(steps) < 4 && !Closed(until) {
			now, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
			if err != nil {
				return err
			}
			if steps = append(steps, now == 20-quiet); len(steps) == 2 { // the raw system call's value
				close(hurry)
			}
		}
		return nil
	})
	if err != nil || !slices.Equal(steps, []bool{true, true, false, false}) {
		t.Errorf("steps in a thread of low priority: %v, %v", steps, err)
	}
	failed := errors.New("failed")
	for _, hurry := range []chan struct{}{nil, make(chan struct{})} {
		times := 0
		err := Unhurried(hurry, func(<-chan struct{}) error {
			times++
			return failed
		})
		if !errors.Is(err, failed) || times != 1 {
			t.Errorf("%d calls after a failure: %v", times, err)
		}
	}
}

// quietThreads counts the threads of this process with a lower priority than it
// began with.
func quietThreads(t *testing.T) (n int) {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		id, err := strconv.Atoi(task.Name())
		if err != nil || id == os.Getpid() {
			continue // the first thread does not end with a goroutine
		}
		if now, err := unix.Getpriority(unix.PRIO_PROCESS, id); err == nil && now == 20-quiet { // the raw system call's value
			n++
		}
	}
	return n
}
