package store

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// decisionsOf lists the kinds of a run's decisions about marks and trials, in order.
func decisionsOf(t *testing.T, s *Store, run string) string {
	t.Helper()
	last, err := s.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for r, err := range s.Log.Read(t.Context(), 1, last) {
		if err != nil {
			t.Fatal(err)
		}
		marks := []events.Kind{"checkpoint.pinned", "checkpoint.unpinned", "trial.created"}
		if r.Scope.Run == run && slices.Contains(marks, r.Kind) {
			kinds = append(kinds, r.Scope.Trial+" "+string(r.Kind))
		}
	}
	return strings.Join(kinds, ", ")
}

// TestForkTrial: a fork of a trial keeps the donor's checkpoint from its pin on, copies nothing, and
// is made once, however often and after whichever step a killed process repeats it.
func TestForkTrial(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	id := filepath.Base(committed(t, s, "run", 1))
	from := events.TrialParent{Run: "run", Trial: projections.DefaultTrial, Checkpoint: id}
	had := decisionsOf(t, s, "run")
	now := func() string { return strings.TrimPrefix(strings.TrimPrefix(decisionsOf(t, s, "run"), had), ", ") }
	for range 2 {
		if err := s.PinFork(t.Context(), from, "run", "t1-1"); err != nil {
			t.Fatal(err)
		}
	}
	committed(t, s, "run", 2)
	if out := went(collect(t, s, "last=1")); out != "" {
		t.Errorf("pinned, and collected: %s", out)
	}
	files := snapshot(t, s.Data.Dir())
	for range 2 {
		if err := s.ForkTrial(t.Context(), from, "run", "t1-1", map[string]any{"lr": 0.5, "api_key": "SECRET"}); err != nil {
			t.Fatal(err)
		}
	}
	if after := snapshot(t, s.Data.Dir()); len(after) != len(files) {
		t.Errorf("%d files became %d", len(files), len(after))
	}
	if got, want := now(), "main checkpoint.pinned, t1-1 trial.created, main checkpoint.unpinned"; got != want {
		t.Errorf("decisions: %s, want %s", got, want)
	}
	if out := went(collect(t, s, "last=1")); out != "" {
		t.Errorf("forked, and collected: %s", out)
	}
	trial := ask(t, s, query.Trial, query.Params{Run: "run", Trial: "t1-1"})
	if trial.Parent == nil || *trial.Parent != from || trial.Config["lr"] != 0.5 || trial.Config["api_key"] == "SECRET" {
		t.Errorf("%+v", trial)
	}
	other := from
	other.Checkpoint = filepath.Base(committed(t, s, "run", 3))
	if err := s.ForkTrial(t.Context(), other, "run", "t1-1", nil); !slices.Contains(problem.Kinds(err), problem.Conflict) {
		t.Errorf("another origin: %v", err)
	}
	if _, err := s.Pin(t.Context(), refTo(other), "mine"); err != nil {
		t.Fatal(err)
	}
	if err := s.ForkTrial(t.Context(), other, "run", "t2-1", nil); err != nil {
		t.Fatal(err)
	}
	if c := ask(t, s, query.Resolve, query.Params{Ref: refTo(other)}); !c.Pinned || c.PinReason != "mine" {
		t.Errorf("a user's pin became %v %q", c.Pinned, c.PinReason)
	}
	if err := s.ForkTrial(t.Context(), events.TrialParent{Run: "run", Trial: "main", Checkpoint: "step-9.a1"}, "run", "t3-1", nil); !slices.Contains(problem.Kinds(err), problem.NotFound) {
		t.Errorf("no checkpoint: %v", err)
	}
}
