package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/internal/agent"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
)

func (a *app) agentStartCommand() *cobra.Command {
	var o agentOptions
	c := &cobra.Command{
		Use: "start", Short: "Start an agent in the background, unless one answers", Args: console.Args(cobra.NoArgs),
		Long: `Make sure that an agent serves the store, and say where. The store is made if its
directory does not exist. Options are those of an agent that is started by this;
one that runs already keeps its own.`,
		Example: "  ckptstore agent start --store ckpts --json",
		RunE: func(c *cobra.Command, _ []string) error {
			if _, err := o.session(); err != nil {
				return err
			}
			if o.limit <= 0 {
				return console.Usagef("--start-timeout %s: want a time above zero, such as 30s", o.limit)
			}
			return a.startAgent(c, o.limit)
		},
	}
	o.flags(c.Flags())
	c.Flags().DurationVar(&o.limit, "start-timeout", time.Minute, "longest time until the agent answers")
	return c
}

func (a *app) startAgent(c *cobra.Command, limit time.Duration) error {
	ctx := c.Context()
	if err := store.Ensure(ctx, a.location, a.wait, a.logger()); err != nil {
		return err
	}
	at, err := store.Locate(ctx, a.options())
	if err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	var given []string
	c.Flags().Visit(func(f *pflag.Flag) {
		switch f.Name {
		case "store", "output", "json", "start-timeout":
		default:
			given = append(given, "--"+f.Name+"="+f.Value.String())
		}
	})
	card, started, err := agent.Start(ctx, at, agent.StartOptions{Program: program, Args: given, Version: version(), Limit: limit})
	if err != nil {
		return err
	}
	if !started && len(given) > 0 && !a.Quiet {
		fmt.Fprintf(a.Err, "an agent (process %d) serves the store already, with its own options: %s has no effect\n", card.PID, strings.Join(given, " "))
	}
	if a.Format == "json" || a.Format == "jsonl" {
		return json.NewEncoder(a.Out).Encode(card)
	}
	says := "serves already"
	if started {
		says = "is started"
	}
	_, err = fmt.Fprintf(a.Out, "the agent of %s %s: process %d\n", at.Name, says, card.PID)
	return err
}

// found is the agent of the store.
func (a *app) found(ctx context.Context) (agent.Card, agent.Status, error) {
	at, err := store.Locate(ctx, a.options())
	if err != nil {
		return agent.Card{}, agent.Status{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, a.wait)
	defer cancel()
	return agent.Find(ctx, at)
}

func (a *app) agentStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Say which agent serves the store, and whom it serves", Args: console.Args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			_, s, err := a.found(c.Context())
			if err != nil {
				return err
			}
			return a.printStatus(s)
		},
	}
}

func (a *app) printStatus(s agent.Status) error {
	return console.Emit(a.Console, s, s.Sessions, func(w *tabwriter.Writer, _ bool) {
		says := fmt.Sprintf("the agent of %s: process %d, version %s", s.Location, s.PID, s.Version)
		if s.Stopping != "" {
			says += "; it takes no new sessions: " + s.Stopping
		}
		if s.Busy != "" {
			says += "; " + s.Busy
		}
		fmt.Fprintln(w, says)
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
	var reason string
	c := &cobra.Command{
		Use: "stop", Short: "Ask the agent of the store to stop", Args: console.Args(cobra.NoArgs),
		Long: `Ask the agent to take no new sessions, and to end with those that it has. With
--now they are ended at once: what they have staged is finished, and what their
processes ask for after that is refused. The processes themselves go on.

With --wait it returns when the agent has ended; alone, the flag waits for up to
10m. (Of other commands --wait is how long to wait for the owner of the store.)`,
		Example: "  ckptstore agent stop --store ckpts --wait\n  ckptstore agent stop --store ckpts --now --wait=1m",
		RunE: func(c *cobra.Command, _ []string) error {
			if c.Flags().Changed("wait") && wait <= 0 {
				return console.Usagef("--wait=%s: want a time above zero, such as 30s", wait)
			}
			card, _, err := a.found(c.Context())
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
					return fmt.Errorf("%w; its sessions are listed by `ckptstore agent status`, and --now ends them", err)
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
	f.BoolVar(&now, "now", false, "end its sessions; what they have staged is finished")
	f.StringVar(&reason, "reason", "ckptstore agent stop", "why, for the agent's log")
	f.DurationVar(&wait, "wait", 0, "wait until the agent has ended, at most so long")
	f.Lookup("wait").NoOptDefVal = "10m"
	return c
}
