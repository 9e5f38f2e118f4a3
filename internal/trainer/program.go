// Package trainer is the program trainer: it parses a command line, starts what it
// asks for and reports how that ended.
//
//	program.go      the program and its exit codes
//	run.go          trainer run: a job in a store
//	config.go       what the flags of a job ask for
//	backend.go      workers and GPUs
//	torchrun.go     torchrun's flags, supervision.go those of hangs and ends
//	logs.go         where the workers' output goes
//	nodes.go        nodes of a cluster, as schedulers name them
//	signals.go      signals, and the time that they leave
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
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/demo"
	"github.com/ckptstore/ckptstore/internal/doctor"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/backend"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/terminal"
)

// Exit codes. A signal n that ends the job gives 128+n. Those of errors are in the
// table of package problem.
const (
	exitOK        = 0
	exitPreempted = 75 // and what was done is in a checkpoint
	exitUnsaved   = 128 + int(syscall.SIGTERM)
)

// release is the version that the build of a wheel sets.
var release = "(unreleased)"

// Parts are what a program adds to the trainer. The zero value adds nothing.
type Parts struct {
	Backends *backend.Registry // nil: the built-in ones
	// InitHook runs for each group before devices are shared and OnStart is called.
	InitHook func(context.Context, *backend.Group) error
	Storage  data.Storage // nil: the store's own
}

// Main runs the program on the arguments and streams of its process, and returns
// its exit code.
func Main(ctx context.Context, p Parts) int {
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
		Version: release,
	}
	console.Program(root, args, stdout, stderr)
	root.AddCommand(runCommand(std, signals, p), demo.Command(std, runDemoJob), guardCommand(std, signals), demo.WorkerCommand(signals.leave))
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

// decisive are the kinds that decide wherever they stand in an error, in this order.
// A scheduler may start a job again whose disk was full or whose run another job had;
// a link that another user placed is told from the damage that it looks like.
var decisive = []problem.Kind{problem.Failed, problem.NoSpace, problem.Conflict, problem.Findings, problem.Denied}

// exitCode returns the exit code of an error: how the job ended, or that of the
// error's kind.
func exitCode(err error) int {
	var sig signaled
	var preempted *launch.PreemptedError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &sig):
		return 128 + int(sig.sig)
	case errors.As(err, &preempted) && preempted.Saved:
		return exitPreempted
	case preempted != nil:
		return exitUnsaved
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
	return runOn(ctx, st, cfg, nil)
}
