package trainer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/api"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/container"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launches"
	"github.com/ckptstore/ckptstore/internal/observe"
	"github.com/ckptstore/ckptstore/internal/otlp"
	"github.com/ckptstore/ckptstore/internal/page"
	"github.com/ckptstore/ckptstore/internal/redact"
	"github.com/ckptstore/ckptstore/internal/services"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/signing"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/planner/retention"
)

const runHelp = `Run COMMAND as a group of workers, with the environment that torchrun gives
them. When a worker dies, the group restarts from the last committed checkpoint
of the run. To continue a run, use its name: the next job of that name resumes
where the last one ended.

If files of a checkpoint are missing or have another size (the trainer checks its
manifest, indexes and file sizes, not the bytes), the job prints a warning and resumes from the newest
complete checkpoint of the run instead. With --resume require, or a checkpoint
named by --resume, the job refuses to start.

  trainer run -- python3 train.py
  trainer run --name bert --nproc 4 --max-restarts 10 -- python3 train.py
  trainer run --name bert --resume bert@step-2000 train.py --lr 1e-4

After a failure, the log keeps what the worker wrote to $TORCHELASTIC_ERROR_FILE,
up to 16 KiB of its message and the last 64 KiB of its traceback. On a nearly
full disk, the job waits for room: metrics, saves and the ends of workers are recorded
when there is room. A save that does not fit is aborted, and the training continues.

A save returns when the worker's bytes are copied into a slot in shared memory.
A rank has --staging-slots slots, or one, with a warning, if --staging-memory
has no room for more. When all are in use, a save waits for a slot. With
--when-busy skip, the training continues without that checkpoint; with fail, the
save is an error, on all ranks alike.

With --hang-timeout, a rank hangs if it has made requests to the trainer and then
makes none for this long, while it waits for no answer. The trainer then prints
the stacks of all ranks, kills the group and restarts it; --max-restarts counts
it. Any request is a sign of life, and so is a heartbeat. A program that never
contacts the trainer, such as a plain script for torchrun, is not watched.
Without py-spy, a Python worker prints its stacks after
faulthandler.register(signal.SIGUSR1).

With --keep, old checkpoints of the run are deleted after each commit, in
parallel with the training. Checkpoints that are pinned, tagged, forked from or
being restored stay, and so does the newest.

` + torchrunHelp + `

The workers' output goes to the terminal unchanged, with the rank in front if there
are several, and to files below STORE/logs, which ckptstore logs reads.
--redirects, --tee and --local-ranks-filter work as in torchrun. A file is rotated
at --log-max-size, and the previous one kept; on a full disk the job continues
without files. ckptstore jobs lists the jobs of a run, ckptstore continue launches
the last one again.

The log keeps the command and the --set values forever, without secrets: values
of names that end with a word such as key, token, secret, password or
credentials, passwords in URLs, and well-known forms of tokens are [redacted]
there. Redaction is always on, and --redact adds names; the workers get all values.
ckptstore continue refuses a command with redacted values. A command that reads
its secrets from the environment can be continued.

When asked to end, the trainer exits after --preempt-grace (of a preemption),
--grace, --drain-timeout and 30 s at the latest, even if a disk or the log does not
answer.

In a pod of Kubernetes, the error that the trainer prints is also left in
/dev/termination-log, without secrets: kubectl shows it as the message of the container.
$CKPTSTORE_TERMINATION_LOG names another file, or is none.

With --http HOST:PORT, the trainer serves the HTTP API and the page of the store while the job
runs, on the coordinating node: see ckptstore ui. The job's record does not have these options,
so ckptstore continue serves nothing.

With --traces, the trainer sends a trace of each save and load of the store to a collector,
from the coordinating node. $OTEL_EXPORTER_OTLP_ENDPOINT and the other standard variables name it;
they alone send nothing, as the workers have them too. The job's record does not have this option.

The store is created if its directory does not exist. Durations must be positive.

` + supervisionHelp

type runOptions struct {
	use   string // name of the command
	store string
	name  string
	torchrunOptions
	nodesOptions
	backendOptions
	hangOptions
	token       string // of a job over several nodes: see jobToken
	maxRestarts int
	preload     []string
	resume      string
	keep        string
	annotate    string // name of this pod

	strictReplicas bool
	stagingSlots   int
	stagingMemory  string
	whenBusy       string
	set            []string
	redact         []string
	saveTimeout    time.Duration
	drain          time.Duration
	grace          time.Duration
	collective     time.Duration
	wait           time.Duration
	quiet          bool

	supervisionOptions
	web       api.Listen // of the HTTP API; without an address there is none
	traces    bool
	collector otlp.Config // of the traces
	signals   *stopSignals
	parts     Parts
	logsOptions
}

// runName is the name of the command that runs a job.
const runName = "run"

func runCommand(std console.Streams, signals *stopSignals, p Parts) *cobra.Command {
	o := runOptions{use: runName, signals: signals, parts: p, backendOptions: backendOptions{known: p.Backends}}
	c := &cobra.Command{
		Use:   runName + " [flags] -- COMMAND [ARG...]",
		Short: "Run a command as a group of workers, restarted from the last committed checkpoint",
		Long:  runHelp,
		RunE: func(c *cobra.Command, args []string) error {
			if c.Flags().Changed("name") && o.name == "" {
				return fmt.Errorf("%w: --name is empty; give the run a name, or leave the flag out", launch.ErrConfig)
			}
			if c.Flags().Changed("keep") && o.keep == "" {
				return fmt.Errorf("%w: --keep is empty; give a policy such as last=2, or leave the flag out", launch.ErrConfig)
			}
			o.noteSharing(c.Flags())
			if err := o.defaults(c.Flags(), os.LookupEnv); err != nil {
				return err
			}
			if o.web.Address != "" {
				if err := o.web.Validate(); err != nil {
					return fmt.Errorf("%w: %w", launch.ErrConfig, err)
				}
			}
			if o.traces {
				var err error
				if o.collector, err = otlp.FromEnvironment(os.Getenv); err != nil {
					return fmt.Errorf("%w: %w", launch.ErrConfig, err)
				}
			}
			o.noteFlags(c.Flags())
			return runJob(c.Context(), std, o, args)
		},
	}
	f := c.Flags()
	o.groupFlags(f)
	o.nodesOptions.flags(f)
	f.StringVar(&o.resume, "resume", "auto", "auto, none, require, a checkpoint reference, or the path of a PyTorch or safetensors checkpoint")
	f.StringVar(&o.keep, "keep", "", "after each commit, delete the run's checkpoints that this policy does not keep, such as last=2,best=1:loss:min (see ckptstore gc --help)")
	f.StringVar(&o.annotate, "annotate-pod", "", "in Kubernetes: after each commit, set the annotation "+lastCommit+" of this pod, which has this NAME")
	o.web.Flags(f, "")
	f.BoolVar(&o.traces, "traces", false, "send a trace of each save and load to the OpenTelemetry collector of $OTEL_EXPORTER_OTLP_ENDPOINT")
	return c
}

// groupFlags adds the flags of a group of workers on one node.
func (o *runOptions) groupFlags(f *pflag.FlagSet) {
	f.StringVar(&o.store, "store", envOr("CKPTSTORE_STORE", "ckpts"), "store: a directory, or a nats:// or tls:// URL ($CKPTSTORE_STORE)")
	f.StringVar(&o.name, "name", "", "name of the run; a job of the same name continues it (default: made from the command)")
	o.torchrunOptions.flags(f)
	o.backendOptions.flags(f)
	f.IntVar(&o.maxRestarts, "max-restarts", 3, "failures that are tolerated; -1 for any number")
	f.StringSliceVar(&o.preload, "preload", nil, "Python modules, such as torch, that a process in reserve for each rank imports in advance: a group that restarts does not wait for it. For commands that are a Python script or module")
	f.BoolVar(&o.strictReplicas, "strict-replicas", false, "compare replicas in every save (samples above 1 MiB), and abort a save in which they differ (default: compare in the first save, and warn)")
	f.IntVar(&o.stagingSlots, "staging-slots", 2, "saves of a rank that may be in shared memory at once")
	f.StringVar(&o.stagingMemory, "staging-memory", "", "maximum shared memory for all slots: a size such as 8GiB, or a percentage of the memory limit and of the free shared memory (default 40%)")
	f.StringVar(&o.whenBusy, "when-busy", string(staging.BusyWait), "what a save does when all slots are in use: wait, skip or fail")
	f.StringArrayVar(&o.set, "set", nil, "trial configuration, KEY=VALUE with a JSON or plain value; repeatable")
	f.StringSliceVar(&o.redact, "redact", nil, "more NAMES of options, variables or --set keys whose values stay out of the log, with commas between; repeatable")
	f.DurationVar(&o.saveTimeout, "save-timeout", 10*time.Minute, "longest time from the start of a save to its commit")
	f.DurationVar(&o.drain, "drain-timeout", 2*time.Minute, "longest time to finish staged saves after the workers have ended")
	f.DurationVar(&o.grace, "grace", 10*time.Second, "time between SIGTERM and SIGKILL")
	f.DurationVar(&o.collective, "collective-timeout", 10*time.Minute, "longest time that ranks wait for each other")
	f.DurationVar(&o.wait, "wait", 10*time.Second, "how long to wait for an owner of the store that does not answer")
	o.supervisionOptions.flags(f)
	o.hangOptions.flags(f)
	o.logsOptions.flags(f)
	f.BoolVarP(&o.quiet, "quiet", "q", false, "log warnings and errors only")
	// torchrun spells flags with "-" or "_".
	f.SetInterspersed(false)
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
	})
}

func envOr(name, otherwise string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return otherwise
}

func runJob(ctx context.Context, std console.Streams, o runOptions, args []string) (err error) {
	log := newLogger(std.Err, o.quiet)
	cfg, err := o.prepare(ctx, std, args, log)
	if err != nil {
		return err
	}
	where, err := o.placed(os.Getenv)
	if err != nil {
		return err
	}
	for _, note := range o.ineffective(where, o.asked) {
		log.Warn(note)
	}
	if where.max > 1 { // o has the timeouts from here on
		notes, err := o.conf(o.rdzvConf, o.asked)
		if err != nil {
			return err
		}
		for _, note := range notes {
			log.Warn(note)
		}
	}
	if o.logReplicas != 1 {
		if _, err := o.replicated(where); err != nil {
			return err
		}
	}
	if err := o.replication(&cfg, where); err != nil {
		return err
	}
	if where.max > 1 {
		return o.runMany(ctx, cfg, where)
	}
	return o.opened(ctx, cfg, store.Options{Location: o.store, Patience: o.wait, Logger: log}, func(ctx context.Context, st *store.Store, cfg launch.Config) error {
		return runOn(ctx, st, cfg, o.parts.Storage)
	})
}

// prepare returns the configuration of a job whose store is not open yet.
func (o runOptions) prepare(ctx context.Context, std console.Streams, args []string, log *slog.Logger) (launch.Config, error) {
	cfg, err := o.config(ctx, args, log)
	if err != nil {
		return cfg, err
	}
	if err := o.launch(&cfg); err != nil {
		return cfg, err
	}
	cfg.Withheld = []string{store.EnvToken, store.EnvTokenFile, store.EnvTLSKey, signing.EnvKey}
	o.signals.ofJob(cfg)
	if hidden := redact.Marked(append(cfg.Redact.Args(cfg.Launch.Flags), cfg.Redact.Args(cfg.Command)...)); len(hidden) > 0 {
		log.Info("secrets are redacted in the log; ckptstore continue will refuse this command", "arguments", hidden)
	}
	cfg.Backends, cfg.InitHook = o.parts.Backends, o.parts.InitHook
	cfg.Driver, cfg.Quiet = gpu.System{}, o.quiet
	cfg.Logger, cfg.Stdout, cfg.Stderr = log, &lines{to: std.Out}, &lines{to: std.Err}
	return cfg, nil
}

// opened opens the store of a job and calls run with it.
func (o runOptions) opened(ctx context.Context, cfg launch.Config, open store.Options, run func(context.Context, *store.Store, launch.Config) error) (err error) {
	log := cfg.Logger
	open.Served = o.logReplicas != 1
	if open.Owner == nil {
		if err := store.Ensure(ctx, o.store, o.wait, log); err != nil {
			return err
		}
	}
	st, err := o.open(ctx, open)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	if err := o.place(st, &cfg); err != nil {
		return err
	}
	var tracer *otlp.Tracer
	if o.traces && open.Owner == nil {
		tracer = otlp.Start(ctx, st, o.collector, otlp.Options{Version: release, Logger: log})
		defer tracer.Close()
	}
	if o.web.Address != "" && open.Owner == nil {
		if cfg.Output.Top != "" {
			o.web.Logs = append(o.web.Logs, cfg.Output.Top)
		}
		o.web.Logger, o.web.Version, o.web.Page = log, release, page.Handler()
		o.web.Observe = observe.Handler(st, observe.Options{Version: release, Logger: log, Traces: tracer})
		server, err := api.Serve(ctx, st, o.web)
		if err != nil {
			return fmt.Errorf("%w: %w", launch.ErrConfig, err)
		}
		defer func() { err = errors.Join(err, server.Close()) }()
		log.Info("HTTP API serves the store; ckptstore ui prints the link", "url", server.URL)
	}
	cfg.Launch.Recorded = func(ctx context.Context, started events.Recorded) {
		if err := recordLaunch(ctx, st, started); err != nil {
			level := slog.LevelWarn
			if os.Getenv(container.EnvService) != "" {
				level = slog.LevelDebug // a pod has no home, and its job starts it again
			}
			log.Log(ctx, level, "launch not recorded; ckptstore continue will ask", "run", cfg.Run, "error", err)
		}
	}
	if o.keep != "" {
		if cfg.Collect, err = keep(st, cfg.Run, o.keep, log); err != nil {
			return err
		}
	}
	if o.annotate != "" && open.Owner == nil {
		if cfg.Publish, err = publish(st, cfg.Run, o.annotate); err != nil {
			return err
		}
	}
	if cfg.Requests == nil {
		cfg.Requests = o.signals.preemptible()
	}
	return run(ctx, st, cfg)
}

// recordLaunch records for `ckptstore continue` by which event this user's
// trainer was launched.
func recordLaunch(ctx context.Context, st *store.Store, started events.Recorded) error {
	dir, err := os.Stat(".")
	if err != nil {
		return fmt.Errorf("working directory: %w", err)
	}
	return launches.Of(st.ID, st.Copy, started, dir).Record(ctx)
}

// runOn runs a job of a run that no other job runs. storage writes and reads its
// checkpoints; nil means the store's own.
func runOn(ctx context.Context, st *store.Store, cfg launch.Config, storage data.Storage) error {
	return leased(ctx, st, cfg, holdRun, func(ctx context.Context) error { return runLeased(ctx, st, cfg, storage, launch.Run) })
}

// holding takes the lease of a job's run. The context that it returns ends with the lease.
type holding func(ctx context.Context, st *store.Store, cfg launch.Config) (_ context.Context, release func() error, err error)

// leased calls run while it holds the lease of a job's run.
func leased(ctx context.Context, st *store.Store, cfg launch.Config, hold holding, run func(context.Context) error) error {
	ctx, release, err := hold(ctx, st, cfg)
	if running := (*store.RunningError)(nil); errors.As(err, &running) {
		return fmt.Errorf("%w, or choose another --name", err)
	}
	if err != nil {
		return err
	}
	defer func() {
		// The log has the result of the job. A lease that is not released
		// expires.
		if rerr := release(); rerr != nil {
			cfg.Logger.Warn("lease not released; it will expire", "run", cfg.Run, "error", rerr)
		}
	}()
	return run(ctx)
}

// runLeased runs a job that holds the lease of its run.
func runLeased(ctx context.Context, st *store.Store, cfg launch.Config, storage data.Storage, run func(context.Context, launch.Config, session.Store) error) (err error) {
	about := services.New(st, cfg.Logger)
	defer func() { err = errors.Join(err, about.Close()) }()
	cfg.Services = about
	return run(ctx, cfg, sessionStore(st, cfg, storage))
}

// leaseWait is how long a job over several nodes waits for the lease of its run: that of
// a coordinating node that is gone expires meanwhile, and its nodes come here.
const leaseWait = 30 * time.Second

// holdRun takes the lease of a job's run.
func holdRun(ctx context.Context, st *store.Store, cfg launch.Config) (_ context.Context, release func() error, err error) {
	until := time.Now().Add(leaseWait)
	for first := true; ; first = false {
		held, release, err := st.HoldRun(ctx, cfg.Run, cfg.Job)
		if cfg.Endpoint == nil || !errors.As(err, new(*store.RunningError)) || time.Now().After(until) {
			return held, release, err
		}
		if first {
			cfg.Logger.Warn("run has another job; waiting for the end of its lease", "error", err, "at_most", leaseWait)
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		}
	}
}

// sessionStore returns a job's part of a store.
func sessionStore(st *store.Store, cfg launch.Config, storage data.Storage) session.Store {
	return session.Store{
		ID: st.ID, Log: st.Log, Views: store.Queries{From: st.Views()}, Blobs: st.Blobs, Data: st.Data, Storage: storage, Foreign: store.OpenForeign,
		Conflict: func(err error) bool { return errors.Is(err, jetlog.ErrConflict) }, Unserved: store.Unserved,
		Runtime: st.Runtime, Shared: sharedMemory(cfg.Logger),
	}
}

// lines writes whole lines of several workers one at a time.
type lines struct {
	mu sync.Mutex
	to io.Writer
}

// Write implements io.Writer.
func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.to.Write(p)
}

// staging validates the flags of the staging slots.
func (o runOptions) staging() (memory staging.Memory, err error) {
	if o.stagingSlots < 1 || o.stagingSlots > 16 {
		return memory, fmt.Errorf("%w: --staging-slots %d: give a number from 1 to 16", launch.ErrConfig, o.stagingSlots)
	}
	switch staging.WhenBusy(o.whenBusy) {
	case staging.BusyWait, staging.BusySkip, staging.BusyFail:
	default:
		return memory, fmt.Errorf("%w: --when-busy %s: give wait, skip or fail", launch.ErrConfig, o.whenBusy)
	}
	if o.stagingMemory == "" {
		return memory, nil
	}
	if memory, err = staging.ParseMemory(o.stagingMemory); err != nil {
		return memory, fmt.Errorf("%w: --staging-memory: %w", launch.ErrConfig, err)
	}
	return memory, nil
}

// sharedMemory returns the directory for staging slots.
func sharedMemory(log *slog.Logger) string {
	dir, memory := shm.Dir()
	if !memory {
		log.Warn("no /dev/shm on this machine; staging on disk, which is slower", "dir", dir)
	}
	return dir
}

// keep returns the collection that a job runs after each commit.
func keep(st *store.Store, run, policy string, log *slog.Logger) (func(context.Context) error, error) {
	p, err := retention.Parse(policy)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		out, err := st.Collect(ctx, collection.Options{Runs: []string{run}, Policy: p, Apply: true})
		for _, c := range out.Checkpoints {
			switch {
			case c.Left != "":
				log.Warn("deleted checkpoint keeps its files for now", "checkpoint", c.ID, "because", c.Left)
			case c.Action == collection.Delete:
				log.Info("checkpoint deleted", "checkpoint", c.ID, "policy", policy, "freed", c.Freed)
			}
		}
		return err
	}, nil
}
