// Package container does what a container expects of its programs.
//
//	first.go   as the first process of a PID namespace: reap orphans, forward signals
//	cause.go   leave the cause of the end where Kubernetes shows it
//	pod.go     annotate the pod
package container

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// forwarded are the signals by which schedulers, terminals and users ask a program for
// something. The first process of a PID namespace receives none of them that it does not
// handle.
var forwarded = []os.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}

// First does nothing, and returns false, unless this process is the first of its PID
// namespace, as the command of a container is. Then it runs the program again, as a
// child with the same arguments, and returns the exit code of that child: 128+n if
// signal n killed it.
//
// Meanwhile it forwards signals to the child and reaps every process whose parent has
// ended: the kernel gives those to the first process, where each would stay a zombie.
// The program itself cannot reap them: it would take the ends of its own children from
// the code that waits for them.
//
// At a terminal the child has the foreground, so that the terminal's signals reach it
// once. If the child cannot be started, First reports that on stderr and returns false:
// the program works without it.
func First(stderr io.Writer) (code int, first bool) {
	if os.Getpid() != 1 {
		return 0, false
	}
	caught := make(chan os.Signal, 16) // before the child starts: none is lost
	signal.Notify(caught, forwarded...)
	child, err := again()
	if err != nil {
		signal.Stop(caught)
		fmt.Fprintf(stderr, "no process that reaps orphans: %v\n", err)
		return 0, false
	}
	go func() {
		for sig := range caught {
			// The child keeps its number until it is reaped, and then this process ends.
			_ = unix.Kill(child, sig.(syscall.Signal))
		}
	}()
	status, err := reap(child)
	switch {
	case err != nil:
		fmt.Fprintf(stderr, "wait for process %d: %v\n", child, err)
		return 1, true
	case status.Signaled():
		text := fmt.Sprintf("%s: process %d was killed by %s", os.Args[0], child, unix.SignalName(status.Signal()))
		if status.Signal() == unix.SIGKILL {
			text += ": the container may have reached its memory limit"
		}
		fmt.Fprintln(stderr, text)
		if err := LeaveCause(os.Getenv, text, ""); err != nil {
			fmt.Fprintln(stderr, err)
		}
		return 128 + int(status.Signal()), true
	}
	return status.ExitStatus(), true
}

// again starts this program with its arguments, and returns the process's number.
func again() (pid int, err error) {
	attr := &os.ProcAttr{Env: os.Environ(), Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, Sys: &syscall.SysProcAttr{}}
	if _, err := unix.IoctlGetTermios(0, unix.TCGETS); err == nil {
		attr.Sys.Setpgid, attr.Sys.Foreground, attr.Sys.Ctty = true, true, 0
	}
	p, err := os.StartProcess("/proc/self/exe", os.Args, attr)
	if err != nil {
		return 0, err
	}
	pid = p.Pid
	return pid, p.Release() // reap waits for it
}

// reap reaps children until the given one has ended, and returns its status.
func reap(child int) (status unix.WaitStatus, err error) {
	for {
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return status, err
		case pid == child:
			return status, nil
		}
	}
}
