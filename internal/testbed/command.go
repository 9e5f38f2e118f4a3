package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// drainLimit bounds the wait for the output of a command that has ended, if processes
// that it started still hold it.
const drainLimit = 10 * time.Second

// ErrOff is the error of a request to a node that is powered off.
var ErrOff = errors.New("the node is powered off")

// ErrFrozen is the error of a request to a node that is frozen.
var ErrFrozen = errors.New("the node is frozen")

// Cmd is a command in a node. Everything of [exec.Cmd] holds: its output, its
// environment, its exit status. Process.Pid is the process's ID on the host, where
// signals can be sent to it. SysProcAttr must not ask for new namespaces.
//
// A command is a child of this process and not of the node's pid 1. The kernel keeps it
// until it has been waited for, so a power off does that, if the caller has not. It
// closes what StdoutPipe and StderrPipe returned, also before it was read to the end.
type Cmd struct {
	*exec.Cmd
	node *Node

	waited sync.Once
	ended  atomic.Bool // waited is done
	err    error       // of the wait
}

// Command returns a command that [Cmd.Start] starts in the node. Its environment is
// [Node.Environ], its directory the root. When ctx ends, the command is killed, but not
// processes that it has started.
func (n *Node) Command(ctx context.Context, name string, args ...string) *Cmd {
	c := exec.CommandContext(ctx, name, args...)
	c.Env, c.Dir, c.WaitDelay = n.Environ(), "/", drainLimit
	return &Cmd{Cmd: c, node: n}
}

// Start starts the command in the node. It returns [ErrOff] or [ErrFrozen] if no
// process can start there.
func (c *Cmd) Start() error {
	c.node.mu.Lock()
	defer c.node.mu.Unlock()
	b := c.node.boot
	switch {
	case b == nil:
		return fmt.Errorf("start %s on %s: %w", c.Path, c.node.Name(), ErrOff)
	case c.node.frozen:
		return fmt.Errorf("start %s on %s: %w", c.Path, c.node.Name(), ErrFrozen)
	}
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	b.freezer.place(c.SysProcAttr)
	if err := b.thread.do(c.Cmd.Start); err != nil {
		return fmt.Errorf("start on %s: %w", c.node.Name(), err)
	}
	b.commands = append(slices.DeleteFunc(b.commands, func(c *Cmd) bool { return c.ended.Load() }), c)
	return nil
}

// Wait waits for the end of a started command, as [exec.Cmd.Wait] does. It may be
// called again and returns the same error.
func (c *Cmd) Wait() error {
	c.waited.Do(func() {
		c.err = c.Cmd.Wait()
		c.ended.Store(true)
	})
	return c.err
}

// Run starts the command and waits for its end.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output runs the command and returns its standard output. Its standard error is in the
// [exec.ExitError], unless Stderr is set.
func (c *Cmd) Output() ([]byte, error) {
	var out, errs bytes.Buffer
	c.Stdout = &out
	if c.Stderr == nil {
		c.Stderr = &errs
	}
	err := c.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		exit.Stderr = errs.Bytes()
	}
	return out.Bytes(), err
}

// CombinedOutput runs the command and returns its standard output and standard error.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.Bytes(), err
}
