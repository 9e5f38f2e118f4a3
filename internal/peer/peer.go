// Package peer identifies the process at the other end of a unix socket and reports
// when it ends.
//
// A server passes [Context] as its ConnContext; its handlers call [Of]. The kernel
// records the process that connected: a child that inherits the connection counts as
// its parent.
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

// Context stores a connection for [Of] and [Who]. Use it as [net/http.Server].ConnContext.
func Context(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, key{}, c)
}

// ErrUnknown reports that the process at the other end is not known: it is in a
// namespace that this process does not see, or the server does not use [Context].
var ErrUnknown = errors.New("the process at the other end of the socket is not known")

// Of returns the ID of the process at the other end of a request's connection.
func Of(ctx context.Context) (pid int, err error) {
	pid, _, err = Who(ctx)
	return pid, err
}

// Who returns the IDs of the process at the other end of a request's connection and of
// its user.
func Who(ctx context.Context) (pid, uid int, err error) {
	c, ok := ctx.Value(key{}).(*net.UnixConn)
	if !ok {
		return 0, 0, ErrUnknown
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0, fmt.Errorf("get the peer of a socket: %w", err)
	}
	var cred *unix.Ucred
	var asked error
	err = raw.Control(func(fd uintptr) { cred, asked = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, asked); err != nil {
		return 0, 0, fmt.Errorf("get the peer of a socket: %w", err)
	}
	if cred.Pid <= 0 {
		return 0, 0, ErrUnknown
	}
	return int(cred.Pid), int(cred.Uid), nil
}

// HungUp reports whether the other end of a request's connection has closed it, and
// so waits for no answer. The request's context ends later: only once the server
// reads the connection.
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

// Watch calls gone, from its own goroutine, when the process ends. stop ends the watch
// and waits for a gone that is running. Watch returns an error if the process does not
// exist any more or this system cannot watch it.
func Watch(pid int, gone func()) (stop func(), err error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("watch process %d: %w", pid, err)
	}
	// Without O_NONBLOCK each watched process would cost a thread.
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
		_ = file.Close() // ends the wait
		<-ended
	}, nil
}

// exited reports whether the process of a pidfd has ended.
func exited(pidfd uintptr) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}
