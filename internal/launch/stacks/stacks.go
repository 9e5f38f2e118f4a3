// Package stacks finds where a process hangs.
//
//	target   a process, and perhaps a function to request its stacks
//	by RPC   the process's own account: what package client of a Go worker serves
//	py-spy   an account of a Python process from outside, where py-spy is installed
//	signal   SIGUSR1, for a process that handles it, as after Python's
//	         faulthandler.register(signal.SIGUSR1): it prints to its own output
//	kernel   state, wait channel and kernel stack of each thread, from /proc
//
// They are tried in this order. A signal alone yields no text, so the kernel's
// account comes with it. SIGUSR1 would kill a process without a handler for it,
// so such a process never gets it. No other signal is ever sent.
package stacks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// How an account was obtained.
const (
	ByRPC    = "rpc"
	ByPySpy  = "py-spy"
	BySignal = "SIGUSR1"
	ByKernel = "kernel"
)

// Bounds of an account.
const (
	MaxText     = 256 << 10       // bytes
	wayLimit    = 5 * time.Second // of each way
	handlerTime = 500 * time.Millisecond
)

// Target is a process. It must not have been waited for, so that its number is
// not reused.
type Target struct {
	PID int
	// Ask requests the stacks from the process itself; nil if it serves none.
	Ask func(context.Context) (text string, err error)
}

// Collect finds where the process hangs. how is one of the ways above; the text
// explains why each earlier way failed. It is cut at [MaxText]. An error means
// that not even the kernel knows the process.
func Collect(ctx context.Context, t Target) (text, how string, err error) {
	var said strings.Builder
	try := func(way string, ask func(context.Context) (string, error)) bool {
		limited, cancel := context.WithTimeout(ctx, wayLimit)
		defer cancel()
		got, err := ask(limited)
		if err == nil && strings.TrimSpace(got) == "" {
			err = errors.New("it returned nothing")
		}
		if err != nil {
			fmt.Fprintf(&said, "not by %s: %v\n", way, err)
			return false
		}
		said.WriteString(got)
		return true
	}
	if t.Ask != nil && try(ByRPC, t.Ask) {
		return cut(said.String()), ByRPC, nil
	}
	if path, err := exec.LookPath("py-spy"); err == nil {
		if try(ByPySpy, func(ctx context.Context) (string, error) { return pySpy(ctx, path, t.PID) }) {
			return cut(said.String()), ByPySpy, nil
		}
	}
	how = ByKernel
	switch err := askBySignal(t.PID); {
	case err == nil:
		how = BySignal
		fmt.Fprintf(&said, "process %d handles SIGUSR1 and was sent it: what it prints is in its own output\n", t.PID)
		wait(ctx, handlerTime)
	case !errors.Is(err, errNoHandler):
		fmt.Fprintf(&said, "not by %s: %v\n", BySignal, err)
	}
	kernel, err := Kernel(t.PID)
	if err != nil {
		return cut(said.String()), how, err
	}
	said.WriteString(kernel)
	return cut(said.String()), how, nil
}

func cut(text string) string {
	if len(text) <= MaxText {
		return text
	}
	return text[:MaxText] + fmt.Sprintf("\n(%d bytes more were cut off)\n", len(text)-MaxText)
}

// bounded keeps the beginning of what is written to it.
type bounded struct{ bytes.Buffer }

// Write implements io.Writer.
func (b *bounded) Write(p []byte) (int, error) {
	if room := MaxText + 1 - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(len(p), room)])
	}
	return len(p), nil
}

func pySpy(ctx context.Context, path string, pid int) (string, error) {
	var out, problem bounded
	c := exec.CommandContext(ctx, path, "dump", "--pid", strconv.Itoa(pid))
	c.Stdout, c.Stderr = &out, &problem
	c.WaitDelay = time.Second
	if err := c.Run(); err != nil {
		return "", fmt.Errorf("%w: %.500s", err, strings.TrimSpace(problem.String()))
	}
	return out.String(), nil
}

var errNoHandler = errors.New("it has no handler for SIGUSR1, which would kill it")

// askBySignal sends SIGUSR1 to a process that handles it. It holds the process by
// a descriptor, so that a later process with the same number does not get the
// signal.
func askBySignal(pid int) error {
	p, err := os.FindProcess(pid)
	if err != nil {
		return err
	}
	defer func() { _ = p.Release() }() // it holds only a descriptor
	handles, err := Handles(pid, syscall.SIGUSR1)
	if err != nil {
		return err
	}
	if !handles {
		return errNoHandler
	}
	return p.Signal(syscall.SIGUSR1)
}

// Handles reports whether a process has a handler for a signal.
func Handles(pid int, sig syscall.Signal) (bool, error) {
	status, err := read(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false, err
	}
	caught, err := strconv.ParseUint(field(status, "SigCgt"), 16, 64)
	if err != nil {
		return false, fmt.Errorf("signals that process %d handles: %w", pid, err)
	}
	return caught&(1<<(sig-1)) != 0, nil
}

func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
