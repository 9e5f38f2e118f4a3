package store

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/archive"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// model is a log without an archive: a list.
type model struct {
	log   []events.Recorded
	heads map[events.Aggregate]uint64
	was   map[string]uint64 // the end of the lane at each decision
	made  []events.Decision
	facts []events.Fact
}

var _ viewdb.Source = (*model)(nil)

// Last implements [viewdb.Source].
func (m *model) Last(context.Context) (uint64, error) { return uint64(len(m.log)), nil }

// Read implements [viewdb.Source].
func (m *model) Read(_ context.Context, from, until uint64) iter.Seq2[events.Recorded, error] {
	return func(yield func(events.Recorded, error) bool) {
		for seq := from; seq <= until; seq++ {
			if !yield(m.log[seq-1], nil) {
				return
			}
		}
	}
}

func (m *model) add(e events.Event) uint64 {
	m.log = append(m.log, events.Recorded{Event: e, Sequence: uint64(len(m.log) + 1)})
	return uint64(len(m.log))
}

// errCut interrupts a cut in a state.
var errCut = errors.New("cut off")

// history is a log with cuts, and a model of it without.
type history struct {
	t      *rapid.T
	s      *Store
	dir    string
	server *jetlog.Server
	log    *jetlog.Log
	model  model
	cuts   int
}

func (h *history) must(err error) {
	if err != nil {
		h.t.Helper()
		h.t.Fatal(err)
	}
}

func (h *history) open() {
	var err error
	h.must(settleCut(h.dir, nil))
	h.server, h.log, err = serveAlone(h.t.Context(), h.s, filepath.Join(h.dir, "log"))
	h.must(err)
	h.must(checkLog(h.t.Context(), h.log, h.s.ID))
}

func (h *history) close() {
	h.log.Close()
	h.server.Shutdown()
}

// cut cuts the log, up to a drawn state.
func (h *history) cut() {
	h.close()
	state := rapid.SampledFrom([]string{"", "", "sealed", "made", "moved", "cut", "tidied"}).Draw(h.t, "crash in")
	err := func() (err error) {
		defer func() {
			r := recover()
			if rerr, is := r.(error); is && errors.Is(rerr, errCut) {
				err = errCut
			} else if r != nil {
				panic(r)
			}
		}()
		return cutTail(h.t.Context(), h.s, h.dir, func(reached string) {
			if reached == state {
				panic(errCut)
			}
		})
	}()
	if err != nil && !errors.Is(err, errCut) {
		h.t.Fatalf("cut: %v", err)
	}
	h.cuts++
	h.open()
}

func (h *history) aggregate() events.Aggregate {
	return events.Aggregate{Run: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(h.t, "run"), Trial: projections.DefaultTrial}
}

func (h *history) stamp() events.Stamp {
	return events.Stamp{ID: NewID(), Source: "test", Time: time.Now()}
}

func (h *history) append() {
	n := rapid.IntRange(1, 12).Draw(h.t, "facts")
	var facts []events.Fact
	run := h.aggregate().Run
	for range n {
		f, err := events.NewFact(h.stamp(), events.Scope{Run: run, Trial: projections.DefaultTrial, Actor: events.Rank(0)},
			events.Metrics{Attempt: 1, Iteration: len(h.model.facts) + 1, Metrics: map[string]any{"loss": float64(len(h.model.log))}})
		h.must(err)
		facts = append(facts, f)
	}
	got, err := h.log.Append(h.t.Context(), facts...)
	h.must(err)
	for i, f := range facts {
		if want := h.model.add(f.Event); got[i] != want {
			h.t.Fatalf("fact %d of %d has sequence %d, want %d", i, n, got[i], want)
		}
	}
	h.model.facts = append(h.model.facts, facts...)
}

// again appends stored facts again, as after a lost acknowledgement.
func (h *history) again() {
	if len(h.model.facts) == 0 {
		return
	}
	f := rapid.SampledFrom(h.model.facts).Draw(h.t, "again")
	got, err := h.log.Append(h.t.Context(), f)
	h.must(err)
	if at := h.model.log[got[0]-1]; at.ID != f.ID {
		h.t.Fatalf("fact %s again has sequence %d, which is %s", f.ID, got[0], at.ID)
	}
}

func (h *history) decide() {
	agg := h.aggregate()
	head := h.model.heads[agg]
	after := rapid.SampledFrom([]uint64{head, head, 0, head - min(head, 1), head + 1, uint64(len(h.model.log))}).Draw(h.t, "after")
	name := fmt.Sprintf("step-%d", len(h.model.made))
	d, err := events.NewDecision(h.stamp(), agg, &events.CheckpointBegun{Attempt: 1, Checkpoint: name + ".a1", Name: name, WorldSize: 1, Participants: []int{0}})
	h.must(err)
	got, err := h.log.Decide(h.t.Context(), d, after)
	var conflict *jetlog.ConflictError
	switch {
	case after != head && !errors.As(err, &conflict):
		h.t.Fatalf("a decision after %d in a lane that ends at %d: %d, %v", after, head, got, err)
	case after != head && conflict.Actual != head:
		h.t.Fatalf("the lane ends at %d, want %d", conflict.Actual, head)
	case after != head:
		return
	}
	h.must(err)
	if want := h.model.add(d.Event); got != want {
		h.t.Fatalf("the decision has sequence %d, want %d", got, want)
	}
	h.model.heads[agg], h.model.was[d.ID] = got, after
	h.model.made = append(h.model.made, d)
}

// decideAgain repeats a stored decision of any age.
func (h *history) decideAgain() {
	if len(h.model.made) == 0 {
		return
	}
	d := rapid.SampledFrom(h.model.made).Draw(h.t, "decision")
	got, err := h.log.Decide(h.t.Context(), d, h.model.was[d.ID])
	h.must(err)
	if got == 0 || h.model.log[got-1].ID != d.ID {
		h.t.Fatalf("decision %s again has sequence %d", d.ID, got)
	}
}

// compare checks the log against the model.
func (h *history) compare() {
	last, err := h.log.Last(h.t.Context())
	h.must(err)
	if last != uint64(len(h.model.log)) {
		h.t.Fatalf("the log ends at %d, want %d", last, len(h.model.log))
	}
	for e, err := range h.log.Read(h.t.Context(), 1, last) {
		h.must(err)
		want := &h.model.log[e.Sequence-1]
		if want.Stored.IsZero() {
			want.Stored = e.Stored // which is the server's
		}
		if e.ID != want.ID || e.Kind != want.Kind || string(e.Data) != string(want.Data) || !e.Time.Equal(want.Time) || !e.Stored.Equal(want.Stored) {
			h.t.Fatalf("event %d is %+v, want %+v", e.Sequence, e, *want)
		}
	}
	as := rapid.Uint64Range(1, last).Draw(h.t, "as of")
	for _, until := range []uint64{as, last} {
		got, err := viewdb.Replay(h.t.Context(), h.log, until)
		h.must(err)
		want, err := viewdb.Replay(h.t.Context(), &h.model, until)
		h.must(err)
		a, err := projections.Digest(got)
		h.must(err)
		b, err := projections.Digest(want)
		h.must(err)
		if a != b {
			h.t.Fatalf("the rows as of %d differ", until)
		}
	}
	out, err := h.log.Check(h.t.Context(), jetlog.CheckOptions{})
	h.must(err)
	if len(out.Findings) > 0 {
		h.t.Fatalf("findings: %v", out.Findings)
	}
}

// TestHistoriesWithCuts: a history with cuts, and crashes in each of their states, equals
// the history without: the same sequences, answers, events and rows, as of any event.
func TestHistoriesWithCuts(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		dir := filepath.Join(t.TempDir(), "s")
		if _, err := Init(rt.Context(), dir, ""); err != nil {
			rt.Fatal(err)
		}
		c := cutting{limits: archive.Limits{Messages: rapid.IntRange(1, 40).Draw(rt, "a segment has"), Bytes: 1 << 20}}
		s, err := closedStore(dir, Options{Location: dir, Logger: slog.New(slog.DiscardHandler), cutting: &c})
		if err != nil {
			rt.Fatal(err)
		}
		h := &history{t: rt, s: s, dir: dir, model: model{heads: map[events.Aggregate]uint64{}, was: map[string]uint64{}}}
		h.open()
		defer h.close()
		for e, err := range h.log.Read(rt.Context(), 1, 1) {
			h.must(err)
			h.model.add(e.Event)
		}
		for range rapid.IntRange(1, 14).Draw(rt, "operations") {
			switch rapid.SampledFrom([]string{"append", "append", "again", "decide", "decide", "decide again", "cut"}).Draw(rt, "do") {
			case "append":
				h.append()
			case "again":
				h.again()
			case "decide":
				h.decide()
			case "decide again":
				h.decideAgain()
			case "cut":
				h.cut()
			}
		}
		h.compare()
	})
}
