package function

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/client"
)

// Exit codes of [Main], beside 128 and the number of a signal.
const (
	exitDone   = 0
	exitFailed = 1
	exitConfig = 64 // no trainer, or no function that can be run
)

// stopPatience is how long a function may take to save and end. The trainer's
// own patience is shorter, and ends in signals.
const stopPatience = 10 * time.Minute

// Main runs a training function as a worker that a trainer has started, and
// returns the exit code of the process: 0 when the function has ended well, or
// because the trainer asked for it; 1 when it failed; 64 when it cannot be run;
// 143 when a SIGTERM of the trainer ended it. See [Wrap] for what train may be.
//
// Each result is one report to the trainer. Its "step" is the training's step,
// or else the number of the iteration in this attempt; "step", "done" and
// "time_this_iter_s" are told beside the metrics, not among them. A failure goes to standard error and, with
// its traceback, into the trainer's error file. Options change how the worker connects.
func Main(ctx context.Context, train any, options ...client.Option) int {
	return run(ctx, train, os.Stderr, options...)
}

func run(ctx context.Context, train any, stderr io.Writer, options ...client.Option) int {
	var connection atomic.Pointer[client.Client]
	ctx, release := untilSignalled(ctx, func() bool {
		c := connection.Load()
		return c != nil && c.HoldsSignals()
	})
	defer release()
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{ReplaceAttr: named}))
	f, err := Wrap(train)
	if err != nil {
		fmt.Fprintln(stderr, err)
		return exitConfig
	}
	c, err := client.Connect(ctx, append(options, connection.Store)...) // before it holds signals
	if err != nil {
		fmt.Fprintln(stderr, err)
		if errors.Is(err, client.ErrNoTrainer) {
			return exitConfig
		}
		return exitFailed
	}
	defer c.Close()
	// The function goes on after a signal: it has to clean up.
	r := NewRunner(context.WithoutCancel(ctx), f.Entry(c.Config, Checkpoint{c.Resume, c}), Options{Logger: log, StopTimeout: stopPatience, Quiet: os.Getenv(client.EnvQuiet) == "1"})
	_, err = Drive(ctx, r, connected{c, log})
	code := exitCode(err)
	if own := ownError(err); own != nil || code == exitFailed {
		err = errors.Join(err, writeErrorFile(err))
		fmt.Fprintln(stderr, err)
		if e := (*Error)(nil); errors.As(err, &e) {
			fmt.Fprintln(stderr, e.Traceback)
		}
	}
	return code
}

// exitCode is that of a process whose function has ended so.
func exitCode(err error) int {
	var killed signalled
	switch {
	case err == nil:
		return exitDone
	case ownError(err) != nil:
		return exitFailed
	case errors.As(err, &killed):
		return 128 + int(killed)
	}
	return exitFailed
}

// signalled is a signal as the cause of an end.
type signalled syscall.Signal

func (s signalled) Error() string { return syscall.Signal(s).String() + " by a signal" }

// untilSignalled ends with a SIGTERM or SIGINT, as its cause says, and at the
// latest with release. A SIGTERM that the client holds back is the trainer's.
func untilSignalled(ctx context.Context, held func() bool) (_ context.Context, release func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	got := make(chan os.Signal, 1)
	signal.Notify(got, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		for {
			select {
			case s := <-got:
				n, ok := s.(syscall.Signal)
				if ok && n == syscall.SIGTERM && held() {
					continue
				}
				if ok {
					cancel(signalled(n))
				}
			case <-ctx.Done():
			}
			return
		}
	}()
	return ctx, func() {
		signal.Stop(got)
		cancel(nil)
	}
}

// named gives the level of what should never happen its name.
func named(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.LevelKey && a.Value.Any() == LevelCritical {
		a.Value = slog.StringValue("CRITICAL")
	}
	return a
}

// connected is the trainer at the other end of the socket.
type connected struct {
	*client.Client
	log *slog.Logger
}

var _ Trainer = connected{}

// Report implements [Trainer]. Metrics for which there is no room are lost and
// said to be: the training is worth more.
func (t connected) Report(ctx context.Context, step int64, metrics map[string]any, last bool) error {
	report := t.Client.Report
	if last {
		report = t.ReportLast
	}
	err := report(ctx, step, metrics)
	if errors.Is(err, client.ErrNoSpace) {
		t.log.Warn("the metrics of an iteration are not kept", "step", step, "error", err)
		return nil
	}
	return err
}

// Stopped implements [Trainer], with what the newest reply has said.
func (t connected) Stopped() string { return t.StopRequested() }
