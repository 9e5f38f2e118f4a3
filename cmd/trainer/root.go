package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/demo"
	"github.com/ckptstore/ckptstore/internal/doctor"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/terminal"
	"github.com/ckptstore/ckptstore/projections"
)

// Exit codes. A signal n that ends the job gives 128+n.
const (
	exitOK       = 0
	exitFailed   = 1
	exitConflict = 5 // another job has the run
	exitFindings = 6
	exitNoStore  = 10
	exitLocked   = 11
	exitDenied   = 12 // by the server of the log, or because another user can write here
	exitConfig   = 64
	exitInternal = 70

	exitPreempted = 75 // and what was done is in a checkpoint
	exitUnsaved   = 128 + int(syscall.SIGTERM)
)

// release is the version that the build of a wheel sets.
var release = "(unreleased)"

// run is the whole program; it returns the exit code.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, signals, stop := untilSignal(ctx)
	defer stop()
	defer ignorePipes()()
	std := console.Streams{In: stdin, Out: stdout, Err: stderr}
	root := &cobra.Command{
		Use:     "trainer",
		Short:   "Run training jobs with checkpoints that are whole or do not exist",
		Version: release,
	}
	console.Program(root, args, stdout, stderr)
	root.AddCommand(runCommand(std, signals), demo.Command(std, runDemoJob), guardCommand(std, signals), demo.WorkerCommand(signals.leave))
	root.AddCommand(doctor.Command(stdout, envOr("CKPTSTORE_STORE", "ckpts"), gpu.Inspect))
	err := root.ExecuteContext(ctx)
	// What was waited for says only that the context ended, not why.
	if sig := (signaled{}); errors.Is(err, context.Canceled) && errors.As(context.Cause(ctx), &sig) && !errors.As(err, new(signaled)) {
		err = fmt.Errorf("%w: %w", sig, err)
	}
	if err != nil {
		fmt.Fprintln(stderr, "trainer:", terminal.Text(err.Error())) // which may quote a store or a worker
		var failed *launch.FailedError
		if errors.As(err, &failed) && len(failed.Tail) > 0 {
			tail := terminal.AppendOutput(nil, []byte(strings.Join(failed.Tail, "  ")))
			fmt.Fprintf(stderr, "last output of rank %d:\n  %s", failed.Rank, tail)
		}
	}
	return exitCode(err)
}

// ignorePipes makes output that nobody reads any more an error of its write
// instead of the training's end. The signal is caught and dropped, not
// ignored: what is ignored stays so in the programs that are started, which
// have to end at a pipe that is closed.
func ignorePipes() func() {
	dropped := make(chan os.Signal, 1)
	signal.Notify(dropped, syscall.SIGPIPE)
	return func() { signal.Stop(dropped) }
}

func exitCode(err error) int {
	var sig signaled
	var preempted *launch.PreemptedError
	var failed *launch.FailedError
	var lost *launch.LostSaveError
	var running *store.RunningError
	var usage console.UsageError
	var link *beneath.TypeError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &sig):
		return 128 + int(sig.sig)
	case errors.As(err, &preempted) && preempted.Saved:
		return exitPreempted
	case preempted != nil:
		return exitUnsaved
	case errors.As(err, &failed), errors.As(err, &lost), errors.Is(err, syscall.ENOSPC), errors.Is(err, launch.ErrDevices):
		return exitFailed
	case errors.As(err, &running), errors.Is(err, session.ErrFenced), errors.Is(err, staging.ErrTaken),
		errors.Is(err, store.ErrLeaseLost):
		return exitConflict
	case errors.Is(err, doctor.ErrFound):
		return exitFindings
	case errors.Is(err, jetlog.ErrNotAllowed), errors.Is(err, shm.ErrNotPrivate), errors.Is(err, store.ErrUntrusted), errors.As(err, &link):
		return exitDenied
	case errors.Is(err, store.ErrNoStore):
		return exitNoStore
	case errors.Is(err, store.ErrLocked), errors.Is(err, jetlog.ErrServed):
		return exitLocked
	case errors.As(err, &usage), errors.Is(err, launch.ErrConfig), errors.Is(err, launch.ErrNotWhole), errors.Is(err, projections.ErrReference),
		errors.Is(err, store.ErrForeign), errors.Is(err, store.ErrNotEmpty), errors.Is(err, store.ErrNewer), errors.Is(err, events.ErrNewer), store.IsDamage(err), errors.Is(err, store.ErrLocation),
		errors.Is(err, os.ErrPermission), errors.Is(err, syscall.EROFS): // the store is not for this user
		return exitConfig
	}
	return exitInternal
}

func newLogger(w io.Writer, quiet bool) *slog.Logger {
	level := slog.LevelInfo
	if quiet {
		level = slog.LevelWarn
	}
	return slog.New(slog.NewTextHandler(terminal.NewWriter(w), &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey && a.Value.Kind() == slog.KindTime { // an attribute may have that name too
			return slog.String("time", a.Value.Time().Format("15:04:05.000"))
		}
		return a
	}}))
}

// guardCommand is what the trainer starts itself as: see process.RunGuard.
func guardCommand(std console.Streams, signals *stopSignals) *cobra.Command {
	return &cobra.Command{
		Use: process.GuardCommand + " JOB", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			signals.leave()
			return process.RunGuard(context.WithoutCancel(c.Context()), std.In, args[0])
		},
	}
}

// runDemoJob runs a job of the demo as `trainer run` does.
func runDemoJob(ctx context.Context, st *store.Store, cfg launch.Config) error {
	cfg.ExitCode = exitCode
	return runOn(ctx, st, cfg)
}
