package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/store"
	"github.com/ckptstore/ckptstore/web"
)

// selection says which events a command is about.
type selection struct {
	run    string
	kind   string
	from   uint64
	until  uint64
	follow bool
}

func (a *app) eventsCommand() *cobra.Command {
	var sel selection
	c := &cobra.Command{
		Use: "events [RUN]", Short: "Print the log, oldest first", Args: args(cobra.MaximumNArgs(1)),
		Long: `Print the events of the log, or of RUN, in the order of their sequence.
With --json or -o jsonl each line is one event as a JSON object.`,
		Example: "  ckptstore events bert --type checkpoint.committed\n  ckptstore events --follow --json",
		RunE: func(c *cobra.Command, runs []string) error {
			if len(runs) == 1 {
				sel.run = runs[0]
			}
			if sel.from == 0 {
				return usageError{errors.New("--from-seq 0: sequences count from 1")}
			}
			if sel.kind != "" && !events.Kind(sel.kind).Known() {
				return usageError{fmt.Errorf("--type %q: no such type; it is FAMILY.KIND, such as checkpoint.committed", sel.kind)}
			}
			return a.with(c.Context(), func(s *store.Store) error { return a.events(c.Context(), s, sel) })
		},
	}
	c.Flags().StringVar(&sel.kind, "type", "", "only events of this type, such as checkpoint.committed")
	c.Flags().Uint64Var(&sel.from, "from-seq", 1, "first sequence")
	c.Flags().Uint64Var(&sel.until, "until-seq", 0, "last sequence (default: the log's end)")
	c.Flags().BoolVarP(&sel.follow, "follow", "f", false, "go on with new events until interrupted")
	return c
}

func (a *app) events(ctx context.Context, s *store.Store, sel selection) error {
	if sel.run != "" {
		if err := knownRun(ctx, s.Views(), sel.run); err != nil {
			return err
		}
	}
	until, err := end(ctx, s, sel)
	if err != nil || until == 0 && !sel.follow {
		return err
	}
	emitEvent := a.eventPrinter()
	for r, err := range s.Log.Read(ctx, sel.from, until) {
		if err != nil {
			if sel.follow && ctx.Err() != nil {
				return nil
			}
			return err
		}
		if sel.run != "" && r.Scope.Run != sel.run || sel.kind != "" && string(r.Kind) != sel.kind {
			continue
		}
		if err := emitEvent(r); err != nil {
			return err
		}
	}
	return nil
}

func knownRun(ctx context.Context, views web.Source, run string) error {
	_, err := web.Ask(ctx, views, web.Run, web.Params{Run: run})
	return err
}

// end is the last sequence to read; 0 to follow, or when there is nothing.
func end(ctx context.Context, s *store.Store, sel selection) (uint64, error) {
	if sel.follow && sel.until == 0 {
		return 0, nil
	}
	last, err := s.Log.Last(ctx)
	if err != nil {
		return 0, err
	}
	if sel.until > last {
		return 0, fmt.Errorf("--until-seq %d: the log ends at %d", sel.until, last)
	}
	if sel.until > 0 {
		last = sel.until
	}
	if sel.from > last {
		return 0, fmt.Errorf("--from-seq %d: the log, or what is asked of it, ends at %d", sel.from, last)
	}
	return last, nil
}

// eventPrinter prints events one by one, so that a followed log is seen as it
// grows: as JSON lines, or in columns of fixed width.
func (a *app) eventPrinter() func(events.Recorded) error {
	if a.output == "json" || a.output == "jsonl" {
		enc := json.NewEncoder(a.out)
		return func(r events.Recorded) error { return enc.Encode(r) }
	}
	return func(r events.Recorded) error {
		data := string(r.Data)
		const most = 120
		if len(data) > most && a.output != "wide" {
			data = data[:most] + "…"
		}
		_, err := fmt.Fprintf(a.out, "%6d  %s  %-23s %-12s %-4s %s\n",
			r.Sequence, r.Time.Local().Format("15:04:05.000"), r.Kind, r.Scope.Run, r.Scope.Actor, data)
		return err
	}
}
