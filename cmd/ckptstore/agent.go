package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/internal/agent"
	"github.com/ckptstore/ckptstore/internal/services"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/store"
)

const agentHelp = `Serve a store to this user's processes that no trainer started, such as a
notebook or a plain python train.py, until idle for --idle or stopped. Processes
that join become the ranks of a job; the agent starts none of them and ends none.
When they are gone, or have said that they leave, what they had staged is
finished, and their job ends.

Programs start an agent themselves, by ckptstore agent start: it starts one in the
background if none answers, and any number of processes may do so at once. The
store is made if its directory does not exist. SIGTERM ends the sessions that are
left and finishes what they have staged.

Of a store that this user may not write, as on a read-only mount, checkpoints can be
looked into by their receipts, and nobody joins.

Exit codes: 0 ok, 1 failed, 2 usage, 4 no agent, 5 another agent serves the store,
10 no store, 11 locked.`

// agentOptions are what an agent is started with.
type agentOptions struct {
	idle, join, save, drain, collective time.Duration

	slots    int
	memory   string
	whenBusy string
	limit    time.Duration // of start
}

func (o *agentOptions) flags(f *pflag.FlagSet) {
	f.DurationVar(&o.idle, "idle", time.Minute, "stop after this long without sessions and requests; 0 for never")
	f.DurationVar(&o.join, "join-timeout", 2*time.Minute, "longest time until all ranks of a group have joined")
	f.DurationVar(&o.save, "save-timeout", 10*time.Minute, "longest time from the begin of a save to its commit")
	f.DurationVar(&o.drain, "drain-timeout", 2*time.Minute, "longest time to finish staged saves when processes have ended")
	f.DurationVar(&o.collective, "collective-timeout", 10*time.Minute, "longest time that ranks wait for each other")
	f.IntVar(&o.slots, "staging-slots", 2, "saves of a rank that may be in shared memory at once")
	f.StringVar(&o.memory, "staging-memory", "", "most shared memory for all slots: a size such as 8GiB, or a percentage (default 40%)")
	f.StringVar(&o.whenBusy, "when-busy", string(staging.BusyWait), "what a save does when all slots are in use: wait, skip or fail")
}

// session is what the options say of each session.
func (o agentOptions) session() (cfg session.Config, err error) {
	for name, d := range map[string]time.Duration{
		"join-timeout": o.join, "save-timeout": o.save, "drain-timeout": o.drain, "collective-timeout": o.collective,
	} {
		if d <= 0 {
			return cfg, usageError{fmt.Errorf("--%s %s: want a time above zero, such as 30s", name, d)}
		}
	}
	if o.idle < 0 {
		return cfg, usageError{fmt.Errorf("--idle %s: want a time, or 0 for never", o.idle)}
	}
	if o.slots < 1 || o.slots > 16 {
		return cfg, usageError{fmt.Errorf("--staging-slots %d: give a number from 1 to 16", o.slots)}
	}
	switch busy := staging.WhenBusy(o.whenBusy); busy {
	case staging.BusyWait, staging.BusySkip, staging.BusyFail:
	default:
		return cfg, usageError{fmt.Errorf("--when-busy %s: give wait, skip or fail", o.whenBusy)}
	}
	cfg = session.Config{
		SaveTimeout: o.save, DrainTimeout: o.drain, Collective: o.collective,
		StagingSlots: o.slots, WhenBusy: staging.WhenBusy(o.whenBusy),
	}
	if o.memory != "" {
		if cfg.StagingMemory, err = staging.ParseMemory(o.memory); err != nil {
			return cfg, usageError{fmt.Errorf("--staging-memory: %w", err)}
		}
	}
	return cfg, nil
}

func (a *app) agentCommand() *cobra.Command {
	var o agentOptions
	c := &cobra.Command{
		Use: "agent", Short: "Serve a store to processes that no trainer started", Long: agentHelp, Args: args(cobra.NoArgs),
		Example: "  ckptstore agent --store ckpts --idle 0\n  ckptstore agent start --store ckpts --json",
		RunE:    func(c *cobra.Command, _ []string) error { return a.serveAgent(c.Context(), o) },
	}
	o.flags(c.Flags())
	c.AddCommand(a.agentStartCommand(), a.agentStatusCommand(), a.agentStopCommand())
	return c
}

func (a *app) serveAgent(ctx context.Context, o agentOptions) (err error) {
	level := slog.LevelInfo
	if a.quiet {
		level = slog.LevelWarn
	}
	log := slog.New(slog.NewTextHandler(a.err, &slog.HandlerOptions{Level: level}))
	session, err := o.session()
	if err != nil {
		return err
	}
	if err := store.Ensure(ctx, a.location, a.wait, log); err != nil {
		return err
	}
	options := a.options()
	options.Logger = log
	at, err := store.Locate(ctx, options)
	if err != nil {
		return err
	}
	release, err := agent.Hold(ctx, at, a.wait)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	cfg := agent.Config{Idle: o.idle, Join: o.join, Session: session, Version: version(), Logger: log}
	if why := store.ReadOnly(a.location); why != nil {
		log.Warn("the store cannot be written: what its receipts name can be read, and nothing saved", "why", why)
		list, err := store.OpenReceipts(a.location, log)
		if err != nil {
			return err
		}
		about := services.Reading(list, log)
		cfg.Services, cfg.Busy = about, about.Busy
		err = agent.NewReader(cfg, at).Serve(ctx)
		return errors.Join(err, about.Close())
	}
	a.end += o.drain // in which it finishes what is staged
	return a.withOptions(ctx, options, func(s *store.Store) error {
		if !store.IsURL(a.location) {
			watch, stop := context.WithCancel(ctx)
			defer stop()
			exitWhenGone(watch, s.Location, log)
		}
		about := services.New(s, log)
		cfg.Services, cfg.Busy = about, about.Busy
		err := agent.New(cfg, s).Serve(ctx)
		return errors.Join(err, about.Close())
	})
}

// release is set by the build of a wheel.
var release string

// version is that of this program, for messages.
func version() string {
	if release != "" {
		return release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && (v == "" || v == "(devel)") {
			v = s.Value
		}
	}
	if v == "" {
		return "unknown"
	}
	return v
}
