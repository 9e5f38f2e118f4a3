package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// jobsListing is the output of `jobs --json`.
type jobsListing struct {
	Store string        `json:"store"`
	Jobs  []insight.Job `json:"jobs"`
}

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
attempts of the run that led to its present state: see "ckptstore show".`,
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
	if run != "" {
		if err := knownRun(ctx, s.Views(), run); err != nil {
			return err
		}
	}
	runs, err := readRuns(ctx, s, run)
	if err != nil {
		return err
	}
	l := jobsListing{Store: s.ID, Jobs: []insight.Job{}}
	var parents []string
	for _, r := range runs {
		l.Jobs = append(l.Jobs, r.List(time.Now())...)
		if r.Parent != "" && len(r.Jobs) == 0 {
			parents = append(parents, fmt.Sprintf("run %s was forked from %s and has no job yet; start the first with `trainer run --name %s`", r.Run, r.Parent, r.Run))
		}
	}
	slices.SortStableFunc(l.Jobs, func(x, y insight.Job) int { return y.StartedAt.Compare(x.StartedAt) })
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
		head = append(head, "WORKERS", "ASKED", "PARENT", "GOODPUT", "REASON", "UNHEALTHY", "COMMAND")
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
			cells = append(cells, fmt.Sprintf("%dx%d", j.NNodes, j.NProc), j.Asked, j.Parent, percent(j.Goodput), j.Reason, strings.Join(j.Unhealthy, "; "), quoted(j.Command))
		}
		console.Row(w, cells...)
	}
}

// standing is how the time of a run was used, and what it would cost to kill it now.
type standing struct {
	Run     string            `json:"run"`
	State   string            `json:"state"` // of its newest job; empty without one
	Usage   projections.Usage `json:"usage"`
	Goodput *float64          `json:"goodput,omitempty"` // the part of the time that led to the present
	// KilledNow has one verdict for each trial of the live job; none if no job is live.
	KilledNow []insight.KilledNow `json:"killed_now,omitempty"`
}

// standingOf reads the standing of a run.
func standingOf(ctx context.Context, s *store.Store, run string) (*standing, error) {
	r, err := readRun(ctx, s, run)
	if err != nil {
		return nil, err
	}
	out := &standing{Run: run, Usage: r.Usage}
	if part, ok := insight.Goodput(r.Usage); ok {
		out.Goodput = &part
	}
	jobs := r.List(time.Now())
	if len(jobs) == 0 {
		return out, nil
	}
	if out.State = jobs[0].State; jobs[0].Over() {
		return out, nil
	}
	now, err := query.Ask(ctx, s.Views(), query.Standing, query.Params{Run: run})
	if err != nil {
		return nil, err
	}
	for _, t := range now.Trials {
		if t.Trial.Job == r.Live {
			out.KilledNow = append(out.KilledNow, insight.IfKilled(t))
		}
	}
	return out, nil
}

func (s *standing) show(w *tabwriter.Writer) {
	if s == nil {
		return
	}
	if s.Goodput != nil {
		u := s.Usage
		console.Row(w, "goodput", fmt.Sprintf("%s of %s: lost %s, restoring %s, blocked by saves %s, starts and ends %s", percent(s.Goodput),
			roughly(u.Wall), roughly(u.Lost), roughly(u.Restoring), roughly(u.Blocked), roughly(u.Other)))
	}
	for _, k := range s.KilledNow {
		name, text, _ := strings.Cut(k.Text, ": ")
		console.Row(w, name, text)
	}
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

// readRun reads the jobs of a run.
func readRun(ctx context.Context, s *store.Store, run string) (insight.RunJobs, error) {
	runs, err := readRuns(ctx, s, run)
	if err != nil || len(runs) == 0 {
		return insight.RunJobs{Run: run}, err
	}
	return runs[0], nil
}

// readRuns reads the jobs of a run, or of all runs, with one query. For a run with
// a job that has not ended, it checks the live job and then reads the jobs again: a
// job that has still not ended was live at the check, or is lost.
func readRuns(ctx context.Context, s *store.Store, run string) ([]insight.RunJobs, error) {
	rows, err := query.Ask(ctx, s.Views(), query.Launches, query.Params{Run: run})
	if err != nil {
		return nil, err
	}
	runs := make([]insight.RunJobs, len(rows))
	for i, row := range rows {
		r := &runs[i]
		r.Take(row)
		if open := slices.ContainsFunc(r.Jobs, func(j projections.Job) bool { return !j.Ended }); !open {
			continue
		}
		before := r.Jobs
		live, err := s.LiveJob(ctx, r.Run)
		if err != nil {
			return nil, err
		}
		r.Live = ""
		if live != nil {
			r.Live = live.Job
		}
		again, err := query.Ask(ctx, s.Views(), query.Launches, query.Params{Run: r.Run})
		if err != nil {
			return nil, err
		}
		if len(again) > 0 {
			r.Take(again[0])
		}
		// Drop jobs that started after the check, which would count as lost.
		r.Jobs = slices.DeleteFunc(r.Jobs, func(j projections.Job) bool {
			return !slices.ContainsFunc(before, func(b projections.Job) bool { return b.ID == j.ID })
		})
	}
	return runs, nil
}

// findJob returns the job with an ID, given in full or by its beginning or end. For ""
// it returns the newest job.
func findJob(r insight.RunJobs, run, id string) (projections.Job, error) {
	var found []projections.Job
	for _, j := range r.Jobs {
		switch {
		case id == "" || j.ID == id:
			return j, nil
		case strings.HasPrefix(j.ID, id) || strings.HasSuffix(j.ID, id):
			found = append(found, j)
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return projections.Job{}, console.Usagef("--job %q: run %q has %d such jobs; give more of the ID, see `ckptstore jobs %s -o wide`", id, run, len(found), run)
	case id == "":
		return projections.Job{}, &projections.NotFoundError{What: "job of run", Ref: run, Hint: fmt.Sprintf("it has none yet; `trainer run --name %s` starts one", run)}
	}
	return projections.Job{}, &projections.NotFoundError{What: "job of run " + run, Ref: id, Hint: fmt.Sprintf("`ckptstore jobs %s -o wide` lists them", run)}
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
