package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/ckptstore/ckptstore/worker/client"
	"golang.org/x/sys/unix"
)

// reapTimeout bounds how long [Reap] keeps killing.
const reapTimeout = 30 * time.Second

// Reap kills every process of this user whose environment carries the marker
// of a job, wherever it is in the process tree, until a pass finds none. It
// waits for each to be gone. Zombies count as gone.
func Reap(ctx context.Context, job string) error {
	marker := []byte(client.EnvJob + "=" + job)
	ctx, cancel := context.WithTimeout(ctx, reapTimeout)
	defer cancel()
	for {
		pids, err := marked(marker)
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			if err := killWait(ctx, pid, marker); err != nil {
				return fmt.Errorf("kill process %d of job %s: %w", pid, job, err)
			}
		}
	}
}

// marked lists the live processes whose environment has marker.
func marked(marker []byte) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err == nil && pid != os.Getpid() && carries(pid, marker) && !zombie(pid) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// carries reports whether the environment of pid has marker. A process that
// is gone, a zombie, or another user's does not.
func carries(pid int, marker []byte) bool {
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return false
	}
	for v := range bytes.SplitSeq(env, []byte{0}) {
		if bytes.Equal(v, marker) {
			return true
		}
	}
	return false
}

// zombie reports whether pid has ended and only waits for its parent.
func zombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	// The name in parentheses may hold anything; the state follows it.
	_, after, ok := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" "))
	return ok && len(after) > 0 && (after[0] == 'Z' || after[0] == 'X')
}

// killWait kills one process by its pidfd, so that a reused PID is never hit,
// and waits until it is gone.
func killWait(ctx context.Context, pid int, marker []byte) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if !carries(pid, marker) {
		return nil // the PID was reused between the listing and the open
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	for {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("it does not die: %w", err)
		}
		ready := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(ready, 100)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if n > 0 {
			return nil
		}
	}
}
