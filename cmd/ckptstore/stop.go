package main

import (
	"context"
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/store"
)

const waitHelp = `

The command returns as soon as the request is in the log. With --wait it returns
when the job has ended, and prints how; without a value, --wait waits for up to
10m. (In other commands --wait is how long to wait for the owner of the store;
here that is always 10s.)

Exit codes: 4 no such run, 5 the run has no live job.`

func (a *app) stopCommand() *cobra.Command {
	return a.stopper(false, cobra.Command{
		Use: "stop RUN", Short: "Stop the live job of a run",
		Long:    "Ask the live job of a run to end now. Its workers receive a stop request; workers that\ndo not poll for it, or have not ended within the job's --grace, get SIGTERM. Staged\nsaves are committed, and the run can be continued. To save first, use ckptstore preempt." + waitHelp,
		Example: "  ckptstore stop bert\n  ckptstore stop bert --wait --reason \"wrong data\"\n  ckptstore stop bert --wait=1m --json",
	})
}

func (a *app) preemptCommand() *cobra.Command {
	return a.stopper(true, cobra.Command{
		Use: "preempt RUN", Short: "Save, then stop the live job of a run",
		Long:    "Ask the live job of a run to save at a step on which all its ranks agree, and then to\nend with exit code 75. The run can be continued." + waitHelp,
		Example: "  ckptstore preempt bert\n  ckptstore preempt bert --wait=5m",
	})
}

func (a *app) stopper(preempt bool, c cobra.Command) *cobra.Command {
	var reason string
	var wait time.Duration
	c.Args = console.Args(cobra.ExactArgs(1))
	c.RunE = func(c *cobra.Command, runs []string) error {
		if c.Flags().Changed("wait") && wait <= 0 {
			return console.Usagef("--wait=%s: want a time above zero, such as 30s", wait)
		}
		if reason == "" {
			reason = "ckptstore " + c.Name()
		}
		return a.with(c.Context(), func(s *store.Store) error {
			return a.stop(c.Context(), s, answer.Stopped{Run: runs[0], Preempt: preempt, Reason: reason}, wait)
		})
	}
	c.Flags().StringVar(&reason, "reason", "", "reason to record in the log")
	c.Flags().DurationVar(&wait, "wait", 0, "wait for the job to end, at most this long")
	c.Flags().Lookup("wait").NoOptDefVal = "10m"
	return &c
}

func (a *app) stop(ctx context.Context, s *store.Store, out answer.Stopped, wait time.Duration) error {
	if err := answer.KnownRun(ctx, s.Views(), out.Run); err != nil {
		return err
	}
	live, err := s.StopRun(ctx, out.Run, out.Reason, out.Preempt)
	if err != nil {
		return err
	}
	out.Job, out.Host, out.PID = live.Job, live.Host, live.PID
	text := fmt.Sprintf("asked job %s of run %s (process %d on %s) to stop", out.Job, out.Run, out.PID, out.Host)
	if out.Preempt {
		text = fmt.Sprintf("asked job %s of run %s (process %d on %s) to save and then stop", out.Job, out.Run, out.PID, out.Host)
	}
	if wait > 0 {
		if out.Ended, err = a.awaitEnd(ctx, s, out.Run, out.Job, wait); err != nil {
			return err
		}
		text = fmt.Sprintf("job %s of run %s %s", out.Job, out.Run, endText(*out.Ended))
	}
	return console.Emit(a.Console, out, []answer.Stopped{out}, func(w *tabwriter.Writer, _ bool) { fmt.Fprintln(w, text) })
}

// awaitEnd waits until a job has ended.
func (a *app) awaitEnd(ctx context.Context, s *store.Store, run, job string, limit time.Duration) (*insight.Job, error) {
	late := fmt.Errorf("job %s of run %s has not ended within %s; the request stands: wait longer, or end its process", job, run, limit)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, late)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		j, over, err := answer.JobOver(ctx, answer.Live(s), run, job)
		if err == nil && over {
			return &j, nil
		}
		if err != nil && ctx.Err() == nil {
			return nil, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if cause := context.Cause(ctx); errors.Is(cause, late) {
				return nil, cause
			}
			return nil, ctx.Err()
		}
	}
}

// endText describes how a job ended.
func endText(j insight.Job) string {
	if j.State == insight.Lost {
		return "is lost: it was killed before it recorded its end"
	}
	text := fmt.Sprintf("ended with exit code %d", *j.ExitCode)
	if j.Reason != "" {
		text += ": " + j.Reason
	}
	if j.Head != "" {
		text += "; its last checkpoint is " + j.Head
	}
	return text
}
