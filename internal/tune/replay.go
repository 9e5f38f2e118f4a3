package tune

import (
	"fmt"
	"iter"
	"reflect"
	"slices"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Decision is a decision in a log, and what follows from the events up to the sequence
// that it names.
type Decision struct {
	Sequence uint64
	events.SearchAssigned
	Problem string // how the two differ; empty: they are equal
}

// Replayed is the outcome of a replay.
type Replayed struct {
	Search    *Search
	Decisions []Decision
	End       uint64 // sequence of the last decision in the lane of the run
}

// ErrNoSearch reports that a run has no search.
var ErrNoSearch = problem.New(problem.NotFound, "the run has no search")

// Replay folds the events of a run from its search.begun on, and compares each decision
// with the decision that follows from the events up to [events.SearchAssigned].After. It returns
// [ErrNoSearch] if there is no search.begun.
func Replay(run string, log iter.Seq2[events.Recorded, error]) (out Replayed, err error) {
	var held []events.Recorded // that the next decision may not follow from
	for r, err := range log {
		if err != nil {
			return out, err
		}
		if out.Search == nil {
			if out.Search, err = begin(run, r); err != nil {
				return out, err
			}
			out.End = r.Sequence
			continue
		}
		held = append(held, r)
		body, ok := assignment(run, r)
		if !ok {
			continue
		}
		seen := slices.IndexFunc(held, func(r events.Recorded) bool { return r.Sequence > body.After })
		if seen < 0 {
			seen = len(held) - 1
		}
		if err := out.fold(run, held[:seen]); err != nil {
			return out, err
		}
		out.Decisions = append(out.Decisions, Decision{r.Sequence, *body, out.Search.differs(*body, r.Sequence)})
		if err := out.fold(run, held[seen:]); err != nil {
			return out, err
		}
		held = nil
	}
	if out.Search == nil {
		return out, ErrNoSearch
	}
	return out, out.fold(run, held)
}

// differs returns how a decision at a sequence differs from the decision that follows from
// the folded events; empty if they are equal.
func (s *Search) differs(from events.SearchAssigned, sequence uint64) string {
	next, ok := s.Next()
	switch {
	case from.After < s.last || from.After >= sequence:
		return fmt.Sprintf("it names event %d as the last that it follows from, and comes after the decision at %d", from.After, s.last)
	case !ok:
		return "nothing is left to train then"
	case next.Trial != from.Trial || next.Rung != from.Rung || next.Steps != from.Steps:
		return fmt.Sprintf("trial %s on rung %d (%d steps) follows from the events up to %d", next.Trial, next.Rung, next.Steps, from.After)
	case next.Replaces != from.Replaces || !reflect.DeepEqual(next.Parent, from.Parent):
		return fmt.Sprintf("a trial that %s follows from the events up to %d", descent(next), from.After)
	case !reflect.DeepEqual(next.Config, from.Config):
		return fmt.Sprintf("the configuration %s follows from the events up to %d", configText(next.Config, nil), from.After)
	}
	return ""
}

// descent returns where the trial of a decision comes from.
func descent(b events.SearchAssigned) string {
	if b.Parent == nil {
		return "is forked from no other"
	}
	return fmt.Sprintf("is forked from %s@%s and replaces %s", b.Parent.Trial, b.Parent.Checkpoint, b.Replaces)
}

// Next folds the next event of the log. A decision is not compared: events that it does not
// follow from were folded before it.
func (out *Replayed) Next(run string, r events.Recorded) error {
	if b, ok := assignment(run, r); ok {
		out.End = r.Sequence
		out.Decisions = append(out.Decisions, Decision{Sequence: r.Sequence, SearchAssigned: *b})
	}
	return out.Search.Fold(run, r)
}

func (out *Replayed) fold(run string, list []events.Recorded) error {
	for _, r := range list {
		if err := out.Search.Fold(run, r); err != nil {
			return err
		}
		if _, ok := assignment(run, r); ok {
			out.End = r.Sequence
		}
	}
	return nil
}

// begin returns the search that an event opens, or nil.
func begin(run string, r events.Recorded) (*Search, error) {
	if r.Scope != (events.Scope{Run: run, Actor: events.Server}) || r.Kind != (events.SearchBegun{}).Kind() {
		return nil, nil
	}
	body, err := r.Body()
	if err != nil {
		return nil, err
	}
	begun, ok := body.(*events.SearchBegun)
	if !ok {
		return nil, nil
	}
	d, err := Define(*begun)
	if err != nil {
		return nil, fmt.Errorf("event %d: %w", r.Sequence, err)
	}
	s := New(run, d)
	s.last = r.Sequence
	return s, nil
}

func assignment(run string, r events.Recorded) (*events.SearchAssigned, bool) {
	if r.Scope != (events.Scope{Run: run, Actor: events.Server}) {
		return nil, false
	}
	body, err := r.Body()
	if err != nil {
		return nil, false
	}
	b, ok := body.(*events.SearchAssigned)
	return b, ok
}
