package testbed

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// thread is an operating system thread that is inside a node's namespaces. Namespaces
// belong to threads, so everything that the test's process does in a node runs on one:
// start a process, mount, open a device or a socket.
//
// The thread also starts the node's pid 1, with a parent death signal. When the test's
// process ends in any way, its threads end, and the kernel kills the node.
type thread struct {
	work chan func()
	done chan struct{}
}

// newThread starts a thread in the namespaces of this process.
func newThread() *thread {
	t := &thread{work: make(chan func()), done: make(chan struct{})}
	go onThread(func() {
		defer close(t.done)
		for fn := range t.work {
			fn()
		}
	})
	return t
}

// do runs fn on the thread and returns its error.
func (t *thread) do(fn func() error) (err error) {
	ran := make(chan struct{})
	t.work <- func() {
		defer close(ran)
		err = fn()
	}
	<-ran
	return err
}

// end ends the thread. No do may be running or follow.
func (t *thread) end() {
	close(t.work)
	<-t.done
}

// onThread runs fn on a thread of its own and returns when fn has. The thread ends
// with fn, because its namespaces may have changed. The process's main thread is never
// used: /proc/self would show other namespaces afterwards.
func onThread(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // without an unlock, the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			onThread(fn) // the main thread stays locked, so another one is taken
			runtime.UnlockOSThread()
			return
		}
		fn()
	}()
	<-done
}

// enter moves the calling thread into namespaces of a process. Processes that it
// starts from then on are in its pid namespace.
func enter(pid int, kinds ...string) error {
	flags := map[string]int{"mnt": unix.CLONE_NEWNS, "net": unix.CLONE_NEWNET, "uts": unix.CLONE_NEWUTS, "ipc": unix.CLONE_NEWIPC, "pid": unix.CLONE_NEWPID}
	// Threads of one process share their root and working directory; a thread that
	// does cannot enter a mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("enter namespaces: unshare: %w", err)
	}
	for _, kind := range kinds {
		file, err := os.Open(filepath.Join("/proc", strconv.Itoa(pid), "ns", kind))
		if err != nil {
			return fmt.Errorf("enter namespaces: %w", err)
		}
		err = unix.Setns(int(file.Fd()), flags[kind])
		file.Close()
		if err != nil {
			return fmt.Errorf("enter the %s namespace of process %d: %w", kind, pid, err)
		}
	}
	return nil
}
