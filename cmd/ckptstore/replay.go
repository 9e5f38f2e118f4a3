package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/store"
	"github.com/ckptstore/ckptstore/web"
)

// replayed is what `replay` ends with.
type replayed struct {
	Sequence    uint64   `json:"sequence"`
	Digest      string   `json:"digest"`                // of all projections as of the sequence
	ViewsEqual  *bool    `json:"views_equal,omitempty"` // at the log's end: whether the live views have that digest
	Checkpoints []listed `json:"checkpoints"`
}

func (a *app) replayCommand() *cobra.Command {
	sel := selection{from: 1}
	until := ""
	c := &cobra.Command{
		Use: "replay", Short: "Rebuild the state as of any sequence from the log alone", Args: args(cobra.NoArgs),
		Long: `Fold the log from its first event to --until-seq or --until-time in memory and
print the state that everybody saw then: the checkpoints, and the digest of all
projections. At the log's end the digest is compared with the live views';
a difference exits with 6.

With --json each event is printed as one JSON line, and then the state as the
last line, {"replay": …}. --from-seq and --run choose which events are printed,
and --run which checkpoints; all of the log is folded in any case.`,
		RunE: func(c *cobra.Command, _ []string) error {
			then := moment{seq: sel.until}
			if until != "" {
				if sel.until != 0 {
					return usageError{errors.New("--until-seq and --until-time: give one of them")}
				}
				var err error
				if then.at, err = parseTime("until-time", until); err != nil {
					return err
				}
			}
			if sel.from == 0 {
				return usageError{errors.New("--from-seq 0: sequences count from 1")}
			}
			return a.with(c.Context(), func(s *store.Store) error { return a.replay(c.Context(), s, sel, then) })
		},
	}
	c.Flags().Uint64Var(&sel.from, "from-seq", 1, "first sequence to print")
	c.Flags().Uint64Var(&sel.until, "until-seq", 0, "last sequence (default: the log's end)")
	c.Flags().StringVar(&until, "until-time", "", "last time that an event was stored, such as 2026-11-21T14:05:06Z")
	c.Flags().StringVar(&sel.run, "run", "", "print only events and checkpoints of this run")
	return c
}

func (a *app) replay(ctx context.Context, s *store.Store, sel selection, then moment) error {
	last, err := s.Log.Last(ctx)
	switch {
	case err != nil:
		return err
	case sel.until > last:
		return fmt.Errorf("--until-seq %d: the log ends at %d", sel.until, last)
	case sel.until > 0:
		last = sel.until
	}
	if sel.from > last {
		return fmt.Errorf("--from-seq %d: the log, or what is asked of it, ends at %d", sel.from, last)
	}
	asJSON := a.output == "json" || a.output == "jsonl"
	emitEvent := func(events.Recorded) error { return nil }
	if asJSON {
		all := a.eventPrinter()
		emitEvent = func(r events.Recorded) error {
			if r.Sequence < sel.from || sel.run != "" && r.Scope.Run != sel.run {
				return nil
			}
			return all(r)
		}
	}
	state := projections.NewMemory()
	seq, err := foldTo(ctx, s, last, then, state, emitEvent)
	if err != nil {
		return err
	}
	out, err := asOf(state, seq, sel.run)
	if err != nil {
		return err
	}
	if then.isEnd() {
		if out.ViewsEqual, err = compareViews(ctx, s, seq, out.Digest); err != nil {
			return err
		}
	}
	if asJSON {
		err = json.NewEncoder(a.out).Encode(map[string]replayed{"replay": out})
	} else {
		err = a.printReplay(out)
	}
	if err == nil && out.ViewsEqual != nil && !*out.ViewsEqual {
		return errFindings
	}
	return err
}

func asOf(state *projections.Memory, seq uint64, only string) (replayed, error) {
	out := replayed{Sequence: seq, Checkpoints: []listed{}}
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
			out.Checkpoints = append(out.Checkpoints, fromRow(c))
		}
	}
	return out, nil
}

// compareViews asks the live views for their digest; nil when the log has
// grown meanwhile, so that the two stand for different sequences.
func compareViews(ctx context.Context, s *store.Store, until uint64, digest string) (*bool, error) {
	live, err := web.Ask(ctx, s.Views(), web.Digest, web.Params{})
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
	return emit(a, out, out.Checkpoints, func(w *tabwriter.Writer, _ bool) {
		row(w, "sequence", out.Sequence)
		row(w, "digest", out.Digest)
		if out.ViewsEqual != nil {
			row(w, "live views equal", *out.ViewsEqual)
		}
		fmt.Fprintln(w)
		row(w, "RUN", "CHECKPOINT", "STEP", "STATE", "RANKS", "CONTINUES")
		for _, c := range out.Checkpoints {
			row(w, c.Run, c.ID, c.Step, c.State, c.WorldSize, c.Parent)
		}
	})
}
