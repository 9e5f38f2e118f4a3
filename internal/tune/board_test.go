package tune_test

import (
	"math"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/tune"
)

// labOf returns a search over trials whose results are values, each on the first rung.
func labOf(t *testing.T, finite bool, values ...float64) *lab {
	t.Helper()
	def := tune.Definition{Metric: "loss", Mode: tune.Min, Trials: len(values), Reduction: 2, Grace: 2, MaxSteps: 4, Finite: finite, Space: space(t, `{"u": 1}`)}
	l := newLab(def, 1, nil, func(trial int, _ int64) float64 { return values[trial] })
	for range values {
		l.fill()
		for name := range l.live {
			l.report(name)
			if l.live[name] == 1 {
				l.report(name)
			}
		}
	}
	return l
}

func boardOf(t *testing.T, l *lab, live, unsaved []string) tune.Board {
	t.Helper()
	all, err := tune.Replay(run, l.read(len(l.log)))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all.Decisions {
		if d.Problem != "" {
			t.Errorf("event %d: %s", d.Sequence, d.Problem)
		}
	}
	return all.Board(run, live, unsaved)
}

// TestInfiniteValues: infinite values are worse than all others, and shown. Searches that began
// before this rule compare them, and their decisions still follow from the log.
func TestInfiniteValues(t *testing.T) {
	for _, c := range []struct {
		finite bool
		next   string
	}{{true, "t01"}, {false, "t00"}} {
		l := labOf(t, c.finite, math.Inf(-1), 1)
		l.fill()
		if all := l.decisions(); all[len(all)-1] != c.next+"→4" {
			t.Errorf("finite %v: %s, want %s at last", c.finite, all, c.next)
		}
		b := boardOf(t, l, nil, nil)
		if b.Best == nil || b.Best.Trial != c.next {
			t.Errorf("finite %v: best %+v, want %s", c.finite, b.Best, c.next)
		}
		if b.Trials[0].NonFinite != "-Infinity" || b.Table()[1][4] != "-Infinity" {
			t.Errorf("an infinite value is shown as %q, %v", b.Trials[0].NonFinite, b.Table()[1])
		}
	}
}

// TestOver: a search is not over while a trial is live or has not saved its last steps.
func TestOver(t *testing.T) {
	l := labOf(t, true, 1)
	if b := boardOf(t, l, nil, nil); !b.Over {
		t.Errorf("nothing is left: %+v", b)
	}
	l = labOf(t, true, 1, 2)
	l.fill()
	for _, step := range []int{3, 5} {
		l.append("t00", &events.Metrics{Attempt: l.tries["t00"], Iteration: step, Step: int64(step), Metrics: map[string]any{"loss": 0.5}})
	}
	for _, c := range []struct {
		live, unsaved []string
		over          bool
		state         string
	}{{nil, nil, true, tune.StateDone}, {[]string{"t00"}, nil, false, tune.StateRunning}, {nil, []string{"t00"}, false, tune.StateDue}} {
		b := boardOf(t, l, c.live, c.unsaved)
		if b.Over != c.over || b.Trials[0].State != c.state {
			t.Errorf("live %v, unsaved %v: over %v, %s", c.live, c.unsaved, b.Over, b.Trials[0].State)
		}
		// The value is of step 5, and the last rung has 4 steps.
		if at := b.Trials[0].AtStep; at != 5 || b.Table()[1][5] != "5" {
			t.Errorf("the value is of step %d: %v", at, b.Table()[1])
		}
	}
	if topped := l.search.Topped(); len(topped) != 1 || topped[0].Name != "t00" || topped[0].ToppedIn != l.tries["t00"] || topped[0].ToppedAt != uint64(len(l.log)) {
		t.Errorf("with the most steps: %+v", topped)
	}
}

// TestErroredTrialTriedAgain: the next attempt of a trial that errored has its steps to train,
// and decisions after it count the trial.
func TestErroredTrialTriedAgain(t *testing.T) {
	l := labOf(t, true, 1, 2)
	l.fill()
	l.append("t00", &events.TrialErrored{Attempt: l.tries["t00"], Message: "no module named torch"})
	if at, _ := l.search.Trial("t00"); at.Ended != tune.Errored || at.Open() || !strings.Contains(at.Failure, "torch") {
		t.Fatalf("errored: %+v", at)
	}
	delete(l.live, "t00")
	if l.search.Busy() || l.decide("") {
		t.Fatal("the search is not over")
	}
	l.start("t00")
	if at, _ := l.search.Trial("t00"); at.Ended != "" || !at.Open() || at.Failure != "" {
		t.Fatalf("tried again: %+v", at)
	}
	l.finishHere(t)
	if b := boardOf(t, l, nil, nil); b.Trials[0].State != tune.StateDone || !b.Over {
		t.Errorf("%+v", b.Trials[0])
	}
}

// finishHere reports until no trial is live.
func (l *lab) finishHere(t *testing.T) {
	t.Helper()
	for n := 0; len(l.live) > 0; n++ {
		if n > 100 {
			t.Fatal("the search does not end")
		}
		for name := range l.live {
			l.report(name)
		}
	}
}
