// Package peer says which process is at the other end of a unix socket, and when
// it ends.
//
// A server tells it with [Context], as its ConnContext; a handler asks with [Of].
// The kernel remembers who has connected: a child that goes on with the connection
// of its parent counts as the parent.
package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

type key struct{}

// Context is for [net/http.Server].ConnContext.
func Context(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, key{}, c)
}

// ErrUnknown says that nothing is known of the process at the other end: it is in
// a namespace that this one does not see, or the server was not told to ask.
var ErrUnknown = errors.New("the process at the other end of the socket is not known")

// Of is the ID of the process at the other end of a request's connection.
func Of(ctx context.Context) (pid int, err error) {
	pid, _, err = Who(ctx)
	return pid, err
}

// Who is the process at the other end of a request's connection, and its user.
func Who(ctx context.Context) (pid, uid int, err error) {
	c, ok := ctx.Value(key{}).(*net.UnixConn)
	if !ok {
		return 0, 0, ErrUnknown
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0, fmt.Errorf("ask who is at the other end of a socket: %w", err)
	}
	var cred *unix.Ucred
	var asked error
	err = raw.Control(func(fd uintptr) { cred, asked = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, asked); err != nil {
		return 0, 0, fmt.Errorf("ask who is at the other end of a socket: %w", err)
	}
	if cred.Pid <= 0 {
		return 0, 0, ErrUnknown
	}
	return int(cred.Pid), int(cred.Uid), nil
}

// HungUp reports whether the other end of a request's connection has closed it, and
// so waits for no answer. The context of a request ends later than that, once its
// server has come round to read the connection.
func HungUp(ctx context.Context) bool {
	c, ok := ctx.Value(key{}).(*net.UnixConn)
	if !ok {
		return false
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	hungUp := false
	err = raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd)}}
		n, err := unix.Poll(fds, 0)
		hungUp = err == nil && n > 0 && fds[0].Revents&unix.POLLHUP != 0
	})
	return hungUp || err != nil // it is closed at this end
}

// Watch calls gone, from a goroutine of its own, when the process has ended. stop
// ends the watching, and waits for a gone that runs. The error says that there is
// no such process any more, or that this system cannot watch one.
func Watch(pid int, gone func()) (stop func(), err error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("watch process %d: %w", pid, err)
	}
	// Without this, each process that is watched would cost a thread.
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("watch process %d: %w", pid, err), unix.Close(fd))
	}
	file := os.NewFile(uintptr(fd), "pidfd")
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch process %d: %w", pid, err), file.Close())
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if raw.Read(exited) == nil {
			gone()
		}
	}()
	return func() {
		_ = file.Close() // which ends the wait
		<-ended
	}, nil
}

// exited reports whether the process of a pidfd has ended.
func exited(pidfd uintptr) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}
