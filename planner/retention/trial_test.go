package retention

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

// history is a log that is folded as it is written.
type history struct {
	t    *testing.T
	rows *projections.Memory
	seq  uint64
}

func newHistory(t *testing.T) *history { return &history{t: t, rows: projections.NewMemory()} }

// fold folds events of a run's trial "main", by its decider or by node 0.
func (h *history) fold(run string, bodies ...events.Body) {
	h.t.Helper()
	for _, b := range bodies {
		data, err := json.Marshal(b)
		if err != nil {
			h.t.Fatal(err)
		}
		scope := events.Scope{Run: run, Trial: "main", Actor: events.Node(0)}
		if b.Kind().Decides() {
			scope.Actor = events.Server
		}
		if b.Kind().Family() == "job" {
			scope.Trial = events.None
		}
		h.seq++
		r := events.Recorded{Sequence: h.seq, Event: events.Event{
			ID: fmt.Sprint("e", h.seq), Kind: b.Kind(), Version: 1, Source: "test", Time: time.Unix(int64(h.seq), 0), Scope: scope, Data: data,
		}}
		if err := projections.Apply(h.rows, r); err != nil {
			h.t.Fatal(err)
		}
	}
}

// save commits checkpoints of an attempt, and reports the loss at their steps.
func (h *history) save(run string, attempt int, losses map[int64]any, steps ...int64) {
	h.t.Helper()
	for i, step := range steps {
		name := fmt.Sprintf("step-%d", step)
		id := fmt.Sprintf("%s.a%d", name, attempt)
		if loss, ok := losses[step]; ok {
			h.fold(run, events.Metrics{Attempt: attempt, Iteration: i + 1, Step: step, Metrics: map[string]any{"loss": loss}})
		}
		h.fold(run, events.CheckpointBegun{Attempt: attempt, Checkpoint: id, Name: name, Step: step, WorldSize: 1, Participants: []int{0}},
			events.WriteCompleted{Attempt: attempt, Checkpoint: id, Files: []events.File{{Name: "r00000.idx", Size: step}}},
			events.CheckpointCommitted{Attempt: attempt, Checkpoint: id, Manifest: "m", Bytes: 1})
	}
}

// read is the only trial of a run, as it comes over a socket too.
func (h *history) read(run string) Trial {
	h.t.Helper()
	others, err := Others(h.rows)
	if err != nil {
		h.t.Fatal(err)
	}
	trials, err := Read(h.rows, run, []string{"loss"})
	Hold(trials, others)
	if err != nil || len(trials) != 1 {
		h.t.Fatal(trials, err)
	}
	text, err := json.Marshal(trials[0])
	if err != nil {
		h.t.Fatal(err)
	}
	var again Trial
	if err := json.Unmarshal(text, &again); err != nil {
		h.t.Fatal(err)
	}
	if !reflect.DeepEqual(again.Values, trials[0].Values) || !slices.Equal(again.Loading, trials[0].Loading) {
		h.t.Errorf("%+v became %+v", trials[0], again)
	}
	return again
}

func (h *history) wantHeld(run string, want map[string][]string) {
	h.t.Helper()
	got := h.read(run).Holds
	if len(got) == 0 && len(want) == 0 {
		return
	}
	if !reflect.DeepEqual(got, want) {
		h.t.Errorf("held are %v, want %v", got, want)
	}
}

func TestRead(t *testing.T) {
	t.Parallel()
	h := newHistory(t)
	h.fold("a", events.JobStarted{Job: "j1"}, events.GroupStarted{Attempt: 1, Job: "j1", WorldSize: 1})
	h.save("a", 1, map[int64]any{1: 0.5, 2: "NaN", 3: "-Infinity", 4: "text"}, 1, 2, 3, 4, 5)
	got := h.read("a")
	if got.Newest != "step-5.a1" || len(got.Files) != 1 || got.Files[0].Size != 5 || got.LaneSeq != h.seq {
		t.Errorf("read is %+v at %d", got, h.seq)
	}
	want := map[string]Value{"step-1.a1": 0.5, "step-3.a1": Value(math.Inf(-1))}
	if !reflect.DeepEqual(got.Values["loss"], want) {
		t.Errorf("values are %v, want %v", got.Values["loss"], want)
	}
	h.wantHeld("a", nil)
	if _, err := Read(h.rows, "absent", nil); err == nil {
		t.Error("there is a run absent")
	}
}

// TestHolds checks that the needs of other trials are held for as long as they exist.
func TestHolds(t *testing.T) {
	t.Parallel()
	h := newHistory(t)
	h.fold("a", events.JobStarted{Job: "j1"}, events.GroupStarted{Attempt: 1, Job: "j1", WorldSize: 1})
	h.save("a", 1, nil, 1, 2, 3, 4)

	// A fork holds its parent for ever.
	h.fold("fork", events.TrialCreated{Parent: &events.TrialParent{Run: "a", Trial: "main", Checkpoint: "step-1.a1"}})
	forked := []string{"fork/main was forked from it"}
	h.wantHeld("a", map[string][]string{"step-1.a1": forked})

	// Another run that resumes from it: until it has something of its own.
	h.fold("b", events.JobStarted{Job: "j2"}, events.GroupStarted{Attempt: 1, Job: "j2", WorldSize: 1, Resume: "a@step-2.a1"})
	h.wantHeld("a", map[string][]string{"step-1.a1": forked, "step-2.a1": {"the head of b/main", "attempt 1 of b/main resumes from it"}})
	h.fold("b", events.RestoreBegun{Attempt: 1, Load: 1, Checkpoint: "step-2.a1", From: "a/main", WorldSize: 1})
	if got := h.read("a").Loading; !slices.Equal(got, []string{"step-2.a1"}) {
		t.Errorf("loading are %v", got)
	}
	h.fold("b", events.RestoreCompleted{Attempt: 1, Load: 1, Checkpoint: "step-2.a1"})
	h.wantHeld("a", map[string][]string{"step-1.a1": forked, "step-2.a1": {"the head of b/main"}})
	h.save("b", 1, nil, 9)
	h.wantHeld("a", map[string][]string{"step-1.a1": forked})

	// The same by the name of the trial.
	h.fold("c", events.JobStarted{Job: "j4"}, events.GroupStarted{Attempt: 1, Job: "j4", WorldSize: 1, Resume: "a/main@step-2.a1"})
	h.wantHeld("a", map[string][]string{"step-1.a1": forked, "step-2.a1": {"the head of c/main", "attempt 1 of c/main resumes from it"}})
	h.fold("c", events.RestoreBegun{Attempt: 1, Load: 1, Checkpoint: "step-2.a1", From: "a/main", WorldSize: 1}, events.RestoreCompleted{Attempt: 1, Load: 1, Checkpoint: "step-2.a1"})
	h.wantHeld("a", map[string][]string{"step-1.a1": forked, "step-2.a1": {"the head of c/main"}})
	h.save("c", 1, nil, 9)
	h.wantHeld("a", map[string][]string{"step-1.a1": forked})

	// A load that did not end holds until its attempt does, or its job.
	load := func(n int) {
		h.fold("b", events.RestoreBegun{Attempt: 1, Load: n, Checkpoint: "step-3.a1", From: "a/main", WorldSize: 1})
		h.wantHeld("a", map[string][]string{"step-1.a1": forked, "step-3.a1": {"b/main is loading it"}})
	}
	load(2)
	h.fold("b", events.RestoreFailed{Attempt: 1, Load: 2, Checkpoint: "step-3.a1", Error: "?"})
	h.wantHeld("a", map[string][]string{"step-1.a1": forked})
	load(3)
	h.fold("b", events.JobEnded{Job: "j2"})
	h.wantHeld("a", map[string][]string{"step-1.a1": forked})

	// A fresh start leaves the line empty: the newest of before is held.
	h.fold("a", events.JobStarted{Job: "j3"}, events.GroupStarted{Attempt: 2, Job: "j3", WorldSize: 1})
	got := h.read("a")
	if got.Newest != "step-4.a1" {
		t.Errorf("the newest is %q", got.Newest)
	}
	if got := fmt.Sprint(steps(Decide(Policy{Superseded: DeleteSuperseded}, got))); got != "[1 4]" {
		t.Errorf("kept are %s", got)
	}
	h.save("a", 2, nil, 5)
	if got := fmt.Sprint(steps(Decide(Policy{Superseded: DeleteSuperseded}, h.read("a")))); got != "[1 5]" {
		t.Errorf("kept are %s", got)
	}
}

// TestLoadHoldsItsOwn: a load holds the checkpoint that it reads, and none of another
// run that has the same ID.
func TestLoadHoldsItsOwn(t *testing.T) {
	t.Parallel()
	h := newHistory(t)
	for _, run := range []string{"a", "b"} {
		h.fold(run, events.JobStarted{Job: "j" + run}, events.GroupStarted{Attempt: 1, Job: "j" + run, WorldSize: 1})
		h.save(run, 1, nil, 1, 2, 3)
	}
	loading := []string{"b/main is loading it"}
	h.fold("b", events.RestoreBegun{Attempt: 1, Load: 1, Checkpoint: "step-1.a1", WorldSize: 1})
	h.wantHeld("a", nil)
	h.wantHeld("b", map[string][]string{"step-1.a1": loading})
	h.fold("b", events.RestoreBegun{Attempt: 1, Load: 2, Checkpoint: "step-2.a1", From: "a/main", WorldSize: 1})
	h.wantHeld("a", map[string][]string{"step-2.a1": loading})
}

// TestLoadOfAnother: a load from another run leaves the line as it is, also where
// that run's checkpoint has the ID of one of its own.
func TestLoadOfAnother(t *testing.T) {
	t.Parallel()
	h := newHistory(t)
	for _, run := range []string{"a", "b"} {
		h.fold(run, events.JobStarted{Job: "j" + run}, events.GroupStarted{Attempt: 1, Job: "j" + run, WorldSize: 1})
		h.save(run, 1, nil, 1, 2, 3)
	}
	for load, c := range []struct{ from, want string }{{"a/main", "[1 2 3]"}, {"", "[1 2]"}} {
		h.fold("b", events.RestoreBegun{Attempt: 1, Load: load + 1, Checkpoint: "step-2.a1", From: c.from, WorldSize: 1})
		if got := fmt.Sprint(steps(Decide(Policy{Last: 3, Superseded: DeleteSuperseded}, h.read("b")))); got != c.want {
			t.Errorf("after a load from %q kept are %s, want %s", c.from, got, c.want)
		}
	}
}
