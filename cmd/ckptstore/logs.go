package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/launch/logs"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/terminal"
	"github.com/ckptstore/ckptstore/projections"
)

// logsQuery holds the flags of `logs`.
type logsQuery struct {
	job      string
	trial    string
	attempt  int
	rank     int
	out, err bool
	follow   bool
	tail     int
	since    string
	stamps   bool
}

func (a *app) logsCommand() *cobra.Command {
	var q logsQuery
	c := &cobra.Command{
		Use: "logs RUN[/TRIAL]", Short: "Print the output of a run's workers", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Print the standard output and standard error of the workers of the run's newest job, in
the order of time, with the rank in front if there are several. With --json each line
is one object.

With --follow, continue with new output until the job has ended. The files are in
STORE/logs, or in the directory of trainer run --log-dir, which must be accessible on
this machine.

On a terminal, the workers' colors and carriage returns are kept, and other control
characters are shown as escapes such as \x1b. Into a pipe or file the output is written
byte for byte.`,
		Example: "  ckptstore logs bert -f\n  ckptstore logs bert --rank 3 --stderr --tail 50\n  ckptstore logs bert --attempt 2 --since 10m\n  ckptstore logs bert --job 3f2a91c0 --json",
		RunE: func(c *cobra.Command, runs []string) error {
			s, err := q.selection(c, time.Now())
			if err != nil {
				return err
			}
			open := a.read
			if q.follow {
				open = a.with // a long-lived owner also does an owner's work
			}
			return open(c.Context(), func(st *store.Store) error { return a.logs(c.Context(), st, runs[0], q, s) })
		},
	}
	f := c.Flags()
	f.StringVar(&q.job, "job", "", "job ID, or the beginning or end of one (default: the newest job)")
	f.StringVar(&q.trial, "trial", "", "trial of a search; its output is apart from that of the others; RUN/TRIAL means the same")
	f.IntVar(&q.attempt, "attempt", 0, "print only this attempt (default: all attempts of the job)")
	f.IntVar(&q.rank, "rank", -1, "print only this rank (default: all)")
	f.BoolVar(&q.out, "stdout", false, "print only standard output")
	f.BoolVar(&q.err, "stderr", false, "print only standard error")
	f.BoolVarP(&q.follow, "follow", "f", false, "print new lines until the job has ended")
	f.IntVar(&q.tail, "tail", -1, "start with the last N existing lines (default: all)")
	f.StringVar(&q.since, "since", "", "print only lines since a duration ago, such as 10m, or since a time such as 2026-11-21T14:05:06Z")
	f.BoolVar(&q.stamps, "timestamps", false, "print the time of each line")
	return c
}

// selection checks the flags and returns the selected lines.
func (q logsQuery) selection(c *cobra.Command, now time.Time) (logs.Select, error) {
	s := logs.Select{Attempt: q.attempt, Rank: q.rank, Tail: q.tail}
	given := c.Flags().Changed
	switch {
	case given("attempt") && q.attempt < 1:
		return s, console.Usagef("--attempt %d: attempts count from 1", q.attempt)
	case given("rank") && q.rank < 0:
		return s, console.Usagef("--rank %d: ranks count from 0", q.rank)
	case given("tail") && q.tail < 0:
		return s, console.Usagef("--tail %d: want a number of lines", q.tail)
	case q.out && q.err:
		return s, console.Usagef("--stdout and --stderr: give one of them, or neither to print both")
	case q.out:
		s.Streams = []logs.Stream{logs.Out}
	case q.err:
		s.Streams = []logs.Stream{logs.Err}
	}
	if q.since == "" {
		return s, nil
	}
	if d, err := time.ParseDuration(q.since); err == nil && d >= 0 {
		s.Since = now.Add(-d)
		return s, nil
	}
	at, err := time.Parse(time.RFC3339, q.since)
	if err != nil {
		return s, console.Usagef("--since %q: want a duration such as 10m, or a time such as %s", q.since, now.UTC().Format(time.RFC3339))
	}
	s.Since = at
	return s, nil
}

func (a *app) logs(ctx context.Context, s *store.Store, run string, q logsQuery, sel logs.Select) error {
	run, trial, err := runOf(ctx, s.Views(), run, q.trial)
	if err != nil {
		return err
	}
	if trial, err = answer.TrialOf(ctx, s.Views(), run, trial); err != nil && !errors.Is(err, projections.ErrNotFound) {
		return err
	}
	output, err := answer.OutputOf(ctx, answer.Live(s), run, q.job, trial)
	if err != nil {
		return err
	}
	job := output.Job
	sel.Top = output.Top
	var ended func(context.Context) (bool, error)
	if q.follow {
		ended = func(ctx context.Context) (bool, error) {
			_, over, err := answer.JobOver(ctx, answer.Live(s), run, job.ID)
			return over, err
		}
	}
	printed := false
	visit := a.linePrinter(q, job.NProc*max(1, job.NNodes) > 1 && q.rank < 0)
	err = logs.Read(ctx, output.Dir, sel, ended, func(l logs.Line) error {
		printed = true
		return visit(l)
	})
	if err == nil && !printed && !a.Quiet {
		fmt.Fprintf(a.Err, "no such output of job %s\n", job.ID)
	}
	return err
}

// linePrinter returns a function that prints one line.
func (a *app) linePrinter(q logsQuery, prefixed bool) func(logs.Line) error {
	if a.Format == "json" || a.Format == "jsonl" {
		enc := json.NewEncoder(a.Out)
		return func(l logs.Line) error {
			return enc.Encode(answer.Logged(l))
		}
	}
	shown := console.OnTerminal(a.Raw)
	var line []byte
	return func(l logs.Line) error {
		line = line[:0]
		if q.stamps {
			line = l.Time.AppendFormat(line, "2006-01-02T15:04:05.000000Z07:00 ")
		}
		if prefixed {
			line = fmt.Appendf(line, "[rank%d] ", l.Rank)
		}
		if shown {
			line = terminal.AppendOutput(line, l.Text)
		} else {
			line = append(line, l.Text...)
		}
		_, err := a.Raw.Write(append(line, '\n'))
		return err
	}
}
