package client

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Schedulers such as Slurm send SIGUSR1 and SIGTERM to every process of a step,
// not only to the trainer. A connected worker holds both: instead of ending the
// worker, they ask the trainer to stop the job, and the trainer tells all ranks at
// the same step. The trainer ends the worker by SIGTERM only after the worker has
// released the signals.

// EnvSignals names the process that holds signals for its rank, PID:SOCKET.
// Its child processes do not hold theirs, so that it can end them by SIGTERM.
const EnvSignals = "CKPTSTORE_SIGNALS"

// HoldSignals lists the signals that a worker holds from now on. In
// release_signals it lists those that the worker no longer holds; empty means all.
type HoldSignals struct {
	Signals []string `json:"signals,omitempty"` // SIGTERM, SIGUSR1
}

// Signaled reports that a worker caught a signal.
type Signaled struct {
	Signal string `json:"signal"` // SIGTERM or SIGUSR1
}

// SignaledReply tells a worker how to handle a signal that it caught.
type SignaledReply struct {
	End    bool `json:"end,omitempty"`    // the worker is being ended: let the signal act
	Stacks bool `json:"stacks,omitempty"` // the trainer sent it: print the stacks of all threads
}

// heldSignals are the signals that a client holds, with their names.
var heldSignals = map[os.Signal]string{syscall.SIGTERM: "SIGTERM", syscall.SIGUSR1: "SIGUSR1"}

// signalTimeout bounds the requests about signals. The trainer answers them
// without waiting for anything.
const signalTimeout = 10 * time.Second

// WithOwnSignals leaves SIGTERM and SIGUSR1 to the program. Without it, a
// connected client holds them until [Client.Close], or until the trainer ends
// this process: they ask the trainer to stop the job, and all ranks see the
// request after a Report. In either case channels of [signal.Notify] receive them,
// and ignored signals stay ignored. A program that exits on such a channel, as with
// [signal.NotifyContext], needs this option: otherwise the trainer takes the exit
// for the end of the training.
func WithOwnSignals() Option {
	return func(c *Client) { c.ownSignals = true }
}

// signalHold is the state of held signals. The zero value holds none.
type signalHold struct {
	got    chan os.Signal
	active atomic.Bool
	end    context.CancelFunc
	done   sync.WaitGroup
}

// HoldsSignals reports whether this client holds SIGTERM and SIGUSR1.
func (c *Client) HoldsSignals() bool { return c.signals.active.Load() }

// holdSignals starts to hold signals, unless an ancestor process holds them for
// the rank.
func (c *Client) holdSignals(socket string) {
	if c.ownSignals || heldAbove(os.Getenv(EnvSignals), socket) {
		return
	}
	var caught []os.Signal
	var names []string
	for sig, name := range heldSignals {
		if !signal.Ignored(sig) {
			caught, names = append(caught, sig), append(names, name)
		}
	}
	if len(caught) == 0 {
		return
	}
	_ = os.Setenv(EnvSignals, strconv.Itoa(os.Getpid())+":"+socket) // the name and the value are valid
	ctx, cancel := context.WithCancel(context.Background())
	h := &c.signals
	h.got, h.end = make(chan os.Signal, 8), cancel
	h.active.Store(true)
	signal.Notify(h.got, caught...)
	released := make(chan error, 1)
	h.done.Go(func() { released <- c.call(ctx, "hold_signals", HoldSignals{names}, nil) })
	h.done.Go(func() { c.followSignals(ctx, released) })
}

// heldAbove reports whether another live process holds signals for the rank of
// this socket. env is the value of [EnvSignals].
func heldAbove(env, socket string) bool {
	text, of, _ := strings.Cut(env, ":")
	pid, err := strconv.Atoi(text)
	if err != nil || of != socket || pid == os.Getpid() {
		return false
	}
	err = syscall.Kill(pid, 0)
	return err == nil || errors.Is(err, syscall.EPERM)
}

// followSignals forwards signals to the trainer until the trainer releases them.
func (c *Client) followSignals(ctx context.Context, released <-chan error) {
	for {
		select {
		case sig := <-c.signals.got:
			if c.passOn(ctx, sig) {
				c.releaseSignals()
				raise(sig)
				return
			}
		case err := <-released:
			c.releaseSignals()
			if err == nil {
				c.confirmRelease(ctx)
			}
			c.actOnCaught(ctx, err == nil)
			return
		}
	}
}

// confirmRelease tells the trainer that no signal is held any more. It is best
// effort: the trainer does not wait long for it.
func (c *Client) confirmRelease(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, signalTimeout)
	defer cancel()
	_ = c.call(ctx, "release_signals", struct{}{}, nil)
}

// actOnCaught raises the signals that were caught before the release and not
// forwarded, unless the client is being closed. One of them may be the SIGTERM
// by which the trainer ends this process: the trainer sends it at once to a worker
// whose hold_signals it has not read yet. A trainer that ends the workers may also
// have sent SIGUSR1, for their stacks; that one must not end them.
func (c *Client) actOnCaught(ctx context.Context, ending bool) {
	for {
		select {
		case sig := <-c.signals.got:
			if ctx.Err() == nil && (!ending || sig == syscall.SIGTERM) {
				raise(sig)
			}
		default:
			return
		}
	}
}

// passOn forwards a signal to the trainer. It returns true if the signal should
// act on this process.
func (c *Client) passOn(ctx context.Context, sig os.Signal) (end bool) {
	ctx, cancel := context.WithTimeout(ctx, signalTimeout)
	defer cancel()
	var reply SignaledReply
	err := c.call(ctx, "signaled", Signaled{heldSignals[sig]}, &reply)
	if reply.Stacks {
		_, _ = os.Stderr.Write(goroutines()) // for a person who looks
	}
	// A trainer that does not answer in time is stopped; it receives a scheduler's
	// signal itself.
	return reply.End || err != nil && ctx.Err() == nil
}

// releaseSignals restores the handling of the signals from before they were held.
func (c *Client) releaseSignals() {
	if c.signals.active.Swap(false) {
		signal.Stop(c.signals.got)
	}
}

// raise sends this process a signal that it caught before.
func raise(sig os.Signal) {
	if s, ok := sig.(syscall.Signal); ok {
		_ = syscall.Kill(os.Getpid(), s) // a process may always signal itself
	}
}

// endSignals releases the signals when the client is closed.
func (c *Client) endSignals() {
	if c.signals.end == nil {
		return
	}
	c.releaseSignals()
	c.signals.end()
	c.signals.done.Wait()
}
