package process

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// ReapTimeout bounds how long [Hunt.Kill] keeps killing.
const ReapTimeout = 30 * time.Second

// Kill kills the processes that the hunt finds, and waits until each is gone. It
// continues until Look finds none. Zombies count as gone.
func (h *Hunt) Kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ReapTimeout)
	defer cancel()
	stopped := map[int]uint64{} // start by PID
	for {
		found, err := h.Look()
		if err != nil || len(found) == 0 {
			return err
		}
		// A process that dies leaves its children to another parent, so the hunt
		// could miss them. So stop all processes before killing any: a stopped
		// process starts no more children.
		fresh := false
		for _, p := range found {
			if stopped[p.pid] == p.start {
				continue
			}
			stopped[p.pid], fresh = p.start, true
			if err := h.send(p, unix.SIGSTOP, nil); err != nil {
				return err
			}
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("kill %d processes of the job, the first is %d: %w", len(found), found[0].pid, err)
		}
		if fresh {
			continue
		}
		if err := h.killAll(ctx, found); err != nil {
			return err
		}
	}
}

// killAll kills all of the processes and waits until they are gone.
func (h *Hunt) killAll(ctx context.Context, found []Entry) (err error) {
	for _, p := range found {
		if err := h.send(p, unix.SIGKILL, nil); err != nil {
			return err
		}
	}
	for _, p := range found {
		err := h.send(p, 0, func(fd int) error { return died(ctx, fd) })
		if err != nil {
			return err
		}
	}
	return nil
}

// send sends a signal to one process by its pidfd, so that it never hits a reused
// PID, and then calls then with the pidfd. It skips a process that is gone, and
// spares another user's.
func (h *Hunt) send(p Entry, sig unix.Signal, then func(pidfd int) error) error {
	fail := func(err error) error { return fmt.Errorf("kill process %d of the job: %w", p.pid, err) }
	fd, err := unix.PidfdOpen(p.pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fail(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if now, err := readEntry(p.pid); err != nil || now.start != p.start {
		return nil // the PID was reused between the look and the open
	}
	switch err := unix.PidfdSendSignal(fd, sig, nil, 0); {
	case errors.Is(err, unix.ESRCH):
		return nil
	case errors.Is(err, unix.EPERM):
		h.spare(p)
		return nil
	case err != nil:
		return fail(err)
	}
	if then != nil {
		if err := then(fd); err != nil {
			return fail(err)
		}
	}
	return nil
}

// died waits until the process of a pidfd is gone.
func died(ctx context.Context, fd int) error {
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
