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
// not to the trainer alone. A connected worker holds both back: they ask the
// trainer to stop the job, and the trainer tells all ranks at the same step. It
// ends the worker by SIGTERM only after the worker has released the signals.

// EnvSignals names the process that holds signals back for its rank, PID:SOCKET.
// Processes that it starts leave their signals as they are, so that it can end
// them by SIGTERM.
const EnvSignals = "CKPTSTORE_SIGNALS"

// HoldSignals says which signals a worker holds back from now on; in
// release_signals, which ones it does not hold back any more, none for all.
type HoldSignals struct {
	Signals []string `json:"signals,omitempty"` // SIGTERM, SIGUSR1
}

// Signaled says that a worker has caught a signal.
type Signaled struct {
	Signal string `json:"signal"` // SIGTERM or SIGUSR1
}

// SignaledReply is what a worker does with a signal that it has caught.
type SignaledReply struct {
	End    bool `json:"end,omitempty"`    // the worker is being ended: let the signal act
	Stacks bool `json:"stacks,omitempty"` // the trainer sent it: print the stacks of all threads
}

// heldSignals are what a client holds back, and their names.
var heldSignals = map[os.Signal]string{syscall.SIGTERM: "SIGTERM", syscall.SIGUSR1: "SIGUSR1"}

// signalTimeout bounds the requests about signals. The trainer answers them
// without waiting for anything.
const signalTimeout = 10 * time.Second

// WithOwnSignals leaves SIGTERM and SIGUSR1 to the program. Without it, a
// connected client holds them back until [Client.Close], or until the trainer
// ends this process: they ask the trainer to stop the job, and Report says so to
// all ranks. Channels of [signal.Notify] get them in either case, and what the
// program ignores stays ignored. A program that ends by such a channel, as with
// [signal.NotifyContext], takes this option: else the trainer takes its end for
// that of the training.
func WithOwnSignals() Option {
	return func(c *Client) { c.ownSignals = true }
}

// signalHold is what a client does about signals. The zero value holds nothing.
type signalHold struct {
	got    chan os.Signal
	active atomic.Bool
	end    context.CancelFunc
	done   sync.WaitGroup
}

// HoldsSignals reports whether this client holds SIGTERM and SIGUSR1 back.
func (c *Client) HoldsSignals() bool { return c.signals.active.Load() }

// holdSignals begins to hold signals back, unless a process above this one does
// that for the rank.
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

// heldAbove reports whether another live process holds signals back for the rank
// of this socket. said is the value of [EnvSignals].
func heldAbove(said, socket string) bool {
	text, of, _ := strings.Cut(said, ":")
	pid, err := strconv.Atoi(text)
	if err != nil || of != socket || pid == os.Getpid() {
		return false
	}
	err = syscall.Kill(pid, 0)
	return err == nil || errors.Is(err, syscall.EPERM)
}

// followSignals passes signals on to the trainer until it releases them.
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

// confirmRelease tells the trainer that nothing is held any more. The trainer
// does not wait long for it.
func (c *Client) confirmRelease(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, signalTimeout)
	defer cancel()
	_ = c.call(ctx, "release_signals", struct{}{}, nil)
}

// actOnCaught lets the signals act that were caught before the release and not
// passed on, unless the client is being closed. One of them may be the SIGTERM
// by which the trainer ends this process: it sends it at once to a worker whose
// hold_signals it has not read yet. A trainer that ends the workers may have sent
// SIGUSR1 too, for their stacks; that one is not to end them.
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

// passOn asks the trainer what a signal means; end says that it is to act.
func (c *Client) passOn(ctx context.Context, sig os.Signal) (end bool) {
	ctx, cancel := context.WithTimeout(ctx, signalTimeout)
	defer cancel()
	var reply SignaledReply
	err := c.call(ctx, "signaled", Signaled{heldSignals[sig]}, &reply)
	if reply.Stacks {
		_, _ = os.Stderr.Write(goroutines()) // for a person who looks
	}
	// A trainer that does not answer in time is stopped, and learns of a
	// scheduler's signal by itself.
	return reply.End || err != nil && ctx.Err() == nil
}

// releaseSignals makes the signals act again as if they had never been held.
func (c *Client) releaseSignals() {
	if c.signals.active.Swap(false) {
		signal.Stop(c.signals.got)
	}
}

// raise sends this process a signal that it has caught before.
func raise(sig os.Signal) {
	if s, ok := sig.(syscall.Signal); ok {
		_ = syscall.Kill(os.Getpid(), s) // a process may always signal itself
	}
}

// endSignals gives the signals back, at the end of the client.
func (c *Client) endSignals() {
	if c.signals.end == nil {
		return
	}
	c.releaseSignals()
	c.signals.end()
	c.signals.done.Wait()
}
