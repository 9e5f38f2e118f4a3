package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/terminal"
	"github.com/ckptstore/ckptstore/projections"
)

// selection selects events of the log.
type selection struct {
	run    string
	trial  string           // empty: all
	actor  string           // see [events.Event].Principal; "": any
	types  []events.Pattern // empty: all
	from   uint64
	until  uint64 // 0: the end of the log
	follow bool
	start  string // --from of `events`, resolved to from
	cursor string
}

// wants reports whether an event is of the selected run, trial, sender and types.
func (sel selection) wants(r events.Recorded) bool {
	if sel.run != "" && r.Scope.Run != sel.run {
		return false
	}
	if sel.trial != "" && r.Scope.Trial != sel.trial {
		return false
	}
	if sel.actor != "" && r.Principal != sel.actor {
		return false
	}
	return len(sel.types) == 0 || slices.ContainsFunc(sel.types, func(p events.Pattern) bool { return p.Match(r.Kind) })
}

func (a *app) eventsCommand() *cobra.Command {
	var sel selection
	var types []string
	c := &cobra.Command{
		Use: "events [RUN[/TRIAL]]", Short: "Print the events of the log, or follow it", Args: console.Args(cobra.MaximumNArgs(1)),
		Long: `Print the events of the log, or of RUN, in the order of their sequence. With --json or
-o jsonl, each line is one event: a CloudEvent 1.0 in structured mode, whose extensions
sequence and stored give its place in the log. The extension ckptactor, and the column
before the body with -o wide, is the sender of the event as identified by the owner of
the store: token, user:NAME, cert:NAME or uid:NUMBER. --actor prints the events of one
sender. The extension ckptsig is the signature of a decision, and the next column with
-o wide the key that it names; "ckptstore audit verify" and "ckptstore verify --log" check it.

--type can be repeated; checkpoint.* matches all types of checkpoint. --from is all, last
(the newest matching event), new (only events appended from now on; needs --follow) or a
sequence.

With --cursor NAME, the store keeps the position of this subscriber, and the next call
with that name continues after it, on any machine. --from is where a new cursor starts.
The cursor moves when an event was printed: after a crash an event may be printed again,
and none is left out. A reader of a pipe that is killed loses what it had not read. A second concurrent subscriber of the same name exits with code 5.

--follow continues when another process takes over as owner of the store.`,
		Example: `  ckptstore events bert --type checkpoint.committed
  ckptstore events --follow --type checkpoint.committed --run bert --from last --json
  ckptstore events --follow --type 'checkpoint.*' --cursor alerts
  ckptstore events cursors`,
		RunE: func(c *cobra.Command, runs []string) error {
			if len(runs) == 1 {
				if sel.run != "" && sel.run != runs[0] {
					return console.Usagef("run %q and --run %q: give one of them", runs[0], sel.run)
				}
				sel.run = runs[0]
			}
			if c.Flags().Changed("until-seq") && sel.until == 0 {
				return console.Usagef("--until-seq 0: sequences count from 1")
			}
			if kind, name, _ := strings.Cut(sel.actor, ":"); sel.actor != "" && sel.actor != "token" && (name == "" || kind != "user" && kind != "cert" && kind != "uid") {
				return console.Usagef("--actor %s: want user:NAME, cert:NAME, uid:NUMBER or token; the column of `ckptstore events -o wide` has them", sel.actor)
			}
			if sel.actor != "" && sel.start == "last" {
				return console.Usagef("--from last does not go with --actor: choose a sequence")
			}
			if err := sel.parse(types); err != nil {
				return err
			}
			open := a.read
			if sel.cursor != "" || sel.follow {
				open = a.with // to move the cursor, and because a long-lived owner also does an owner's work
			}
			return open(c.Context(), func(s *store.Store) error { return a.events(c.Context(), s, sel) })
		},
	}
	f := c.Flags()
	f.StringVar(&sel.run, "run", "", "print only events of this run, or RUN/TRIAL")
	f.StringVar(&sel.actor, "actor", "", "print only events of this sender: user:NAME, cert:NAME, uid:NUMBER or token")
	f.StringArrayVar(&types, "type", nil, "print only events of this type, such as checkpoint.committed or checkpoint.* (repeatable)")
	f.StringVar(&sel.start, "from", "all", "where to start: all, last, new or a sequence")
	f.Uint64Var(&sel.until, "until-seq", 0, "last sequence to print (default: the end of the log)")
	f.BoolVarP(&sel.follow, "follow", "f", false, "print new events until interrupted")
	f.StringVar(&sel.cursor, "cursor", "", "continue after the last event of this cursor; a name of up to 64 bytes")
	c.AddCommand(a.cursorsCommand())
	return c
}

// parse parses the flags, and checks what it can without a store.
func (sel *selection) parse(types []string) error {
	for _, text := range types {
		p, err := events.ParsePattern(text)
		if err != nil {
			return console.Usagef("--type: %w", err)
		}
		sel.types = append(sel.types, p)
	}
	switch sel.start {
	case "all":
		sel.from = 1
	case "last":
	case "new":
		if !sel.follow {
			return console.Usagef("--from new needs --follow")
		}
	default:
		seq, err := strconv.ParseUint(sel.start, 10, 64)
		if err != nil || seq == 0 {
			return console.Usagef("--from %q: want all, last, new or a sequence from 1 on", sel.start)
		}
		sel.from = seq
	}
	if sel.until > 0 && sel.until < sel.from {
		return console.Usagef("--until-seq %d is before --from %d", sel.until, sel.from)
	}
	return nil
}

func (a *app) events(ctx context.Context, s *store.Store, sel selection) (err error) {
	if sel.run != "" {
		run, trial, err := answer.Named(ctx, s.Views(), sel.run)
		switch {
		case sel.follow && errors.Is(err, projections.ErrNotFound):
			a.logger().Warn("run not found; waiting for it to start", "run", sel.run)
		case err != nil:
			return err
		default:
			sel.run, sel.trial = run, trial
		}
	}
	within, note := ctx, func(uint64, bool) {}
	if sel.cursor != "" {
		held, sub, err := s.Subscribe(ctx, sel.cursor)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, sub.Close(ctx)) }()
		within, note = held, func(seq uint64, printed bool) {
			if printed {
				sub.Handled(seq)
			} else {
				sub.Passed(seq)
			}
		}
		if at := sub.Sequence(); at > 0 {
			sel.start, sel.from = "cursor", at+1
		}
	}
	until, some, err := sel.bounds(ctx, s)
	if err != nil || !some {
		return err
	}
	emitEvent := a.eventPrinter()
	for r, err := range s.Log.Read(within, sel.from, until) {
		if err != nil {
			if sel.follow && ctx.Err() != nil {
				return nil
			}
			return err
		}
		wanted := sel.wants(r)
		if wanted {
			if err := emitEvent(r); err != nil {
				return fmt.Errorf("print event %d: %w", r.Sequence, err)
			}
		}
		note(r.Sequence, wanted)
	}
	return nil
}

// bounds sets the first sequence and returns the last, which is 0 to follow without
// end. some is false if there is no event to print.
func (sel *selection) bounds(ctx context.Context, s *store.Store) (until uint64, some bool, err error) {
	last, err := s.Log.Last(ctx)
	if err != nil {
		return 0, false, err
	}
	switch {
	case sel.start == "new":
		sel.from = last + 1
	case sel.start == "last":
		if sel.from, err = s.Log.Latest(ctx, sel.subjects()...); err != nil {
			return 0, false, err
		}
		if sel.from == 0 { // none matches yet
			sel.from = last + 1
		}
	case sel.start != "cursor" && sel.from > last && !(sel.follow && sel.from == last+1):
		return 0, false, fmt.Errorf("%w; wait for new events with --from new --follow", answer.PastEnd("from", sel.from, last))
	}
	switch {
	case sel.until > 0 && sel.until < sel.from:
		if sel.start != "cursor" {
			err = console.Usagef("--until-seq %d is before the first sequence to print, %d", sel.until, sel.from)
		}
		return 0, false, err
	case sel.follow:
		return sel.until, true, nil
	case sel.until > last:
		return 0, false, answer.PastEnd("until-seq", sel.until, last)
	case sel.until > 0:
		return sel.until, true, nil
	}
	return last, sel.from <= last, nil
}

// subjects returns the server-side filters of the selection.
func (sel selection) subjects() []string {
	types := sel.types
	if len(types) == 0 {
		types = []events.Pattern{"*.*"}
	}
	var filters []string
	for _, p := range types {
		filters = append(filters, p.Subjects(sel.run, sel.trial))
	}
	return filters
}

// beginning cuts a text to at most this many bytes, in whole characters.
func beginning(text string, most int) string {
	if len(text) <= most {
		return text
	}
	for most > 0 && !utf8.RuneStart(text[most]) {
		most--
	}
	return text[:most] + "…"
}

// eventPrinter returns a function that prints one event, as a JSON line or in columns
// of fixed width, so that a followed log appears as it grows.
func (a *app) eventPrinter() func(events.Recorded) error {
	if a.Format == "json" || a.Format == "jsonl" {
		enc := json.NewEncoder(a.Out)
		return func(r events.Recorded) error { return enc.Encode(r) }
	}
	return func(r events.Recorded) error {
		data := beginning(string(r.Data), 120)
		if a.Format == "wide" {
			data = fmt.Sprintf("%-12s %-12s %s", cmp.Or(r.Principal, "-"), cmp.Or(audit.SignerOf(r.Event), "-"), r.Data)
		}
		_, err := fmt.Fprintf(a.Out, "%6d  %s  %-23s %-12s %-4s %s\n",
			r.Sequence, r.Time.Local().Format("15:04:05.000"), r.Kind, terminal.Line(r.Scope.Run), r.Scope.Actor, terminal.Line(data))
		return err
	}
}

// cursorRow is one cursor in the output of `events cursors --json`.
type cursorRow struct {
	Name     string    `json:"name"`
	Sequence uint64    `json:"sequence"` // of the last event handled
	Lag      uint64    `json:"lag"`      // events in the log after it
	MovedAt  time.Time `json:"moved_at"` // by the server's clock
}

func (a *app) cursorsCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "cursors", Short: "List the cursors of subscribers, or remove one", Args: console.Args(cobra.NoArgs),
		Long: `List the cursors of "events --cursor NAME" in the store, and the number of events that
each has not handled yet (LAG).`,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.read(c.Context(), func(s *store.Store) error { return a.cursors(c.Context(), s) })
		},
	}
	c.AddCommand(&cobra.Command{
		Use: "rm NAME", Short: "Remove a cursor", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Remove a cursor. The next subscriber with that name starts at --from. A cursor with an
active subscriber is not removed: exit code 5.`,
		RunE: func(c *cobra.Command, names []string) error {
			return a.with(c.Context(), func(s *store.Store) error { return removeCursor(c.Context(), s, names[0]) })
		},
	})
	return c
}

func (a *app) cursors(ctx context.Context, s *store.Store) error {
	list, err := s.Log.ListCursors(ctx)
	if err != nil {
		return err
	}
	last, err := s.Log.Last(ctx)
	if err != nil {
		return err
	}
	rows := []cursorRow{}
	var damage error
	for _, c := range list {
		if c.Damage != nil {
			damage = errors.Join(damage, fmt.Errorf("%w: cursor %q: %w", store.ErrDamaged, c.Name, c.Damage))
			continue
		}
		rows = append(rows, cursorRow{Name: c.Name, Sequence: c.Sequence, Lag: last - min(last, c.Sequence), MovedAt: c.Moved.UTC()})
	}
	whole := struct {
		Cursors []cursorRow `json:"cursors"`
	}{rows}
	err = console.Emit(a.Console, whole, rows, func(w *tabwriter.Writer, _ bool) {
		console.Row(w, "CURSOR", "SEQUENCE", "LAG", "MOVED")
		for _, c := range rows {
			console.Row(w, c.Name, c.Sequence, c.Lag, console.When(c.MovedAt))
		}
	})
	return errors.Join(err, damage)
}

func removeCursor(ctx context.Context, s *store.Store, name string) error {
	list, err := s.Log.ListCursors(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, c := range list {
		if names = append(names, c.Name); c.Name != name {
			continue
		}
		return s.RemoveCursor(ctx, name)
	}
	return &projections.NotFoundError{What: "cursor", Ref: name, Hint: fmt.Sprintf("cursors are %q", names)}
}
