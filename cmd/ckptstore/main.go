// Command ckptstore inspects and maintains a store of checkpoints: it lists
// contents and history, verifies, repairs, backs up and deletes.
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

	"github.com/ckptstore/ckptstore/internal/backstop"
	"github.com/ckptstore/ckptstore/internal/bench"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/container"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
	"github.com/ckptstore/ckptstore/internal/redact"
	"github.com/ckptstore/ckptstore/internal/slurm"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/terminal"
)

func main() {
	data.Threads()
	os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}

// Exit codes. Package problem has those of errors.
const (
	exitOK          = 0
	exitInterrupted = 130
)

const rootHelp = `Inspect and maintain a store of checkpoints.

A REF names a checkpoint:

  RUN, RUN@latest       the newest checkpoint of the run's line
  RUN@NAME              by name, such as bert@step-2000
  RUN@ID                by ID, or the beginning of one
  RUN@TAG               by tag
  RUN@best:METRIC:min   the best checkpoint by a metric (min or max)

show, verify, export and cat also accept the path of a PyTorch DCP, safetensors
or Hugging Face checkpoint.

Exit codes: 0 ok, 1 failed, 2 usage, 4 not found, 5 conflict, 6 damage found (or
differences, with diff --exit-code), 7 policy of a proof not met, 10 no store, 11 locked, 12 not allowed,
130 interrupted.`

// errFindings means that a check found problems. They are printed on stdout.
var errFindings = problem.New(problem.Findings, "findings")

// app holds the state that all commands share.
type app struct {
	*console.Console
	location string
	named    bool // --store or $CKPTSTORE_STORE is set
	wait     time.Duration
	end      time.Duration // from a signal to a forced exit
}

// endTimeout is how long a command may take to close its store after a signal.
const endTimeout = time.Minute

// run runs the program and returns its exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	// Schedulers send SIGUSR1 to every process of a job as a warning. Agents and
	// owners of stores ignore it and keep serving.
	dropped := make(chan os.Signal, 1)
	signal.Notify(dropped, syscall.SIGUSR1)
	defer signal.Stop(dropped)
	out, errs := terminal.NewWriter(stdout), terminal.NewWriter(stderr)
	a := &app{Console: &console.Console{Name: "ckptstore", Out: out, Err: errs, Raw: stdout, Screen: stderr}, end: endTimeout}
	root := &cobra.Command{
		Use: "ckptstore", Short: "Inspect and maintain a store of checkpoints", Long: rootHelp, Version: console.Version(version()),
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
	f.StringVar(&a.location, "store", location, "the store: a directory, or a nats:// or tls:// URL ($CKPTSTORE_STORE)")
	a.FormatFlags(f)
	f.DurationVar(&a.wait, "wait", 10*time.Second, "how long to wait for an unresponsive owner of the store")
	f.BoolVarP(&a.Quiet, "quiet", "q", false, "print no progress and no warnings on stderr")
	root.AddCommand(a.initCommand(), a.serveCommand(), a.uiCommand(), a.lsCommand(), a.showCommand(),
		a.eventsCommand(), a.replayCommand(), a.metricsCommand(), a.diffCommand(), a.verifyCommand(), a.catCommand(), a.importCommand(), a.exportCommand(), a.backupCommand(), a.restoreCommand(), a.recoverCommand(),
		a.gcCommand(), a.rmCommand(), a.pinCommand(), a.unpinCommand(), a.tagCommand(), a.viewsCommand(), bench.Command(a.Console, a.with), bench.GuardCommand())
	root.AddCommand(a.jobsCommand(), a.trialsCommand(), a.nodesCommand(), a.logCopiesCommand(), a.logsCommand(), a.stopCommand(), a.preemptCommand(), a.continueCommand(), a.forkCommand(), a.agentCommand(), a.configCommand(), a.accessCommand(), a.auditCommand(), slurm.Command(a.Console))
	executed, err := root.ExecuteContextC(ctx)
	interrupted := ctx.Err() != nil
	err = errors.Join(err, out.Flush())
	if err != nil && !errors.Is(err, errFindings) {
		fmt.Fprintln(errs, "ckptstore:", err)
		if executed.Name() == serveName {
			text := redact.Text(terminal.Text(fmt.Sprint("ckptstore: ", err)))
			if err := container.LeaveCause(os.Getenv, text, ""); err != nil {
				fmt.Fprintln(errs, "ckptstore:", err)
			}
		}
	}
	_ = errs.Flush() // there is no place left to report an error
	return exitCode(err, interrupted)
}

// exitCode returns the exit code of an error, which depends on its kind.
func exitCode(err error, interrupted bool) int {
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errFindings):
		return problem.Findings.Ckptstore() // the findings were printed, even if a later step failed
	case interrupted && errors.Is(err, context.Canceled):
		return exitInterrupted
	}
	return system.KindOf(err).Ckptstore()
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

// read opens the store for one command that does not change it.
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

// data opens only the data directory, for commands that need no log.
func (a *app) data() (*data.Root, error) {
	return store.OpenData(a.location)
}
