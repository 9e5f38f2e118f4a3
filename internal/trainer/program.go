// Package trainer is the program trainer: it parses a command line, runs what it
// requests, and reports the result.
//
//	program.go      the program and its exit codes
//	run.go          trainer run: a job in a store
//	tune.go         trainer tune: the flags of a search; tuner.go the search, tunerforks.go
//	                its clones
//	config.go       a job's flags, as a configuration
//	backend.go      workers and GPUs
//	torchrun.go     torchrun's flags, supervision.go those of hangs and ends
//	logs.go         where the workers' output goes
//	nodes.go        nodes of a cluster, as schedulers name them
//	signals.go      signals, and the time that they leave
//	cause.go        the cause of the end, where Kubernetes shows it
//	publish.go      the newest commit, where schedulers of Kubernetes see it
package trainer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/container"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/demo"
	"github.com/ckptstore/ckptstore/internal/doctor"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/backend"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/terminal"
)

// Exit codes. A signal n that ends the job gives 128+n. Package problem has the
// table of the codes of errors.
const (
	exitOK        = 0
	exitPreempted = 75 // with the finished work in a checkpoint
	exitUnsaved   = 128 + int(syscall.SIGTERM)
)

// release is the version that the build of a release sets.
var release = console.Release("(unreleased)")

// Parts are a program's additions to the trainer. The zero value adds nothing.
type Parts struct {
	Backends *backend.Registry // nil: the built-in ones
	// InitHook runs for each group before devices are shared and OnStart is called.
	InitHook func(context.Context, *backend.Group) error
	Storage  data.Storage // nil: the store's own
}

// Main runs the program on the arguments and streams of its process, and returns
// its exit code. As the command of a container, it does so in a child process: see
// [container.First].
func Main(ctx context.Context, p Parts) int {
	if code, first := container.First(os.Stderr); first {
		return code
	}
	data.Threads()
	return run(ctx, p, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
}

// run is the whole program; it returns the exit code.
func run(ctx context.Context, p Parts, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, signals, stop := untilSignal(ctx)
	defer stop()
	defer ignorePipes()()
	std := console.Streams{In: stdin, Out: stdout, Err: stderr}
	root := &cobra.Command{
		Use:     "trainer",
		Short:   "Run training jobs with checkpoints that are whole or do not exist",
		Version: console.Version(release),
	}
	console.Program(root, args, stdout, stderr)
	root.AddCommand(runCommand(std, signals, p), tuneCommand(std, signals, p), demo.Command(std, runDemoJob), guardCommand(std), demo.WorkerCommand(signals.leave))
	root.AddCommand(doctor.Command(stdout, envOr("CKPTSTORE_STORE", "ckpts"), gpu.Inspect))
	executed, err := root.ExecuteContextC(ctx)
	// The error may report only that the context ended, not why.
	if sig := (signaled{}); errors.Is(err, context.Canceled) && errors.As(context.Cause(ctx), &sig) && !errors.As(err, new(signaled)) {
		err = fmt.Errorf("%w: %w", sig, err)
	}
	if err != nil {
		fmt.Fprintln(stderr, "trainer:", terminal.Text(err.Error())) // the error may quote a store or a worker
		var failed *launch.FailedError
		if errors.As(err, &failed) && len(failed.Tail) > 0 {
			tail := terminal.AppendOutput(nil, []byte(strings.Join(failed.Tail, "  ")))
			fmt.Fprintf(stderr, "last output of rank %d:\n  %s", failed.Rank, tail)
		}
		if executed.Name() == runName {
			leaveCause(stderr, err)
		}
	}
	return exitCode(err)
}

// ignorePipes turns a write to a closed output pipe into an error instead of the
// end of the training. It catches and drops the signal instead of ignoring it:
// child processes inherit an ignored signal, and they must end at a closed pipe.
func ignorePipes() func() {
	dropped := make(chan os.Signal, 1)
	signal.Notify(dropped, syscall.SIGPIPE)
	return func() { signal.Stop(dropped) }
}

// decisive lists, in this order, the kinds that decide the exit code wherever
// they occur in an error. A scheduler may start a job again after a full disk or
// a conflict over the run. A link placed by another user must not be reported as
// the damage that it resembles.
var decisive = []problem.Kind{problem.Failed, problem.NoSpace, problem.Conflict, problem.Findings, problem.Denied}

// exitCode returns the exit code of an error: how the job ended, or the code of
// the error's kind.
func exitCode(err error) int {
	var sig signaled
	var preempted *launch.PreemptedError
	var ended *nodes.EndedError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &sig):
		return 128 + int(sig.sig)
	case errors.As(err, &preempted) && preempted.Saved:
		return exitPreempted
	case preempted != nil:
		return exitUnsaved
	case errors.As(err, &ended): // another trainer coordinated the job
		return ended.Code
	case errors.Is(err, nodes.ErrNoContact), errors.As(err, new(*nodes.TooFewError)), errors.As(err, new(vainError)):
		return exitPreempted // the next job continues
	case errors.As(err, new(*launch.FailedError)), errors.As(err, new(*launch.LostSaveError)):
		return problem.Failed.Trainer()
	}
	kinds := system.Kinds(err)
	for _, kind := range decisive {
		if slices.Contains(kinds, kind) {
			return kind.Trainer()
		}
	}
	return system.KindOf(err).Trainer()
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

// guardCommand is the command with which the trainer starts its guard: see
// process.RunGuard.
//
// It does not leave signals to their default effect before RunGuard ignores them.
func guardCommand(std console.Streams) *cobra.Command {
	return &cobra.Command{
		Use: process.GuardCommand + " JOB [NAME=VALUE...]", Hidden: true, Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return process.RunGuard(context.WithoutCancel(c.Context()), std.In, std.Out, args[0], args[1:]...)
		},
	}
}

// runDemoJob runs a job of the demo as `trainer run` does.
func runDemoJob(ctx context.Context, st *store.Store, cfg launch.Config) error {
	cfg.ExitCode = exitCode
	return runOn(ctx, st, cfg, nil)
}
