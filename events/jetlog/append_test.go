package jetlog

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

func TestRoundTrip(t *testing.T) {
	l, s := newLog(t)
	facts := factsOf(t, 5)
	seqs, err := l.Append(t.Context(), facts[0])
	if err != nil || len(seqs) != 1 || seqs[0] != 2 {
		t.Fatalf("first fact: %v, %v", seqs, err)
	}
	d := begun(t, "step-1")
	if seq, err := l.Decide(t.Context(), d, 0); err != nil || seq != 3 {
		t.Fatalf("decision: %d, %v", seq, err)
	}
	if seqs, err = l.Append(t.Context(), facts[1:]...); err != nil || len(seqs) != 4 || seqs[0] != 4 || seqs[3] != 7 {
		t.Fatalf("batch: %v, %v", seqs, err)
	}
	if last, err := l.Last(t.Context()); err != nil || last != 7 {
		t.Fatalf("last: %d, %v", last, err)
	}
	if end, err := l.LaneEnd(t.Context(), trial); err != nil || end != 3 {
		t.Fatalf("lane end: %d, %v", end, err)
	}
	if end, err := l.LaneEnd(t.Context(), events.Aggregate{Run: "other"}); err != nil || end != 0 {
		t.Fatalf("end of an empty lane: %d, %v", end, err)
	}

	want := []events.Event{facts[0].Event, d.Event, facts[1].Event, facts[2].Event, facts[3].Event, facts[4].Event}
	for i, got := range readAll(t, reopen(t, s), 2, 7) {
		w := want[i]
		if got.Sequence != uint64(i)+2 || got.ID != w.ID || got.Kind != w.Kind || got.Scope != w.Scope ||
			string(got.Data) != string(w.Data) || !got.Time.Equal(w.Time) || got.Stored.IsZero() {
			t.Errorf("event %d: got %+v, want %+v", i+2, got, w)
		}
	}
}

func TestAppendDuplicates(t *testing.T) {
	l, _ := newLog(t)
	facts := factsOf(t, 6)
	seqs, err := l.Append(t.Context(), facts[2])
	if err != nil {
		t.Fatal(err)
	}
	again, err := l.Append(t.Context(), facts[2])
	if err != nil || again[0] != seqs[0] {
		t.Fatalf("again: %v, %v, want %v", again, err, seqs)
	}
	// A batch with an event that is already stored: each event gets its sequence.
	all, err := l.Append(t.Context(), facts...)
	if err != nil {
		t.Fatal(err)
	}
	if all[2] != seqs[0] || all[0] != 3 || all[5] != 7 {
		t.Fatalf("batch with a duplicate: %v", all)
	}
	repeated, err := l.Append(t.Context(), facts...)
	if err != nil {
		t.Fatal(err)
	}
	for i := range all {
		if repeated[i] != all[i] {
			t.Fatalf("the same batch again: %v, want %v", repeated, all)
		}
	}
	if last, _ := l.Last(t.Context()); last != 7 {
		t.Fatalf("the log has %d events, want 7", last)
	}
}

// A log remembers the last two minutes of IDs when its server restarts.
func TestDuplicatesAcrossRestart(t *testing.T) {
	dir := t.TempDir()
	s := startServer(t, dir)
	l := connectTo(t, Options{Dial: dial(s)})
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	facts := factsOf(t, 3)
	first, err := l.Append(t.Context(), facts...)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	s.Shutdown()
	l = reopen(t, startServer(t, dir))
	again, err := l.Append(t.Context(), facts...)
	if err != nil || again[0] != first[0] || again[2] != first[2] {
		t.Fatalf("again: %v, %v, want %v", again, err, first)
	}
}

func TestAppendManyIsSplit(t *testing.T) {
	l, _ := newLog(t)
	facts := factsOf(t, 2500)
	seqs, err := l.Append(t.Context(), facts...)
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range readAll(t, l, 2, 2501) {
		if seqs[i] != e.Sequence || e.ID != facts[i].ID {
			t.Fatalf("fact %d is event %d with ID %s", i, e.Sequence, e.ID)
		}
	}
}

func TestAppendConcurrently(t *testing.T) {
	l, _ := newLog(t)
	const writers, each = 32, 20
	var mu sync.Mutex
	want := map[uint64]string{}
	var wg sync.WaitGroup
	for range writers {
		facts := factsOf(t, each)
		wg.Go(func() {
			for i := 0; i < each; {
				n := min(1+i%3, each-i)
				seqs, err := l.Append(t.Context(), facts[i:i+n]...)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for k, seq := range seqs {
					want[seq] = facts[i+k].ID
				}
				mu.Unlock()
				i += n
			}
		})
	}
	wg.Wait()
	for _, e := range readAll(t, l, 2, writers*each+1) {
		if want[e.Sequence] != e.ID {
			t.Fatalf("event %d has ID %s, acknowledged was %q", e.Sequence, e.ID, want[e.Sequence])
		}
	}
}

func TestAppendLostAcknowledgement(t *testing.T) {
	t.Parallel()
	_, s := newLog(t)
	d := &lossy{s: s}
	l := connectTo(t, Options{Dial: d.dial})
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{1, 10} {
		before, err := l.Last(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		facts := factsOf(t, n)
		d.loseNext("ckpt.run%2E1.t.r0.")
		seqs, err := l.Append(t.Context(), facts...)
		if err != nil {
			t.Fatal(err)
		}
		if seqs[0] != before+1 || seqs[n-1] != before+uint64(n) {
			t.Fatalf("sequences %v after %d", seqs, before)
		}
		if last, _ := l.Last(t.Context()); last != before+uint64(n) {
			t.Fatalf("the log has %d events after %d facts on %d", last, n, before)
		}
	}
	if d.lost() != 2 {
		t.Fatalf("%d acknowledgements were lost, want 2", d.lost())
	}
}

func TestAppendRefuses(t *testing.T) {
	l, _ := newLog(t)
	large := fact(t, 1)
	large.Data = []byte(`"` + strings.Repeat("x", MaxMessage) + `"`)
	lane := fact(t, 1).Event
	lane.Scope.Actor = events.Server
	source := fact(t, 1)
	source.Source = "two\nlines"
	for name, tc := range map[string]struct {
		fact events.Fact
		want string
	}{
		"decision":  {events.Fact{Event: begun(t, "x").Event}, "decision"},
		"in a lane": {events.Fact{Event: lane}, "has the actor of decisions"},
		"too large": {large, "put large parts into a blob"},
		"header":    {source, "which a header cannot hold"},
	} {
		if _, err := l.Append(t.Context(), tc.fact); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := l.Decide(t.Context(), events.Decision{Event: fact(t, 1).Event}, 0); err == nil {
		t.Error("a fact was decided")
	}
	if last, _ := l.Last(t.Context()); last != 1 {
		t.Errorf("the log has %d events, want 1", last)
	}
}

// Without a server, an append ends at its deadline with an error that explains the
// outcome.
func TestAppendDeadline(t *testing.T) {
	l, s := newLog(t)
	s.Shutdown()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := l.Append(ctx, fact(t, 1))
	if !errors.Is(err, ErrUnacknowledged) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("append: %v", err)
	}
	if _, err = l.Decide(ctx, begun(t, "x"), 0); !errors.Is(err, ErrUnacknowledged) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("decide: %v", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := l.Append(context.Background(), fact(t, 2))
		done <- err
	}()
	l.Close()
	if err := <-done; !errors.Is(err, ErrClosed) {
		t.Errorf("append on a closed log: %v", err)
	}
}

// TestAdmit refuses facts and lets decisions pass.
func TestAdmit(t *testing.T) {
	_, s := newLog(t)
	full := errors.New("the disk is nearly full")
	l := connectTo(t, Options{Dial: dial(s), Admit: func() error { return full }})
	if _, err := l.Append(t.Context(), factsOf(t, 1)...); !errors.Is(err, full) {
		t.Errorf("a fact: %v", err)
	}
	if seq, err := l.Decide(t.Context(), begun(t, "step-1"), 0); err != nil || seq != 2 {
		t.Errorf("a decision: %d, %v", seq, err)
	}
}
