package session

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/store"
)

// lanes returns lanes of one trial in a log, as different trainers have them.
func lanes(t *testing.T) func(source string, attempt int) *decisionLog {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	if _, err := store.Init(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	st, err := store.Open(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return func(source string, attempt int) *decisionLog {
		return &decisionLog{
			eventWriter: &eventWriter{log: st.Log, run: "run", trial: "main", source: source, node: events.Node(0), now: time.Now, newID: store.NewID},
			agg:         events.Aggregate{Run: "run", Trial: "main"}, attempt: attempt,
			conflict: func(err error) bool { return errors.Is(err, jetlog.ErrConflict) },
		}
	}
}

func decides(t *testing.T, l *decisionLog, body events.Body, want error) {
	t.Helper()
	if _, err := l.decide(t.Context(), body); !errors.Is(err, want) {
		t.Fatalf("%s: decide %s: error %v, want %v", l.source, body.Kind(), err, want)
	}
}

func begins(attempt int, id string) events.Body {
	return &events.CheckpointBegun{Attempt: attempt, Checkpoint: id, Name: "x", WorldSize: 1, Participants: []int{0}}
}

func starts(l *decisionLog, attempt int) events.Body {
	l.attempt = attempt
	return &events.GroupStarted{Attempt: attempt, Job: l.source, WorldSize: 1}
}

// A newer attempt fences an older one, whatever the older one decides. Of two
// trainers that start the same attempt only one succeeds.
func TestFencing(t *testing.T) {
	open := lanes(t)
	a, b := open("trainer/a", 0), open("trainer/b", 0)
	decides(t, a, &events.TrialCreated{}, nil)
	decides(t, a, starts(a, 1), nil)
	decides(t, a, begins(1, "x.a1"), nil)
	decides(t, b, starts(b, 1), ErrFenced)

	b.last = a.last
	decides(t, b, starts(b, 2), nil)
	for _, body := range []events.Body{
		&events.CheckpointCommitted{Attempt: 1, Checkpoint: "x.a1"},
		&events.CheckpointAborted{Attempt: 1, Checkpoint: "x.a1"},
		begins(1, "y.a1"), &events.TrialCompleted{Attempt: 1}, starts(a, 2),
	} {
		decides(t, a, body, ErrFenced)
	}
	decides(t, b, begins(2, "x.a2"), nil)
}

// The end of a group names the newest decision by which its writer coordinates, and the end of a job that by which
// its writer took the place of another process: a coordinator that has been replaced names others.
func TestTerms(t *testing.T) {
	open := lanes(t)
	a, b := open("trainer/job", 0), open("trainer/job", 0)
	first, second := &Job{decisions: a}, &Job{decisions: b}
	if first.Term()+first.JobTerm() != "" || (&Job{}).JobTerm() != "" {
		t.Error("a term before the first decision")
	}
	decide := func(l *decisionLog, body events.Body) string {
		t.Helper()
		r, err := l.decide(t.Context(), body)
		if err != nil {
			t.Fatal(err)
		}
		return r.ID
	}
	decide(a, &events.TrialCreated{})
	started := decide(a, starts(a, 1))
	b.last, b.attempt = a.last, 1
	took := decide(b, &events.GroupCoordinator{Attempt: 1, Job: "job", Node: 1, Host: "b", Reason: "silent"})
	if first.Term() != started || first.JobTerm() != started || second.Term() != took || second.JobTerm() != took {
		t.Errorf("terms %s and %s of %s, %s and %s of %s", first.Term(), first.JobTerm(), started, second.Term(), second.JobTerm(), took)
	}
	next := decide(b, starts(b, 2))
	if second.Term() != next || second.JobTerm() != took {
		t.Errorf("in the next group: terms %s and %s, want %s and %s", second.Term(), second.JobTerm(), next, took)
	}
}

// A lane whose end this process never reaches is an error in the end.
func TestDecideBehindTheLane(t *testing.T) {
	open := lanes(t)
	a := open("trainer/a", 0)
	decides(t, a, &events.TrialCreated{}, nil)
	if err := a.measured(t.Context(), &events.Metrics{Attempt: 1, Iteration: 1}); err != nil {
		t.Fatal(err)
	}
	a.last++
	decides(t, a, starts(a, 1), jetlog.ErrConflict)
}

// Another process's decision in between is read. If it ends the same checkpoint,
// it ends this decision too.
func TestDecideAfterOthers(t *testing.T) {
	open := lanes(t)
	a := open("trainer/a", 0)
	decides(t, a, &events.TrialCreated{}, nil)
	decides(t, a, starts(a, 1), nil)
	decides(t, a, begins(1, "x.a1"), nil)
	decides(t, a, begins(1, "y.a1"), nil)
	user := open("ckptstore", 1)
	user.last = a.last
	decides(t, user, &events.TrialStopRequested{Reason: "enough"}, nil)
	decides(t, user, &events.CheckpointAborted{Attempt: 1, Checkpoint: "x.a1"}, nil)
	decides(t, a, &events.CheckpointCommitted{Attempt: 1, Checkpoint: "x.a1"}, errEnded)
	decides(t, a, &events.CheckpointCommitted{Attempt: 1, Checkpoint: "y.a1"}, nil)
	decides(t, user, &events.CheckpointAborted{Attempt: 1, Checkpoint: "y.a1"}, errEnded)
}

// A decision has its own deadline, and ends with its context.
func TestDecideWithoutLog(t *testing.T) {
	l := lanes(t)("trainer/a", 0)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.decide(ctx, &events.TrialCreated{}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// A coordinator that another has replaced decides nothing more about the attempt, and learns of it without a
// decision too. What it did before stays.
func TestOvertaken(t *testing.T) {
	open := lanes(t)
	a, b := open("trainer/a", 0), open("trainer/a", 0) // of one job
	decides(t, a, &events.TrialCreated{}, nil)
	decides(t, a, starts(a, 1), nil)
	b.last, b.attempt = a.last, 1
	if err := a.overtaken(t.Context()); err != nil {
		t.Fatal(err)
	}
	decides(t, b, &events.GroupCoordinator{Attempt: 1, Job: "a", Node: 1, Host: "b"}, nil)
	decides(t, b, begins(1, "x.a1"), nil)
	if err := b.overtaken(t.Context()); err != nil {
		t.Errorf("its successor: %v", err)
	}
	if err := a.overtaken(t.Context()); !errors.Is(err, ErrOvertaken) || !errors.Is(err, ErrFenced) {
		t.Errorf("the one before: %v", err)
	}
	for _, body := range []events.Body{
		&events.CheckpointCommitted{Attempt: 1, Checkpoint: "x.a1"}, &events.CheckpointAborted{Attempt: 1, Checkpoint: "x.a1"},
		begins(1, "y.a1"), &events.TrialCompleted{Attempt: 1}, starts(a, 2),
	} {
		decides(t, a, body, ErrOvertaken)
	}
	decides(t, b, &events.CheckpointCommitted{Attempt: 1, Checkpoint: "x.a1"}, nil)
}

// A coordinator that another has replaced appends no fact that only a coordinator may record, such as the loss of a
// node: saves of the group would fail of it. It is not deceived by a copy of the log that was cut off as it was.
func TestFactsOfReplacedCoordinator(t *testing.T) {
	open := lanes(t)
	a, b := open("trainer/a", 0), open("trainer/a", 0) // of one job
	first, second := &Job{decisions: a, writer: a.eventWriter}, &Job{decisions: b, writer: b.eventWriter}
	lost := &events.WorkerExited{Attempt: 1, Rank: 0, Code: -1, Unseen: true}
	appends := func(j *Job, want error) {
		t.Helper()
		before, err := b.log.Last(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := j.AppendCoordinating(t.Context(), lost); !errors.Is(err, want) {
			t.Errorf("error %v, want %v", err, want)
		}
		if after, err := b.log.Last(t.Context()); err != nil || (after > before) != (want == nil) {
			t.Errorf("the log ends at %d, and ended at %d; %v", after, before, err)
		}
	}
	decides(t, a, &events.TrialCreated{}, nil)
	decides(t, a, starts(a, 1), nil)
	b.last, b.attempt = a.last, 1
	appends(first, nil)
	a.log = laggingLog{a.log, a.last}
	decides(t, b, &events.GroupCoordinator{Attempt: 1, Job: "a", Node: 1, Host: "b"}, nil)
	appends(first, ErrOvertaken)
	appends(second, nil)
}

// laggingLog is a log that reports the end of a copy that was cut off.
type laggingLog struct {
	Log
	end uint64
}

func (l laggingLog) Last(context.Context) (uint64, error) { return l.end, nil }
