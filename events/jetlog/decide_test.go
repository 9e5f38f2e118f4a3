package jetlog

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/ckptstore/ckptstore/events"
)

func TestConflict(t *testing.T) {
	l, _ := newLog(t)
	first, err := l.Decide(t.Context(), begun(t, "step-1"), 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Append(t.Context(), factsOf(t, 3)...); err != nil { // facts do not move a lane
		t.Fatal(err)
	}
	for _, after := range []uint64{0, first - 1, first + 3} {
		_, err := l.Decide(t.Context(), begun(t, "step-2"), after)
		var c *ConflictError
		if !errors.Is(err, ErrConflict) || !errors.As(err, &c) {
			t.Fatalf("after %d: %v", after, err)
		}
		if want := (ConflictError{Lane: trial.Lane(), After: after, Actual: first}); *c != want {
			t.Fatalf("got %+v, want %+v", *c, want)
		}
	}
	second, err := l.Decide(t.Context(), begun(t, "step-2"), first)
	if err != nil || second != first+4 {
		t.Fatalf("after the first: %d, %v", second, err)
	}
	// Other lanes do not interfere.
	if _, err := l.Decide(t.Context(), decision(t, events.Aggregate{Run: "run.1", Trial: "u"}, events.TrialCreated{}), 0); err != nil {
		t.Fatal(err)
	}
}

// Deciding a stored decision again succeeds for its author, even after later decisions.
func TestDecideAgain(t *testing.T) {
	l, s := newLog(t)
	d := begun(t, "step-1")
	first, err := l.Decide(t.Context(), d, 0)
	if err != nil {
		t.Fatal(err)
	}
	other := reopen(t, s)
	for i := range 3 {
		if again, err := other.Decide(t.Context(), d, 0); err != nil || again != first {
			t.Fatalf("again, with %d later: %d, %v, want %d", i, again, err, first)
		}
		end, err := l.LaneEnd(t.Context(), trial)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Decide(t.Context(), begun(t, fmt.Sprint("later-", i)), end); err != nil {
			t.Fatal(err)
		}
	}
	if last, _ := l.Last(t.Context()); last != first+3 {
		t.Fatalf("the log has %d events, want %d", last, first+3)
	}
}

func TestDecideLostAcknowledgement(t *testing.T) {
	_, s := newLog(t)
	d := &lossy{s: s}
	l := connectTo(t, Options{Dial: d.dial})
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	d.loseNext("ckpt.run%2E1.t.s.")
	seq, err := l.Decide(t.Context(), begun(t, "step-1"), 0)
	if err != nil || seq != 2 {
		t.Fatalf("decide: %d, %v", seq, err)
	}
	if d.lost() != 1 {
		t.Fatalf("%d acknowledgements were lost, want 1", d.lost())
	}
	if last, _ := l.Last(t.Context()); last != 2 {
		t.Fatalf("the log has %d events, want 2", last)
	}
}

func TestDecidersOnOneLane(t *testing.T) {
	l, s := newLog(t)
	logs := []*Log{l, reopen(t, s), reopen(t, s)}
	end := uint64(0)
	for round := range 20 {
		var wg sync.WaitGroup
		var mu sync.Mutex
		var won []uint64
		for i := range 8 {
			d := begun(t, fmt.Sprintf("step-%d-%d", round, i))
			wg.Go(func() {
				seq, err := logs[i%len(logs)].Decide(t.Context(), d, end)
				var c *ConflictError
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					won = append(won, seq)
				case !errors.As(err, &c) || c.Actual <= end:
					t.Errorf("round %d: %v", round, err)
				}
			})
		}
		wg.Wait()
		if len(won) != 1 || won[0] != end+1 && round > 0 {
			t.Fatalf("round %d after %d: winners at %v, want one", round, end, won)
		}
		end = won[0]
	}
	if last, _ := l.Last(t.Context()); last != end {
		t.Fatalf("the log ends at %d, the lane at %d", last, end)
	}
}
