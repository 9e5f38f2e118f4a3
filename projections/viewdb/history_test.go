package viewdb_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

const storeID = "store-1"

// fakeLog is a log in memory that can be followed.
type fakeLog struct {
	mu     sync.Mutex
	log    []events.Recorded
	last   uint64 // its reported end
	more   chan struct{}
	broken error // yielded at the end instead of waiting
}

var _ viewdb.Source = (*fakeLog)(nil)

func newLog(log ...events.Recorded) *fakeLog {
	f := &fakeLog{more: make(chan struct{})}
	f.append(log...)
	return f
}

func (f *fakeLog) append(log ...events.Recorded) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.log = append(f.log, log...)
	f.last += uint64(len(log))
	close(f.more)
	f.more = make(chan struct{})
}

func (f *fakeLog) at(i uint64) (r events.Recorded, ok bool, more <-chan struct{}, broken error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if i < uint64(len(f.log)) {
		return f.log[i], true, nil, nil
	}
	return r, false, f.more, f.broken
}

func (f *fakeLog) Last(context.Context) (uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last, nil
}

func (f *fakeLog) Read(ctx context.Context, from, until uint64) iter.Seq2[events.Recorded, error] {
	return func(yield func(events.Recorded, error) bool) {
		for i := from - 1; until == 0 || i < until; {
			r, ok, more, broken := f.at(i)
			switch {
			case ok:
				if !yield(r, nil) {
					return
				}
				i++
			case broken != nil:
				yield(r, broken)
				return
			default:
				select {
				case <-more:
				case <-ctx.Done():
					yield(r, ctx.Err())
					return
				}
			}
		}
	}
}

// prefix returns the log as of its first n events.
func prefix(log []events.Recorded, n int) *fakeLog { return newLog(log[:n]...) }

// history writes a log that trainers could have written. It folds the log on the way to
// know which events are possible next.
type history struct {
	t    *rapid.T
	log  []events.Recorded
	rows *projections.Memory
}

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func event(seq uint64, scope events.Scope, body events.Body) events.Recorded {
	data, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	return events.Recorded{Sequence: seq, Event: events.Event{
		ID: fmt.Sprintf("e%d", seq), Kind: body.Kind(), Version: 1, Source: "test",
		Time: epoch.Add(time.Duration(seq) * time.Second), Scope: scope, Data: data,
	}}
}

func (h *history) record(r events.Recorded) {
	h.log = append(h.log, r)
	if err := projections.Apply(h.rows, r); err != nil {
		h.t.Fatal(err)
	}
}

func (h *history) say(scope events.Scope, body events.Body) {
	h.record(event(uint64(len(h.log)+1), scope, body))
}

func (h *history) pick(label string, n int) int { return rapid.IntRange(0, n-1).Draw(h.t, label) }

func drawHistory(t *rapid.T, most int) *history {
	h := &history{t: t, rows: projections.NewMemory()}
	h.say(events.Scope{Actor: events.Server}, events.StoreCreated{Store: storeID, Format: 1, Data: "file:///d"})
	for range rapid.IntRange(0, most).Draw(t, "events") {
		h.step()
	}
	return h
}

// place is a trial in which events happen.
type place struct {
	*history
	scope   events.Scope // of decisions
	attempt int
	rank    int
	saves   []projections.Checkpoint
}

func (h *history) step() {
	runs := []string{"demo", "a@b/c"}
	trials := []string{projections.DefaultTrial, "t.2"}
	scope := events.Scope{Run: runs[h.pick("run", 4)/3], Trial: trials[h.pick("trial", 4)/3], Actor: events.Server}
	p := place{history: h, scope: scope, rank: h.pick("rank", 3)}
	rows, err := projections.Checkpoints(h.rows, scope.Run, true)
	if err != nil {
		h.t.Fatal(err)
	}
	for _, c := range rows {
		if c.Trial == scope.Trial {
			p.saves = append(p.saves, c)
		}
	}
	if trial, err := projections.GetTrial(h.rows, scope.Run, scope.Trial); err == nil {
		p.attempt = trial.Attempt
	} else if !errors.Is(err, projections.ErrNotFound) {
		h.t.Fatal(err)
	}
	steps := []func(){
		p.job, p.group, p.group, p.begin, p.begin, p.write, p.write, p.write, p.end, p.end, p.end,
		p.report, p.report, p.report, p.load, p.label, p.worker, p.trial, p.again, p.again, p.burst, p.burst,
	}
	steps[h.pick("step", len(steps))]()
}

func (p place) decide(body events.Body) { p.say(p.scope, body) }

func (p place) observe(body events.Body) {
	p.say(events.Scope{Run: p.scope.Run, Trial: p.scope.Trial, Actor: events.Node(0)}, body)
}

// save returns the ID of a checkpoint of the trial in one of the states, or "".
func (p place) save(states ...projections.State) string {
	ids := []string{""}
	for _, c := range p.saves {
		for _, s := range states {
			if c.State == s {
				ids = append(ids, c.ID)
			}
		}
	}
	return ids[p.pick("save", len(ids))]
}

func (p place) job() {
	scope := events.Scope{Run: p.scope.Run, Actor: events.Node(0)}
	job := fmt.Sprintf("J%d", p.pick("job", 3))
	bodies := []events.Body{
		events.JobStarted{Job: job, Host: "h", PID: 1, Command: []string{"python", "<train&go>.py"}, NProc: 2},
		events.JobEnded{Job: job, ExitCode: p.pick("code", 2)},
		events.NodeJoined{Job: job, Node: p.pick("node", 2), Host: "h"},
		events.NodeLeft{Job: job, Node: p.pick("node", 2), Reason: "preempted", Lost: p.pick("lost", 2) == 1},
	}
	p.say(scope, bodies[p.pick("body", len(bodies))])
}

func (p place) group() {
	if p.pick("fork", 8) == 0 {
		p.decide(events.TrialCreated{Config: map[string]any{"lr": 0.1}, Parent: &events.TrialParent{Run: "demo", Trial: "main", Checkpoint: "step-1.a1"}})
		return
	}
	ranks := []events.RankPlacement{{Rank: 0}, {Rank: 1, LocalRank: 1}}
	p.decide(events.GroupStarted{
		Attempt: p.attempt + 1, Job: "J0", WorldSize: 2, Ranks: ranks, Backend: "gloo",
		Resume: p.save(projections.Committed, projections.Committed, projections.Deleted),
	})
}

func (p place) begin() {
	step := int64(p.pick("at", 6))
	name := fmt.Sprintf("step-%d", step)
	id := fmt.Sprintf("%s.a%d", name, p.attempt)
	for n := 2; ; n++ {
		if _, err := projections.GetCheckpoint(p.rows, p.scope.Run, p.scope.Trial, id); err != nil {
			break
		}
		id = fmt.Sprintf("%s.a%d.%d", name, p.attempt, n)
	}
	if p.pick("first", 3) == 0 {
		p.observe(events.WriteSealed{Attempt: p.attempt, Checkpoint: id, Rank: p.rank, Bytes: 8})
	}
	p.decide(events.CheckpointBegun{Attempt: p.attempt, Checkpoint: id, Name: name, Step: step, WorldSize: 2, Participants: []int{0, 1}})
}

func (p place) write() {
	id := p.save(projections.Open, projections.Staged, projections.Committed, projections.Aborted)
	attempt := max(p.attempt-p.pick("late", 4)/3, 0)
	if p.pick("not begun", 8) == 0 { // by a fenced attempt, or not yet begun
		id = fmt.Sprintf("step-%d.a%d", p.pick("at", 6), attempt)
	}
	bodies := []events.Body{
		events.WriteSealed{Attempt: attempt, Checkpoint: id, Rank: p.rank, Bytes: 8},
		events.WriteCompleted{Attempt: attempt, Checkpoint: id, Rank: p.rank, IndexDigest: "d", BytesWritten: 8, BytesReused: 1},
		events.WriteFailed{Attempt: attempt, Checkpoint: id, Rank: p.rank, Error: "disk full"},
	}
	p.observe(bodies[p.pick("body", len(bodies))])
}

// burst appends facts of all ranks at about the same time.
func (p place) burst() {
	id := p.save(projections.Open, projections.Open, projections.Staged)
	step := int64(p.pick("at", 6))
	for rank := range 3 {
		p.observe(events.Metrics{Attempt: p.attempt, Iteration: 1 + (p.rank+rank)%8, Step: step + int64(rank)/2, Metrics: map[string]any{"loss": rank, "bad": "NaN"}})
		if id != "" {
			p.observe(events.WriteSealed{Attempt: p.attempt, Checkpoint: id, Rank: rank, Bytes: 8})
			p.observe(events.WriteCompleted{Attempt: p.attempt, Checkpoint: id, Rank: rank, IndexDigest: "d", BytesWritten: int64(rank), BytesReused: 1})
		}
	}
	if p.pick("exit", 3) == 0 {
		for rank := range 2 {
			p.observe(events.WorkerExited{Attempt: p.attempt, Rank: rank, Code: rank})
		}
	}
}

func (p place) end() {
	id := p.save(projections.Open, projections.Staged)
	bodies := []events.Body{
		events.CheckpointStaged{Attempt: p.attempt, Checkpoint: id},
		events.CheckpointCommitted{Attempt: p.attempt, Checkpoint: id, Manifest: "m", Bytes: 9},
		events.CheckpointCommitted{Attempt: p.attempt, Checkpoint: id, Manifest: "m", Bytes: 9},
		events.CheckpointAborted{Attempt: p.attempt, Checkpoint: id, Reason: "deadline", Ranks: []int{1}},
	}
	if body := bodies[p.pick("body", len(bodies))]; id != "" {
		p.decide(body)
	}
}

func (p place) report() {
	p.observe(events.Metrics{
		Attempt: max(p.attempt-p.pick("late", 4)/3, 0), Iteration: 1 + p.pick("iteration", 8),
		Step: int64(p.pick("at", 8)), Metrics: map[string]any{"loss": p.pick("loss", 9), "bad": "NaN"}, Seconds: 0.25,
	})
}

func (p place) load() {
	id := p.save(projections.Committed, projections.Committed, projections.Aborted)
	attempt, n := max(p.attempt-p.pick("late", 4)/3, 0), 1+p.pick("load", 4)
	switch p.pick("body", 4) {
	case 0:
		p.observe(events.RestoreCompleted{Attempt: attempt, Load: n, Checkpoint: id, Tier: "files", Bytes: 8})
	case 1:
		p.observe(events.RestoreFailed{Attempt: attempt, Load: n, Checkpoint: id, Error: "gone"})
	default:
		p.decide(events.RestoreBegun{Attempt: attempt, Load: n, Checkpoint: id, WorldSize: 2})
	}
}

func (p place) label() {
	id := p.save(projections.Committed, projections.Committed, projections.Aborted, projections.Deleted)
	bodies := []events.Body{
		events.CheckpointPinned{Checkpoint: id, Reason: "paper"},
		events.CheckpointUnpinned{Checkpoint: id},
		events.CheckpointTagged{Checkpoint: id, Tag: fmt.Sprintf("tag%d", p.pick("tag", 2))},
		events.CheckpointUntagged{Checkpoint: id, Tag: fmt.Sprintf("tag%d", p.pick("tag", 2))},
		events.CheckpointAttached{Checkpoint: id, Name: "eval.json", Digest: "x", Size: int64(p.pick("size", 3))},
		events.CheckpointSuperseded{Checkpoint: id, Reason: "spike"},
		events.CheckpointDeleted{Checkpoint: id, Reason: "retention"},
	}
	p.decide(bodies[p.pick("body", len(bodies))])
}

func (p place) worker() {
	bodies := []events.Body{
		events.TrainingStarted{Attempt: p.attempt},
		events.WorkerExited{Attempt: p.attempt, Rank: p.rank, Code: p.pick("code", 3) - 1, Signal: "SIGKILL"},
		events.GroupStopped{Attempt: p.attempt, Reason: "failure"},
		events.LocalPlan{Attempt: p.attempt},
		events.GPUUnhealthy{Device: "GPU-a", Reason: "Xid"},
		events.GPURecovered{Device: "GPU-a"},
	}
	p.observe(bodies[p.pick("body", len(bodies))])
}

func (p place) trial() {
	bodies := []events.Body{
		events.TrialStopRequested{Reason: "enough"},
		events.TrialPaused{Attempt: p.attempt},
		events.TrialCompleted{Attempt: p.attempt},
		events.TrialErrored{Attempt: p.attempt, Message: "budget"},
	}
	p.decide(bodies[p.pick("body", len(bodies))])
}

// again repeats an old fact, which must change nothing.
func (p place) again() {
	r := p.log[p.pick("old", len(p.log))]
	if r.Kind.Decides() {
		return
	}
	want := digest(p.t, p.rows)
	r.Sequence = uint64(len(p.log) + 1)
	p.record(r)
	if digest(p.t, p.rows) != want {
		p.t.Fatalf("%s %s repeated changed the rows", r.Kind, r.Data)
	}
}

type fatal interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

var (
	_ fatal = (*testing.T)(nil)
	_ fatal = (*rapid.T)(nil)
)

func digest(t fatal, r projections.Reader) [32]byte {
	t.Helper()
	sum, err := projections.Digest(r)
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

// replayed returns the digest of the log's first n events, folded in memory.
func replayed(t fatal, log []events.Recorded, n uint64) [32]byte {
	t.Helper()
	m := projections.NewMemory()
	if n > 0 {
		var err error
		if m, err = viewdb.Replay(context.Background(), newLog(log...), n); err != nil {
			t.Fatal(err)
		}
	}
	return digest(t, m)
}
