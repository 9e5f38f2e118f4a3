package jetlog

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// acked is an event with the sequence that its writer received, and for a decision the
// end of the lane that it expected.
type acked struct {
	id              string
	sequence, after uint64
	decision        bool

	called, returned time.Time
}

// history is the list of acknowledgements that the writers of a log received.
type history struct {
	mu        sync.Mutex
	acked     []acked
	ends      []ended
	conflicts int
}

func (h *history) look(e ended) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ends = append(h.ends, e)
}

func (h *history) add(a ...acked) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.acked = append(h.acked, a...)
}

func (h *history) len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.acked)
}

// decide takes n decisions on one lane in competition with all other deciders.
func (h *history) decide(ctx context.Context, t *testing.T, l *Log, who, n int) {
	for i := range n {
		d := begun(t, fmt.Sprintf("step-%d-%d", who, i))
		for {
			looked := time.Now()
			end, err := l.LaneEnd(ctx, trial)
			if err != nil {
				t.Error(err)
				return
			}
			h.look(ended{end, looked, time.Now()})
			called := time.Now()
			seq, err := l.Decide(ctx, d, end)
			if errors.Is(err, ErrConflict) {
				h.mu.Lock()
				h.conflicts++
				h.mu.Unlock()
				continue
			}
			if err != nil {
				t.Error(err)
				return
			}
			h.add(acked{d.ID, seq, end, true, called, time.Now()})
			break
		}
	}
}

// append appends rounds of batches and single facts.
func (h *history) append(ctx context.Context, t *testing.T, l *Log, rounds int) {
	for i := range rounds {
		facts := []events.Fact{fact(t, i)}
		if i%2 == 0 {
			facts = factsOf(t, 30)
		}
		called := time.Now()
		seqs, err := l.Append(ctx, facts...)
		if err != nil {
			t.Error(err)
			return
		}
		returned := time.Now()
		for j, f := range facts {
			h.add(acked{id: f.ID, sequence: seqs[j], called: called, returned: returned})
		}
	}
}

// check compares the acknowledgements with the stored log.
func (h *history) check(t *testing.T, l *Log) {
	t.Helper()
	last, err := l.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at := map[string]uint64{}
	before := map[string]uint64{} // of each decision: the end of the lane when it was stored
	end := uint64(0)
	for _, e := range readAll(t, l, 1, last) {
		if at[e.ID] != 0 {
			t.Errorf("event %s is at %d and at %d", e.ID, at[e.ID], e.Sequence)
		}
		at[e.ID] = e.Sequence
		if trial.Owns(e.Event) {
			before[e.ID], end = end, e.Sequence
		}
	}
	for _, problem := range h.realTime() {
		t.Error(problem)
	}
	saw := map[uint64]string{}
	decisions := 0
	for _, a := range h.acked {
		if at[a.id] != a.sequence {
			t.Errorf("event %s is at %d, acknowledged as %d", a.id, at[a.id], a.sequence)
		}
		if !a.decision {
			continue
		}
		decisions++
		if before[a.id] != a.after {
			t.Errorf("decision %s expected the lane at %d, it was at %d", a.id, a.after, before[a.id])
		}
		if other := saw[a.after]; other != "" {
			t.Errorf("decisions %s and %s both saw the lane at %d", a.id, other, a.after)
		}
		saw[a.after] = a.id
	}
	if decisions != len(before) {
		t.Errorf("%d decisions were acknowledged, %d are in the lane", decisions, len(before))
	}
	if len(h.acked)+1 != int(last) {
		t.Errorf("%d events were acknowledged, the log has %d", len(h.acked), last)
	}
}

const deciders = 8

// contend runs 8 deciders and 4 writers of facts against one log, each over its own
// connection.
func contend(t *testing.T, connect func() *Log, decisions, rounds int, meanwhile func(*history)) *history {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	h := &history{}
	var wg sync.WaitGroup
	for who := range deciders {
		l := connect()
		wg.Go(func() { h.decide(ctx, t, l, who, decisions) })
	}
	for range 4 {
		l := connect()
		wg.Go(func() { h.append(ctx, t, l, rounds) })
	}
	meanwhile(h)
	wg.Wait()
	return h
}

func TestLinearizable(t *testing.T) {
	t.Parallel()
	l, s := newLog(t)
	h := contend(t, func() *Log { return reopen(t, s) }, 10, 30, func(*history) {})
	h.check(t, l)
	if h.conflicts == 0 {
		t.Error("no decision met another")
	}
}

// Linearizable on three servers, whose leader stops halfway.
func TestLinearizableReplicated(t *testing.T) {
	t.Parallel()
	c := startCluster(t, 3)
	o := Options{URL: c.url(), Timeout: time.Second}
	l := connectTo(t, o)
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	if info, err := l.Info(t.Context()); err != nil || info.Replicas != 3 {
		t.Fatalf("the log has %d copies, %v", info.Replicas, err)
	}
	h := contend(t, func() *Log {
		l := connectTo(t, o)
		if _, _, err := l.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		return l
	}, 10, 20, func(h *history) {
		c.wait("progress", func() bool { return h.len() > 200 })
		c.stopLeader()
	})
	h.check(t, l)
	if h.conflicts == 0 {
		t.Error("no decision met another")
	}
}

// The number of copies of a log.
func TestReplicas(t *testing.T) {
	t.Parallel()
	three := startCluster(t, 3)
	for name, tc := range map[string]struct {
		asked, got int // 0: refused
	}{
		"three of three": {3, 3},
		"one of three":   {1, 1},
		"five of three":  {5, 0},
		"by itself":      {0, 3},
	} {
		l := connectTo(t, Options{URL: three.url(), Replicas: tc.asked})
		err := l.Create(t.Context(), created(t, "store-1"))
		if tc.got == 0 {
			if !errors.Is(err, ErrReplicas) || !strings.Contains(err.Error(), "5 copies") {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		info, ierr := l.Info(t.Context())
		if err != nil || ierr != nil || info.Replicas != tc.got {
			t.Errorf("%s: %d copies, %v, %v", name, info.Replicas, err, ierr)
		}
		three.forget()
	}
	l, s := newLog(t)
	if info, err := l.Info(t.Context()); err != nil || info.Replicas != 1 {
		t.Errorf("one server by itself: %d copies, %v", info.Replicas, err)
	}
	asking := s.OwnerOptions()
	asking.Replicas = 3
	lonely := connectTo(t, asking)
	if err := lonely.js.DeleteStream(t.Context(), Stream); err != nil {
		t.Fatal(err)
	}
	if err := lonely.Create(t.Context(), created(t, "store-2")); !errors.Is(err, ErrReplicas) {
		t.Errorf("three of one: %v", err)
	}
}
