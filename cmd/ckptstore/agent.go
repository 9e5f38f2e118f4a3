package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/internal/agent"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/services"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/store"
)

const agentHelp = `Serve a store to processes of this user that no trainer started, such as a notebook
or a plain python train.py, until stopped or idle for --idle. The processes that join
become the ranks of a job. The agent neither starts nor ends them. When they exit or
leave, the agent finishes their staged saves and ends the job.

The Python library starts an agent by itself, with ckptstore agent start. That
command starts an agent in the background unless one is running; any number of
processes may run it at once. It creates the store if the directory does not exist.
On SIGTERM the agent ends its sessions and finishes their staged saves.

Where the ranks of a launch are on several machines, the agent of rank 0's machine
coordinates, and an agent of its own follows it on every other machine: --launch is the
key that all ranks of the launch know. Followers reach the store's log through the
coordinating agent, and their machine must see the same directory as the store. A
machine that is silent for --node-timeout is lost: its ranks count as gone.

If this user cannot write to the store, as on a read-only mount, the agent only reads
checkpoints, by their receipts; no process can join.

Exit codes: 0 ok, 1 failed, 2 usage, 4 no agent, 5 another agent serves the store,
10 no store, 11 locked.`

// agentOptions are the options of an agent.
type agentOptions struct {
	idle, join, save, drain, collective, silence time.Duration

	slots    int
	memory   string
	whenBusy string
	launch   string

	limit  time.Duration // of start
	rank   int
	master string
}

func (o *agentOptions) flags(f *pflag.FlagSet) {
	f.DurationVar(&o.idle, "idle", time.Minute, "stop after this long without sessions and requests; 0 means never")
	f.DurationVar(&o.join, "join-timeout", 2*time.Minute, "time limit for all ranks of a group to join")
	f.DurationVar(&o.save, "save-timeout", 10*time.Minute, "time limit from the start of a save to its commit")
	f.DurationVar(&o.drain, "drain-timeout", 2*time.Minute, "time limit for staged saves after their processes have ended")
	f.DurationVar(&o.collective, "collective-timeout", 10*time.Minute, "time limit for ranks to wait for each other")
	f.DurationVar(&o.silence, "node-timeout", 10*time.Second, "silence after which another machine of a launch is lost with its ranks")
	f.StringVar(&o.launch, "launch", "", "key of a launch over several machines")
	f.IntVar(&o.slots, "staging-slots", 2, "number of saves that a rank can have in shared memory at once")
	f.StringVar(&o.memory, "staging-memory", "", "limit on shared memory for all slots: a size such as 8GiB, or a percentage (default 40%)")
	f.StringVar(&o.whenBusy, "when-busy", string(staging.BusyWait), "what a save does if all slots are in use: wait, skip or fail")
}

// session returns the configuration of a session.
func (o agentOptions) session() (cfg session.Config, err error) {
	for name, d := range map[string]time.Duration{
		"join-timeout": o.join, "save-timeout": o.save, "drain-timeout": o.drain, "collective-timeout": o.collective,
	} {
		if d <= 0 || d > session.MaxDuration {
			return cfg, console.Usagef("--%s %s: want a time above zero, such as 30s, and at most %s", name, d, session.MaxDuration)
		}
	}
	if err := nodes.CheckTimeout(o.silence); err != nil {
		return cfg, console.Usagef("--node-timeout %w", err)
	}
	if o.idle < 0 || o.idle > session.MaxDuration {
		return cfg, console.Usagef("--idle %s: want a time of at most %s, or 0 for never", o.idle, session.MaxDuration)
	}
	if o.slots < 1 || o.slots > 16 {
		return cfg, console.Usagef("--staging-slots %d: give a number from 1 to 16", o.slots)
	}
	switch busy := staging.WhenBusy(o.whenBusy); busy {
	case staging.BusyWait, staging.BusySkip, staging.BusyFail:
	default:
		return cfg, console.Usagef("--when-busy %s: give wait, skip or fail", o.whenBusy)
	}
	cfg = session.Config{
		SaveTimeout: o.save, DrainTimeout: o.drain, Collective: o.collective,
		StagingSlots: o.slots, WhenBusy: staging.WhenBusy(o.whenBusy),
	}
	if o.memory != "" {
		if cfg.StagingMemory, err = staging.ParseMemory(o.memory); err != nil {
			return cfg, console.Usagef("--staging-memory: %w", err)
		}
	}
	return cfg, nil
}

func (a *app) agentCommand() *cobra.Command {
	var o agentOptions
	c := &cobra.Command{
		Use: "agent", Short: "Serve a store to processes that no trainer started", Long: agentHelp, Args: console.Args(cobra.NoArgs),
		Example: "  ckptstore agent --store ckpts --idle 0\n  ckptstore agent start --store ckpts --json",
		RunE:    func(c *cobra.Command, _ []string) error { return a.serveAgent(c.Context(), o) },
	}
	o.flags(c.Flags())
	c.AddCommand(a.agentStartCommand(), a.agentStatusCommand(), a.agentStopCommand())
	return c
}

func (a *app) serveAgent(ctx context.Context, o agentOptions) (err error) {
	level := slog.LevelInfo
	if a.Quiet {
		level = slog.LevelWarn
	}
	log := slog.New(slog.NewTextHandler(a.Err, &slog.HandlerOptions{Level: level}))
	session, err := o.session()
	if err != nil {
		return err
	}
	if o.launch == "" { // otherwise another machine has made it
		if err := store.Ensure(ctx, a.location, a.wait, log); err != nil {
			return err
		}
	}
	options := a.options()
	options.Logger = log
	at, err := store.Locate(ctx, options)
	if err != nil {
		return err
	}
	release, err := agent.Hold(ctx, at, o.launch, a.wait)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	cfg := agent.Config{Idle: o.idle, Join: o.join, Silence: o.silence, Session: session, Version: version(), Logger: log}
	if o.launch != "" {
		return a.followAgent(ctx, o, cfg, at, options)
	}
	if why := store.ReadOnly(a.location); why != nil {
		log.Warn("store not writable; serving reads by receipts, refusing saves", "why", why)
		list, err := store.OpenReceipts(a.location, log)
		if err != nil {
			return err
		}
		about := services.Reading(list, log)
		cfg.Services, cfg.Busy = about, about.Busy
		err = agent.NewReader(cfg, at).Serve(ctx)
		return errors.Join(err, about.Close())
	}
	a.end += o.drain // to finish staged saves
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

// followAgent serves the ranks of one launch on this machine, as a follower of the agent
// of rank 0's machine.
func (a *app) followAgent(ctx context.Context, o agentOptions, cfg agent.Config, at store.Whereabouts, options store.Options) (err error) {
	link, err := agent.JoinLaunch(ctx, at, cfg, o.launch)
	if err != nil {
		return err
	}
	defer agent.LeaveLaunch(link)
	options.Owner = agent.Owner(at, link)
	a.end += o.drain // to finish staged saves
	return a.withOptions(ctx, options, func(s *store.Store) error {
		about := services.Following(s, cfg.Logger, link.Request)
		cfg.Services, cfg.Busy = about, about.Busy
		err := agent.NewFollower(cfg, s, o.launch, link).Serve(ctx)
		return errors.Join(err, about.Close())
	})
}

// version returns the version of this program, which agents and messages compare.
func version() string { return console.Release(console.Module()) }

func (a *app) agentStartCommand() *cobra.Command {
	var o agentOptions
	c := &cobra.Command{
		Use: "start", Short: "Start an agent in the background, unless one is running", Args: console.Args(cobra.NoArgs),
		Long: `Start an agent of the store in the background, unless one is running, and print its
process. The store is created if the directory does not exist. The options apply to an
agent started by this command; a running agent keeps its own.

For a launch over several machines, give each rank --launch with the launch's key,
--rank, and --master with the host of rank 0. The command then waits up to
--join-timeout for the agent of rank 0's machine.`,
		Example: "  ckptstore agent start --store ckpts --json",
		RunE: func(c *cobra.Command, _ []string) error {
			if _, err := o.session(); err != nil {
				return err
			}
			if o.limit <= 0 {
				return console.Usagef("--start-timeout %s: want a time above zero, such as 30s", o.limit)
			}
			return a.startAgent(c, o)
		},
	}
	o.flags(c.Flags())
	c.Flags().DurationVar(&o.limit, "start-timeout", time.Minute, "time limit for the agent to answer")
	c.Flags().IntVar(&o.rank, "rank", 0, "with --launch: the rank that the agent is for")
	c.Flags().StringVar(&o.master, "master", "", "with --launch: the host of rank 0, as other machines reach it")
	return c
}

func (a *app) startAgent(c *cobra.Command, o agentOptions) error {
	ctx := c.Context()
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	var given []string
	c.Flags().Visit(func(f *pflag.Flag) {
		switch f.Name {
		case "store", "output", "json", "start-timeout", "launch", "rank", "master":
		default:
			given = append(given, "--"+f.Name+"="+f.Value.String())
		}
	})
	var at store.Whereabouts
	locate := func(ctx context.Context) (_ store.Whereabouts, err error) {
		if o.launch == "" || o.rank == 0 {
			if err := store.Ensure(ctx, a.location, a.wait, a.logger()); err != nil {
				return store.Whereabouts{}, err
			}
		}
		at, err = store.Locate(ctx, a.options())
		return at, err
	}
	args := given
	if o.launch != "" && !c.Flags().Changed("wait") {
		// Another machine's agent, which had rank 0 of the last launch, may still finish its saves.
		args = append(slices.Clone(given), "--wait="+(o.limit/2).String())
	}
	options := agent.StartOptions{Program: program, Args: args, Version: version(), Limit: o.limit}
	var card agent.Card
	var started bool
	if o.launch != "" {
		card, started, err = agent.StartRank(ctx, a.location, agent.Rank{Launch: o.launch, Rank: o.rank, Master: o.master, Limit: o.join}, options, locate)
	} else if _, err = locate(ctx); err == nil {
		card, started, err = agent.Start(ctx, at, options)
	}
	if err != nil {
		return err
	}
	if !started && len(given) > 0 && !a.Quiet {
		fmt.Fprintf(a.Err, "an agent (process %d) already serves the store with its own options; no effect: %s\n", card.PID, strings.Join(given, " "))
	}
	if a.Format == "json" || a.Format == "jsonl" {
		return json.NewEncoder(a.Out).Encode(card)
	}
	state := "is already running"
	if started {
		state = "started"
	}
	_, err = fmt.Fprintf(a.Out, "the agent of %s %s: process %d\n", at.Name, state, card.PID)
	return err
}

// found returns the agent of the store, or of a launch.
func (a *app) found(ctx context.Context, launch string) (agent.Card, agent.Status, error) {
	at, err := store.Locate(ctx, a.options())
	if err != nil {
		return agent.Card{}, agent.Status{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, a.wait)
	defer cancel()
	return agent.Find(ctx, at, launch)
}

func (a *app) agentStatusCommand() *cobra.Command {
	var launch string
	c := &cobra.Command{
		Use: "status", Short: "Show the agent of the store and its sessions", Args: console.Args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			_, s, err := a.found(c.Context(), launch)
			if err != nil {
				return err
			}
			return a.printStatus(s)
		},
	}
	c.Flags().StringVar(&launch, "launch", "", launchHelp)
	return c
}

// launchHelp describes --launch of commands for a running agent.
const launchHelp = "the agent that follows another machine's in the launch with this key"

func (a *app) printStatus(s agent.Status) error {
	return console.Emit(a.Console, s, s.Sessions, func(w *tabwriter.Writer, _ bool) {
		text := fmt.Sprintf("the agent of %s: process %d, version %s", s.Location, s.PID, s.Version)
		if s.Stopping != "" {
			text += "; it takes no new sessions (" + s.Stopping + ")"
		}
		if s.Busy != "" {
			text += "; " + s.Busy
		}
		if s.Follows != "" {
			text += "; it follows the agent on " + s.Follows
		}
		if len(s.Launches) > 0 {
			text += "; it coordinates launches over several machines: " + strings.Join(s.Launches, " ")
		}
		fmt.Fprintln(w, text)
		if len(s.Sessions) == 0 {
			return
		}
		console.Row(w, "RUN", "TRIAL", "STATE", "RANKS", "ATTEMPT", "JOB", "PROCESSES")
		for _, g := range s.Sessions {
			console.Row(w, g.Run, g.Trial, g.State, g.WorldSize, g.Attempt, g.Job, strings.Trim(fmt.Sprint(g.PIDs), "[]"))
		}
	})
}

func (a *app) agentStopCommand() *cobra.Command {
	var now bool
	var wait time.Duration
	var reason, launch string
	c := &cobra.Command{
		Use: "stop", Short: "Stop the agent of the store", Args: console.Args(cobra.NoArgs),
		Long: `Ask the agent to accept no new sessions, and to end when its last session ends. With
--now it ends its sessions at once: it finishes staged saves and refuses further
requests. The processes themselves keep running.

With --wait the command returns when the agent has ended; without a value, --wait
waits for up to 10m. (In other commands --wait is how long to wait for the owner of
the store.)`,
		Example: "  ckptstore agent stop --store ckpts --wait\n  ckptstore agent stop --store ckpts --now --wait=1m",
		RunE: func(c *cobra.Command, _ []string) error {
			if c.Flags().Changed("wait") && wait <= 0 {
				return console.Usagef("--wait=%s: want a time above zero, such as 30s", wait)
			}
			card, _, err := a.found(c.Context(), launch)
			if err != nil {
				return err
			}
			s, err := agent.Stop(c.Context(), card, agent.StopRequest{Now: now, Reason: reason})
			if err != nil {
				return err
			}
			if wait > 0 {
				ctx, cancel := context.WithTimeout(c.Context(), wait)
				defer cancel()
				if err := agent.Gone(ctx, card); err != nil {
					return fmt.Errorf("%w; list its sessions with `ckptstore agent status`, or end them with --now", err)
				}
				if a.Format == "table" || a.Format == "wide" {
					_, err := fmt.Fprintf(a.Out, "the agent of %s: process %d has ended\n", s.Location, s.PID)
					return err
				}
			}
			return a.printStatus(s)
		},
	}
	f := c.Flags()
	f.StringVar(&launch, "launch", "", launchHelp)
	f.BoolVar(&now, "now", false, "end its sessions at once; staged saves are finished")
	f.StringVar(&reason, "reason", "ckptstore agent stop", "reason to record in the agent's log")
	f.DurationVar(&wait, "wait", 0, "wait for the agent to end, at most this long")
	f.Lookup("wait").NoOptDefVal = "10m"
	return c
}
