package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// replayed is the final state that `replay` prints.
type replayed struct {
	Sequence    uint64          `json:"sequence"`
	Digest      string          `json:"digest"`                // of all projections as of Sequence
	ViewsEqual  *bool           `json:"views_equal,omitempty"` // at the log's end: whether the live views have the same digest
	Checkpoints []answer.Listed `json:"checkpoints"`
}

// replaying are the options of a replay.
type replaying struct {
	selection
	since  time.Time     // do not print events stored before; zero prints all
	then   answer.Moment // the end of the replay
	speed  *pacer
	listed bool // print events in table format too
}

func (a *app) replayCommand() *cobra.Command {
	o := replaying{selection: selection{from: 1}}
	since, until, speed := "", "", ""
	c := &cobra.Command{
		Use: "replay", Short: "Rebuild the state as of any point of the log", Args: console.Args(cobra.NoArgs),
		Long: `Fold the log in memory from its first event to --until-seq or --until-time, and print the
state at that point: the checkpoints, and the digest of all projections. At the end of
the log, compare the digest with that of the live views; if they differ, exit with code
6.

With --json, print each event as a JSON line, and the state as the last line,
{"replay": …}. --from-seq, --from-time and --run select the events to print, and --run
also the checkpoints. The whole log is folded in any case.

With --speed, print the events without --json too: as fast as possible (instant), at
the intervals at which they were stored (original), or faster or slower (10x, 0.5x).`,
		Example: `  ckptstore replay --until-seq 1200
  ckptstore replay --from-time 2026-11-21T14:00:00Z --speed 10x --run bert --json`,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if o.from == 0 {
				return console.Usagef("--from-seq 0: sequences count from 1")
			}
			if c.Flags().Changed("until-seq") && o.until == 0 {
				return console.Usagef("--until-seq 0: sequences count from 1")
			}
			if o.until > 0 && o.until < o.from {
				return console.Usagef("--until-seq %d is before --from-seq %d", o.until, o.from)
			}
			o.then = answer.Moment{Sequence: o.until}
			if until != "" {
				if o.until != 0 {
					return console.Usagef("--until-seq and --until-time: give one of them")
				}
				if o.then.At, err = parseTime("until-time", until); err != nil {
					return err
				}
			}
			if since != "" {
				if c.Flags().Changed("from-seq") {
					return console.Usagef("--from-seq and --from-time: give one of them")
				}
				if o.since, err = parseTime("from-time", since); err != nil {
					return err
				}
			}
			if since != "" && until != "" && o.then.At.Before(o.since) {
				return console.Usagef("--until-time %s is before --from-time %s", until, since)
			}
			o.listed = c.Flags().Changed("speed")
			if o.speed, err = parseSpeed(speed); err != nil {
				return err
			}
			return a.read(c.Context(), func(s *store.Store) error { return a.replay(c.Context(), s, o) })
		},
	}
	f := c.Flags()
	f.Uint64Var(&o.from, "from-seq", 1, "first sequence to print")
	f.StringVar(&since, "from-time", "", "print events stored from this time on, such as 2026-11-21T14:05:06Z")
	f.Uint64Var(&o.until, "until-seq", 0, "last sequence to fold (default: the end of the log)")
	f.StringVar(&until, "until-time", "", "fold events stored up to this time, such as 2026-11-21T14:05:06Z")
	f.StringVar(&o.run, "run", "", "print only events and checkpoints of this run")
	f.StringVar(&speed, "speed", "instant", "print events at this speed: instant, original, or a factor such as 10x")
	return c
}

// prints reports whether an event is printed.
func (o replaying) prints(r events.Recorded) bool {
	return r.Sequence >= o.from && !r.Stored.Before(o.since) && o.wants(r)
}

func (a *app) replay(ctx context.Context, s *store.Store, o replaying) error {
	last, err := s.Log.Last(ctx)
	switch {
	case err != nil:
		return err
	case o.until > last:
		return answer.PastEnd("until-seq", o.until, last)
	case o.until > 0:
		last = o.until
	}
	if o.from > last {
		return answer.PastEnd("from-seq", o.from, last)
	}
	asJSON := a.Format == "json" || a.Format == "jsonl"
	emitEvent := func(events.Recorded) error { return nil }
	if asJSON || o.listed {
		printEvent := a.eventPrinter()
		emitEvent = func(r events.Recorded) error {
			if !o.prints(r) {
				return nil
			}
			if err := o.speed.wait(ctx, r.Stored); err != nil {
				return err
			}
			return printEvent(r)
		}
	}
	state := projections.NewMemory()
	seq, err := answer.FoldTo(ctx, s, last, o.then, state, emitEvent)
	if err != nil {
		return err
	}
	out, err := asOf(state, seq, o.run)
	if err != nil {
		return err
	}
	if o.then.IsEnd() {
		if out.ViewsEqual, err = compareViews(ctx, s, seq, out.Digest); err != nil {
			return err
		}
	}
	if asJSON {
		err = json.NewEncoder(a.Out).Encode(map[string]replayed{"replay": out})
	} else {
		err = a.printReplay(out)
	}
	if err == nil && out.ViewsEqual != nil && !*out.ViewsEqual {
		return errFindings
	}
	return err
}

func asOf(state *projections.Memory, seq uint64, only string) (replayed, error) {
	out := replayed{Sequence: seq, Checkpoints: []answer.Listed{}}
	sum, err := projections.Digest(state)
	if err != nil {
		return out, err
	}
	out.Digest = fmt.Sprintf("%x", sum)
	runs, err := projections.Runs(state)
	if only != "" && err == nil {
		var run projections.Run
		run, err = projections.GetRun(state, only)
		runs = []projections.Run{run}
	}
	if err != nil {
		return out, err
	}
	for _, run := range runs {
		rows, err := projections.Checkpoints(state, run.Name, true)
		if err != nil {
			return out, err
		}
		for _, c := range rows {
			out.Checkpoints = append(out.Checkpoints, answer.ListedFrom(c))
		}
	}
	return out, nil
}

// compareViews compares a digest with that of the live views. It returns nil if the
// log has grown meanwhile: the digests are then of different sequences.
func compareViews(ctx context.Context, s *store.Store, until uint64, digest string) (*bool, error) {
	live, err := query.Ask(ctx, s.Views(), query.Digest, query.Params{})
	if err != nil {
		return nil, err
	}
	last, err := s.Log.Last(ctx)
	if err != nil || last != until {
		return nil, err
	}
	equal := live == digest
	return &equal, nil
}

func (a *app) printReplay(out replayed) error {
	return console.Emit(a.Console, out, out.Checkpoints, func(w *tabwriter.Writer, _ bool) {
		console.Row(w, "sequence", out.Sequence)
		console.Row(w, "digest", out.Digest)
		if out.ViewsEqual != nil {
			console.Row(w, "live views equal", *out.ViewsEqual)
		}
		fmt.Fprintln(w)
		console.Row(w, "RUN", "CHECKPOINT", "STEP", "STATE", "RANKS", "CONTINUES")
		for _, c := range out.Checkpoints {
			console.Row(w, c.Run, c.ID, c.Step, c.State, c.WorldSize, c.Parent)
		}
	})
}

// pacer spaces events by the intervals at which the log stored them, divided by speed.
// The zero pacer does not wait.
type pacer struct {
	speed float64 // 0: as fast as possible

	first time.Time // when the first event was stored
	begun time.Time // when it was replayed
}

// parseSpeed parses instant, original, or a factor such as "10x".
func parseSpeed(text string) (*pacer, error) {
	switch text {
	case "instant":
		return &pacer{}, nil
	case "original":
		return &pacer{speed: 1}, nil
	}
	factor, ok := strings.CutSuffix(text, "x")
	speed, err := strconv.ParseFloat(factor, 64)
	// Outside these bounds a wait could overflow a duration.
	if !ok || err != nil || !(speed >= 1e-3 && speed <= 1e9) {
		return nil, console.Usagef("--speed %q: want instant, original, or a factor such as 10x or 0.5x", text)
	}
	return &pacer{speed: speed}, nil
}

// wait returns when an event stored at the given time is due, or when ctx ends. It
// measures from the first event, so that delays do not add up. It does not wait if the
// clock was set back.
func (p *pacer) wait(ctx context.Context, stored time.Time) error {
	if p.speed == 0 {
		return ctx.Err()
	}
	if p.begun.IsZero() {
		p.first, p.begun = stored, time.Now()
	}
	after := time.Duration(float64(stored.Sub(p.first)) / p.speed)
	timer := time.NewTimer(time.Until(p.begun.Add(after)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// momentHelp describes the forms of a moment.
const momentHelp = `a sequence, or a time such as 2026-11-21, "2026-11-21 14:05:06" (local) or
2026-11-21T14:05:06Z, which means the last event stored by then`

// parseTime parses a time in the forms that commands print or accept.
func parseTime(flag, text string) (time.Time, error) {
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return at, nil
	}
	for _, form := range []string{time.DateTime, time.DateOnly} {
		if at, err := time.ParseInLocation(form, text, time.Local); err == nil {
			return at, nil
		}
	}
	return time.Time{}, console.Usagef("--%s %q: want a time as 2026-11-21, \"2026-11-21 14:05:06\" or 2026-11-21T14:05:06Z", flag, text)
}

func parseMoment(flag, text string) (answer.Moment, error) {
	if text == "" {
		return answer.Moment{}, nil
	}
	if seq, err := strconv.ParseUint(text, 10, 64); err == nil {
		if seq == 0 {
			return answer.Moment{}, console.Usagef("--%s 0: sequences count from 1", flag)
		}
		return answer.Moment{Sequence: seq}, nil
	}
	at, err := parseTime(flag, text)
	if err != nil {
		return answer.Moment{}, console.Usagef("--%s %q: want a sequence, or a time as 2026-11-21, \"2026-11-21 14:05:06\" or 2026-11-21T14:05:06Z", flag, text)
	}
	return answer.Moment{At: at}, nil
}

// asOfFlag adds --as-of to a command.
func asOfFlag(c *cobra.Command) *string {
	return c.Flags().String("as-of", "", "show the state as of a moment: "+momentHelp)
}
