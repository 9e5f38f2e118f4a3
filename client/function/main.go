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

// Exit codes of [Main], in addition to 128 plus the number of a signal.
const (
	exitDone   = 0
	exitFailed = 1
	exitConfig = 64 // no trainer, or not a training function
)

// stopPatience is how long a function may take to save and end. The trainer's
// own limit is shorter, and it then sends signals.
const stopPatience = 10 * time.Minute

// Main runs a training function as a worker that a trainer has started. It returns
// the exit code of the process: 0 if the function ended without an error or on a stop
// request of the trainer, 1 if it failed, 64 if it cannot be run, 143 if the trainer's
// SIGTERM ended it. See [Wrap] for the types of train.
//
// Each result is one report to the trainer. Its "step" is the training's step, by
// default the number of the iteration in this attempt. Main sends "step" and "done"
// separately from the metrics. It prints a failure to standard error and writes it,
// with its traceback, to the trainer's error file. Options change how the worker
// connects.
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
	// The function continues after a signal: it has to clean up.
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

// exitCode returns the exit code for the error of [Drive].
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

// untilSignalled returns a context that a SIGTERM or SIGINT cancels, with a
// [signalled] as its cause, and that release cancels at the latest. A SIGTERM that
// the client holds does not cancel it: the trainer handles it.
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

// named prints [LevelCritical] as CRITICAL.
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

// Report implements [Trainer]. If there is no room for the metrics, it logs that
// they are lost and returns no error, so that the training continues.
func (t connected) Report(ctx context.Context, step int64, metrics map[string]any, last bool) error {
	report := t.Client.Report
	if last {
		report = t.ReportLast
	}
	err := report(ctx, step, metrics)
	if errors.Is(err, client.ErrNoSpace) {
		t.log.Warn("metrics lost", "step", step, "error", err)
		return nil
	}
	return err
}

// Stopped implements [Trainer]. It returns the stop request of the newest reply.
func (t connected) Stopped() string { return t.StopRequested() }
