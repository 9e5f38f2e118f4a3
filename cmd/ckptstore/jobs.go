package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/store"
)

func (a *app) jobsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "jobs [RUN]", Short: "List jobs, newest first", Args: console.Args(cobra.MaximumNArgs(1)),
		Long: `List the jobs of RUN, or of all runs, newest first. Each launch of the trainer is a
job.

A job is running or stopping, has ended with an exit code, or is lost. A lost job did
not record its end, and no process holds its run, as after kill -9 or the loss of its
machine. A job on another machine counts as lost when its lease expires, after 15 s.
Continue a lost job like any other: ckptstore continue RUN.

FROM is the checkpoint from which the job's first attempt resumed; HEAD is the last
checkpoint that the job committed. GOODPUT, in wide, is the part of the time of all
attempts of the run that led to its present state: see "ckptstore show". LAST END, in wide, is the last
attempt of the job that has ended, and why.`,
		Example: "  ckptstore jobs\n  ckptstore jobs bert -o wide\n  ckptstore jobs bert --json | jq -r '.jobs[0].state'",
		RunE: func(c *cobra.Command, names []string) error {
			run := ""
			if len(names) == 1 {
				run = names[0]
			}
			return a.read(c.Context(), func(s *store.Store) error { return a.jobs(c.Context(), s, run) })
		},
	}
}

func (a *app) jobs(ctx context.Context, s *store.Store, run string) error {
	l, runs, err := answer.Jobs(ctx, answer.Live(s), run)
	if err != nil {
		return err
	}
	var parents []string
	for _, r := range runs {
		if r.Parent != "" && len(r.Jobs) == 0 {
			parents = append(parents, fmt.Sprintf("run %s was forked from %s and has no job yet; start the first with `trainer run --name %s`", r.Run, r.Parent, r.Run))
		}
	}
	err = console.Emit(a.Console, l, l.Jobs, func(w *tabwriter.Writer, wide bool) { printJobs(w, wide, l.Jobs) })
	if a.Quiet {
		return err
	}
	for _, text := range parents {
		fmt.Fprintln(a.Err, text)
	}
	if len(l.Jobs) == 0 && len(parents) == 0 {
		fmt.Fprintln(a.Err, "no jobs yet")
	}
	return err
}

func printJobs(w *tabwriter.Writer, wide bool, jobs []insight.Job) {
	head := []any{"JOB", "RUN", "STATE", "EXIT", "STARTED", "DURATION", "ATTEMPTS", "RESTARTS", "FROM", "HEAD", "HOST", "PID"}
	if wide {
		head = append(head, "WORKERS", "ASKED", "PARENT", "GOODPUT", "REASON", "LAST END", "UNHEALTHY", "COMMAND")
	}
	console.Row(w, head...)
	for _, j := range jobs {
		exit, took := "", ""
		if j.ExitCode != nil {
			exit = strconv.Itoa(*j.ExitCode)
		}
		if j.Seconds != nil {
			took = console.Roughly(time.Duration(*j.Seconds * float64(time.Second)))
		}
		id := j.Job[max(0, len(j.Job)-8):] // the end tells jobs apart; the beginning is the time
		if wide {
			id = j.Job
		}
		cells := []any{id, j.Run, j.State, exit, console.When(j.StartedAt), took, j.Attempts, j.Restarts, j.From, j.Head, j.Host, j.PID}
		if wide {
			cells = append(cells, fmt.Sprintf("%dx%d", j.NNodes, j.NProc), j.Asked, j.Parent, percent(j.Goodput), j.Reason, lastEnd(j.LastEnd), strings.Join(j.Unhealthy, "; "), quoted(j.Command))
		}
		console.Row(w, cells...)
	}
}

// printStanding prints how the time of a run was used, and what a kill would cost.
func printStanding(w *tabwriter.Writer, s *answer.Standing) {
	if s == nil {
		return
	}
	if s.Goodput != nil {
		u := s.Usage
		console.Row(w, "goodput", fmt.Sprintf("%s of %s: lost %s, restoring %s, blocked by saves %s, starts and ends %s", percent(s.Goodput),
			roughly(u.Wall), roughly(u.Lost), roughly(u.Restoring), roughly(u.Blocked), roughly(u.Other)))
	}
	if s.LastEnd != nil {
		console.Row(w, "last end", lastEnd(s.LastEnd))
	}
	for _, k := range s.KilledNow {
		name, text, _ := strings.Cut(k.Text, ": ")
		console.Row(w, name, text)
	}
}

// lastEnd describes the end of an attempt; "" for nil.
func lastEnd(e *insight.AttemptEnd) string {
	if e == nil {
		return ""
	}
	return e.String()
}

func roughly(seconds float64) string {
	return console.Roughly(time.Duration(seconds * float64(time.Second)))
}

// percent formats a part of a whole; "" for nil.
func percent(part *float64) string {
	if part == nil {
		return ""
	}
	return fmt.Sprintf("%.1f %%", 100**part)
}

// quoted returns a command as shell input. Words with unprintable characters are
// written in bash's $'...'.
func quoted(command []string) string {
	words := make([]string, len(command))
	for i, w := range command {
		if !utf8.ValidString(w) || strings.ContainsFunc(w, func(r rune) bool { return !unicode.IsPrint(r) }) {
			words[i] = escaped(w)
			continue
		}
		plain := w != "" && !strings.ContainsFunc(w, func(r rune) bool {
			return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-", r)
		})
		if words[i] = w; !plain {
			words[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
	}
	return strings.Join(words, " ")
}

// escaped writes a word in bash's $'...'.
func escaped(word string) string {
	var out strings.Builder
	out.WriteString("$'")
	for i, r := range word {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(word[i:], string(utf8.RuneError)):
			fmt.Fprintf(&out, `\x%02x`, word[i])
		case r == '\\', r == '\'':
			out.WriteString(`\` + string(r))
		case unicode.IsPrint(r):
			out.WriteRune(r)
		case r < utf8.RuneSelf:
			fmt.Fprintf(&out, `\x%02x`, r)
		default:
			fmt.Fprintf(&out, `\U%08x`, r)
		}
	}
	return out.String() + "'"
}
