package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/agent"
	"github.com/ckptstore/ckptstore/internal/backstop"
	"github.com/ckptstore/ckptstore/internal/bench"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/foreign"
	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/terminal"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// Exit codes.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitNotFound    = 4
	exitConflict    = 5
	exitFindings    = 6
	exitNoStore     = 10
	exitLocked      = 11
	exitNotAllowed  = 12
	exitInterrupted = 130
)

const rootHelp = `Look after a store of checkpoints.

A checkpoint is named by a reference: RUN (the newest of its line),
RUN@latest, RUN@NAME, RUN@ID or the beginning of an ID, RUN@TAG,
RUN@best:METRIC:min.
show, verify, export and cat also take the path of a checkpoint of PyTorch DCP,
safetensors or Hugging Face.

Exit codes: 0 ok, 1 failed, 2 usage, 4 not found, 5 conflict, 6 damage found, or
differences by diff --exit-code, 10 no store, 11 locked, 12 not allowed,
130 interrupted.`

// errFindings says that a check has found something; what, is on stdout.
var errFindings = errors.New("findings")

// app is what all commands share.
type app struct {
	*console.Console
	location string
	named    bool // the location was given, not assumed
	wait     time.Duration
	end      time.Duration // after a signal; then the process exits
}

// endTimeout is how long a command with a store may take to end after a signal.
const endTimeout = time.Minute

// run is the whole program; it returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	// Schedulers warn every process of a job by SIGUSR1. An agent and an owner of a
	// store serve on.
	dropped := make(chan os.Signal, 1)
	signal.Notify(dropped, syscall.SIGUSR1)
	defer signal.Stop(dropped)
	out, errs := terminal.NewWriter(stdout), terminal.NewWriter(stderr)
	a := &app{Console: &console.Console{Name: "ckptstore", Out: out, Err: errs, Raw: stdout, Screen: stderr}, end: endTimeout}
	root := &cobra.Command{
		Use: "ckptstore", Short: "Look after a store of checkpoints", Long: rootHelp, Version: version(),
		PersistentPreRunE: func(c *cobra.Command, _ []string) error {
			a.named = os.Getenv("CKPTSTORE_STORE") != "" || c.Flags().Changed("store")
			return errors.Join(console.NoneEmpty(c), a.checkFlags())
		},
	}
	console.Program(root, args, stdout, stderr)
	f := root.PersistentFlags()
	location := os.Getenv("CKPTSTORE_STORE")
	if location == "" {
		location = "ckpts"
	}
	f.StringVar(&a.location, "store", location, "store: a directory or a nats:// URL ($CKPTSTORE_STORE)")
	a.FormatFlags(f)
	f.DurationVar(&a.wait, "wait", 10*time.Second, "how long to wait for an owner of the store that does not answer")
	f.BoolVarP(&a.Quiet, "quiet", "q", false, "no progress and no warnings on stderr")
	root.AddCommand(a.initCommand(), a.serveCommand(), a.lsCommand(), a.showCommand(),
		a.eventsCommand(), a.replayCommand(), a.metricsCommand(), a.diffCommand(), a.verifyCommand(), a.catCommand(), a.importCommand(), a.exportCommand(), a.backupCommand(), a.restoreCommand(), a.recoverCommand(),
		a.gcCommand(), a.rmCommand(), a.pinCommand(), a.unpinCommand(), a.tagCommand(), a.viewsCommand(), bench.Command(a.Console, a.with), bench.GuardCommand())
	root.AddCommand(a.jobsCommand(), a.logsCommand(), a.stopCommand(), a.preemptCommand(), a.continueCommand(), a.forkCommand(), a.agentCommand(), a.configCommand())
	err := root.ExecuteContext(ctx)
	interrupted := ctx.Err() != nil
	err = errors.Join(err, out.Flush())
	if err != nil && !errors.Is(err, errFindings) {
		fmt.Fprintln(errs, "ckptstore:", err)
	}
	_ = errs.Flush() // there is nowhere else to say that it failed
	return exitCode(err, interrupted)
}

func exitCode(err error, interrupted bool) int {
	var (
		usage     console.UsageError
		running   *store.RunningError
		followed  *store.FollowedError
		exists    *store.RunExistsError
		idle      *store.NotRunningError
		taken     *foreign.OccupiedError
		corrupt   *data.CorruptError
		changed   *data.ChangedError
		malformed *dcp.FormatError
	)
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errFindings):
		return exitFindings
	case interrupted && errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.As(err, &usage), errors.Is(err, projections.ErrReference), errors.Is(err, launch.ErrConfig), errors.Is(err, projections.ErrAmbiguous),
		errors.Is(err, store.ErrLocation), errors.Is(err, retention.ErrPolicy), errors.Is(err, store.ErrTag), errors.Is(err, store.ErrCursorName),
		errors.Is(err, store.ErrAccess), errors.Is(err, jetlog.ErrExposed):
		return exitUsage
	case errors.Is(err, projections.ErrNotFound):
		return exitNotFound
	case errors.Is(err, store.ErrExists), errors.As(err, &running), errors.As(err, &taken), errors.As(err, &followed), errors.Is(err, jetlog.ErrCursorMoved),
		errors.As(err, &exists), errors.As(err, &idle), errors.Is(err, agent.ErrServed):
		return exitConflict
	case errors.As(err, &corrupt), errors.As(err, &changed), errors.As(err, &malformed), store.IsDamage(err):
		return exitFindings
	case errors.Is(err, store.ErrNothing), errors.Is(err, jetlog.ErrEnd), errors.Is(err, agent.ErrNoAgent):
		return exitNotFound
	case errors.Is(err, store.ErrNoStore):
		return exitNoStore
	case errors.Is(err, store.ErrLocked), errors.Is(err, jetlog.ErrServed):
		return exitLocked
	case errors.Is(err, os.ErrPermission), errors.Is(err, syscall.EROFS), errors.Is(err, jetlog.ErrNotAllowed), errors.Is(err, store.ErrBackup), errors.Is(err, store.ErrUntrusted), errors.Is(err, errDeclined):
		return exitNotAllowed
	}
	return exitFailed
}

func (a *app) checkFlags() error {
	if a.wait <= 0 {
		return console.Usagef("--wait %s: want a time above zero, such as 10s", a.wait)
	}
	return a.CheckFormat()
}

func (a *app) logger() *slog.Logger {
	if a.Quiet {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(a.Err, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

func (a *app) options() store.Options {
	return store.Options{Location: a.location, Patience: a.wait, Logger: a.logger()}
}

// read opens the store for one command that changes nothing in it.
func (a *app) read(ctx context.Context, do func(*store.Store) error) error {
	o := a.options()
	o.Reader = true
	return a.withOptions(ctx, o, do)
}

// with opens the store for one command.
func (a *app) with(ctx context.Context, do func(*store.Store) error) error {
	return a.withOptions(ctx, a.options(), do)
}

func (a *app) withOptions(ctx context.Context, o store.Options, do func(*store.Store) error) (err error) {
	defer backstop.AfterDone(ctx, a.end, a.Err, "ckptstore", exitInterrupted)()
	s, err := store.Open(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	return do(s)
}

// data is the data directory alone, for commands that need no log.
func (a *app) data() (*data.Root, error) {
	return store.OpenData(a.location)
}
