package projections

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
)

// timeline is a log whose events have times of their own.
type timeline struct {
	t    interface{ Fatalf(string, ...any) }
	rows *Memory
	log  []events.Recorded

	trial string // of the next events, if it is not the default one
}

// add applies an event of a source at a number of seconds.
func (l *timeline) add(source string, actor events.Actor, at float64, body events.Body) {
	data, err := json.Marshal(body)
	if err != nil {
		l.t.Fatalf("%v", err)
	}
	r := recorded(uint64(len(l.log)+1), events.Scope{Run: "run", Trial: cmp.Or(l.trial, DefaultTrial), Actor: actor}, body.Kind(), string(data))
	r.Source, r.Time = source, epoch.Add(time.Duration(at*float64(time.Second)))
	l.log = append(l.log, r)
	if err := Apply(l.rows, r); err != nil {
		l.t.Fatalf("%s: %v", r.Kind, err)
	}
}

func (l *timeline) usage() Usage {
	u, err := trialUsage(l.rows, "run", DefaultTrial)
	if err != nil {
		l.t.Fatalf("%v", err)
	}
	return u
}

func (l *timeline) row() usageRow {
	u, _, err := load[usageRow](l.rows, usageKey("run", DefaultTrial))
	if err != nil {
		l.t.Fatalf("%v", err)
	}
	return u
}

// wantUsage compares in milliseconds.
func (l *timeline) wantUsage(t *testing.T, when string, want Usage) {
	t.Helper()
	got := l.usage()
	for name, of := range map[string][2]float64{
		"wall": {got.Wall, want.Wall}, "kept": {got.Kept, want.Kept}, "lost": {got.Lost, want.Lost},
		"restoring": {got.Restoring, want.Restoring}, "blocked": {got.Blocked, want.Blocked}, "other": {got.Other, want.Other},
	} {
		if math.Abs(of[0]-of[1]) > 0.001 {
			t.Errorf("%s: %s is %v s, want %v: %+v", when, name, of[0], of[1], got)
		}
	}
}

// The time between two commits counts if both are of one attempt. A restart, the wait for a job, and the
// commits of another trial are no part of it.
func TestGaps(t *testing.T) {
	t.Parallel()
	begun := func(attempt int, id string) events.Body {
		return &events.CheckpointBegun{Attempt: attempt, Checkpoint: id, Name: id, WorldSize: 1}
	}
	committed := func(attempt int, id string) events.Body {
		return &events.CheckpointCommitted{Attempt: attempt, Checkpoint: id, Manifest: "m"}
	}
	for _, c := range []struct {
		name string
		add  func(l *timeline)
		want []time.Duration
	}{
		{"one commit", func(l *timeline) {}, nil},
		{"two in one attempt", func(l *timeline) {
			l.add("one", "s", 310, begun(1, "b"))
			l.add("one", "s", 320, committed(1, "b"))
		}, []time.Duration{300 * time.Second}},
		{"a restart between", func(l *timeline) {
			l.add("two", "s", 9000, &events.GroupStarted{Attempt: 2, Job: "two", WorldSize: 1, Resume: "a"})
			l.add("two", "s", 9300, begun(2, "b"))
			l.add("two", "s", 9301, committed(2, "b"))
			l.add("two", "s", 9600, begun(2, "c"))
			l.add("two", "s", 9602, committed(2, "c"))
		}, []time.Duration{301 * time.Second}},
		{"a save that the next trainer finishes", func(l *timeline) {
			l.add("one", "s", 310, begun(1, "b"))
			l.add("two", "s", 9000, &events.GroupStarted{Attempt: 2, Job: "two", WorldSize: 1, Resume: "a"})
			l.add("two", "s", 9001, committed(1, "b"))
			l.add("two", "s", 9300, begun(2, "c"))
			l.add("two", "s", 9301, committed(2, "c"))
		}, nil},
		{"another trial", func(l *timeline) {
			l.trial = "other"
			l.add("one", "s", 21, &events.GroupStarted{Attempt: 1, Job: "one", WorldSize: 1})
			l.add("one", "s", 22, begun(1, "b"))
			l.add("one", "s", 23, committed(1, "b"))
			l.trial = ""
			l.add("one", "s", 320, begun(1, "c"))
			l.add("one", "s", 321, committed(1, "c"))
		}, []time.Duration{301 * time.Second}},
	} {
		l := &timeline{t: t, rows: NewMemory()}
		l.add("one", "s", 0, &events.GroupStarted{Attempt: 1, Job: "one", WorldSize: 1})
		l.add("one", "s", 10, begun(1, "a"))
		l.add("one", "s", 20, committed(1, "a"))
		c.add(l)
		tally, err := getTally(l.rows, "run")
		if err != nil || !slices.Equal(tally.Gaps, c.want) {
			t.Errorf("%s: gaps %v, %v, want %v", c.name, tally.Gaps, err, c.want)
		}
	}
}

// TestUsage follows a run through a save, a failure, a resume, a load, the death of its
// trainer, and back to a checkpoint that an earlier resume had hidden.
func TestUsage(t *testing.T) {
	l := &timeline{t: t, rows: NewMemory()}
	const first, second = "trainer/one", "trainer/two"
	l.add(first, "s", 0, &events.GroupStarted{Attempt: 1, Job: "one", WorldSize: 1})
	l.add(first, "n0", 5, &events.TrainingStarted{Attempt: 1})
	l.wantUsage(t, "training", Usage{Wall: 5, Other: 5})
	l.add(first, "n0", 14, &events.Metrics{Attempt: 1, Iteration: 1, Step: 1})
	l.wantUsage(t, "a report, which changes no row of the time", Usage{Wall: 14, Kept: 9, Other: 5})
	l.add(first, "s", 15, &events.CheckpointBegun{Attempt: 1, Checkpoint: "a.a1", Name: "a", Step: 1, WorldSize: 1})
	l.add(first, "s", 17, &events.CheckpointCommitted{Attempt: 1, Checkpoint: "a.a1", Manifest: "m"})
	l.add(first, "s", 45, &events.CheckpointBegun{Attempt: 1, Checkpoint: "b.a1", Name: "b", Step: 4, WorldSize: 1})
	l.add(first, "s", 46, &events.CheckpointCommitted{Attempt: 1, Checkpoint: "b.a1", Manifest: "m"})
	l.add(first, "n0", 55, &events.WorkerExited{Attempt: 1, Signal: "SIGKILL"})
	l.add(first, "n0", 58, &events.GroupStopped{Attempt: 1, Failure: "worker"})
	l.wantUsage(t, "a failed worker", Usage{Wall: 58, Kept: 50, Other: 8})

	// The next attempt of this job resumes from a, which is not the newest.
	l.add(first, "s", 60, &events.GroupStarted{Attempt: 2, Job: "one", WorldSize: 1, Resume: "a.a1"})
	l.wantUsage(t, "a resume from a", Usage{Wall: 60, Kept: 10, Lost: 40, Other: 10})
	l.add(first, "n0", 61, &events.TrainingStarted{Attempt: 2})
	l.add(first, "s", 62, &events.RestoreBegun{Attempt: 2, Load: 1, Checkpoint: "a.a1"})
	l.add(first, "n0", 66, &events.RestoreCompleted{Attempt: 2, Load: 1, Checkpoint: "a.a1", Tier: "files"})
	l.add(first, "n0", 70, &events.Metrics{Attempt: 2, Iteration: 1, Step: 2})
	l.wantUsage(t, "a load", Usage{Wall: 70, Kept: 15, Lost: 40, Restoring: 4, Other: 11})

	l.add(first, "s", 70, &events.CheckpointBegun{Attempt: 2, Checkpoint: "d.a2", Name: "d", Step: 5, WorldSize: 1})

	// The trainer is killed. The next one ends its save. Its job begins an hour later, by another clock, which is behind.
	l.add(second, "s", 7000, &events.CheckpointAborted{Attempt: 2, Checkpoint: "d.a2"})
	l.wantUsage(t, "a save that the next trainer ended", Usage{Wall: 70, Kept: 15, Lost: 40, Restoring: 4, Other: 11})
	l.add(second, "s", -500, &events.GroupStarted{Attempt: 3, Job: "two", WorldSize: 1, Resume: "b.a1"})
	l.wantUsage(t, "a resume from b, of the abandoned line", Usage{Wall: 70, Kept: 40, Lost: 15, Restoring: 4, Other: 11})
	l.add(second, "n0", -498, &events.TrainingStarted{Attempt: 3})
	l.add(first, "n0", 4000, &events.GroupStopped{Attempt: 2})  // late: an event of an old attempt
	l.add(second, "n1", 9000, &events.WorkerExited{Attempt: 2}) // of another node, whose clock is far ahead
	l.add(second, "s", -490, &events.CheckpointBegun{Attempt: 3, Checkpoint: "c.a3", Name: "c", Step: 9, WorldSize: 1})
	l.wantUsage(t, "the second clock", Usage{Wall: 80, Kept: 48, Lost: 15, Restoring: 4, Other: 13})
	l.add(second, "n1", 9000, &events.WorkerExited{Attempt: 3, Signal: "SIGKILL"})
	l.wantUsage(t, "a failure on another node", Usage{Wall: 80, Kept: 48, Lost: 15, Restoring: 4, Other: 13})
	l.add(second, "s", -480, &events.CheckpointAborted{Attempt: 3, Checkpoint: "c.a3"})
	l.add(second, "n0", -470, &events.GroupStopped{Attempt: 3})
	l.wantUsage(t, "its end", Usage{Wall: 100, Kept: 48, Lost: 15, Restoring: 4, Other: 33})

	held := &timeline{t: t, rows: NewMemory()}
	held.add(first, "s", 0, &events.GroupStarted{Attempt: 1, Job: "one", WorldSize: 2})
	held.add(first, "n0", 0, &events.TrainingStarted{Attempt: 1})
	held.add(first, "s", 20, &events.CheckpointBegun{Attempt: 1, Checkpoint: "a.a1", Name: "a", Step: 1, WorldSize: 2})
	for rank, s := range []float64{3, 4} {
		held.add(first, events.Rank(rank), 25, &events.WriteSealed{Attempt: 1, Checkpoint: "a.a1", Rank: rank, Waited: &s, Copied: &s})
	}
	held.add(first, "s", 30, &events.CheckpointAborted{Attempt: 1, Checkpoint: "a.a1"})
	held.wantUsage(t, "a save that held up the training", Usage{Wall: 30, Kept: 22, Blocked: 8})
	endless := 1e300
	held.add(first, "s", 30, &events.CheckpointBegun{Attempt: 1, Checkpoint: "b.a1", Name: "b", Step: 2, WorldSize: 1})
	held.add(first, "r0", 30, &events.WriteSealed{Attempt: 1, Checkpoint: "b.a1", Copied: &endless})
	held.add(first, "s", 31, &events.CheckpointCommitted{Attempt: 1, Checkpoint: "b.a1", Manifest: "m"})
	held.wantUsage(t, "a duration that no clock shows", Usage{Wall: 31, Kept: 0, Blocked: 31})

	tally, err := getTally(l.rows, "run")
	if err != nil {
		t.Fatal(err)
	}
	if tally.Committed != 2 || tally.Aborted != 2 || len(tally.Gaps) != 1 || tally.Gaps[0] != 29*time.Second || tally.Saving.Counts != [...]uint64{0, 2, 0, 0, 0, 0} || tally.Saving.Sum != 3 {
		t.Errorf("totals %+v", tally)
	}
	if want := map[string]int{"worker": 1, "lost": 1, "none": 1}; fmt.Sprint(tally.Attempts) != fmt.Sprint(want) {
		t.Errorf("attempts %v, want %v", tally.Attempts, want)
	}
	if len(tally.Restores) != 1 || tally.Restores[0] != (RestoreTally{Tier: "files", Count: 1, Sum: 4}) {
		t.Errorf("restores %+v", tally.Restores)
	}
}

// TestUsageLaws checks, for logs with clocks that jump and events that are late or repeated:
// no use is negative, and the uses add up to the wall time, which is at most the time that the
// attempts' clocks have covered; and a replay gives the same rows.
func TestUsageLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := &timeline{t: t, rows: NewMemory()}
		attempt, load := 0, 0
		source := ""
		clock := rapid.Float64Range(-1000, 1000)
		now := 0.0
		var committed []string
		covered, began, latest, stop := 0.0, 0.0, 0.0, false // by the clocks
		saves := 0
		var loads []int
		see := func(own bool) { // the attempt's clock shows now
			if own {
				latest = max(latest, now)
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "events") {
			switch rapid.IntRange(0, 9).Draw(t, "jump") {
			case 0:
				now = clock.Draw(t, "time")
			case 1:
			default:
				now += rapid.Float64Range(0, 50).Draw(t, "step")
			}
			event := rapid.IntRange(0, 11).Draw(t, "event")
			if attempt == 0 {
				event = 0
			}
			before := l.row()
			switch event {
			case 0:
				covered += latest - began
				same := attempt > 0 && rapid.Bool().Draw(t, "same job")
				if same { // the time until the restart counts
					covered += max(0, now-latest)
				} else {
					source = fmt.Sprint("trainer/", attempt)
				}
				began, latest, stop = now, now, false
				attempt++
				resume := ""
				if len(committed) > 0 && rapid.IntRange(0, 3).Draw(t, "resumes") > 0 {
					resume = rapid.SampledFrom(committed).Draw(t, "resume")
				}
				l.add(source, "s", now, &events.GroupStarted{Attempt: attempt, Job: source, WorldSize: 1, Resume: resume})
				loads = nil
			case 1:
				l.add(source, "n0", now, &events.TrainingStarted{Attempt: attempt})
				see(true)
			case 2:
				l.add(source, "n0", now, &events.Metrics{Attempt: attempt, Iteration: len(l.log), Step: int64(len(l.log))})
				see(!stop)
			case 3, 4:
				saves++
				id := fmt.Sprintf("s%d.a%d", saves, attempt)
				l.add(source, "s", now, &events.CheckpointBegun{Attempt: attempt, Checkpoint: id, Name: id, Step: int64(saves), WorldSize: 1})
				see(true)
				now += rapid.Float64Range(0, 5).Draw(t, "took")
				if rapid.Bool().Draw(t, "measured") {
					copied := rapid.SampledFrom([]float64{0, 0.5, 7, -3, 1e30}).Draw(t, "copied")
					l.add(source, "r0", now, &events.WriteSealed{Attempt: attempt, Checkpoint: id, Copied: &copied})
				}
				l.add(source, "s", now, &events.CheckpointCommitted{Attempt: attempt, Checkpoint: id, Manifest: "m"})
				see(true)
				committed = append(committed, id)
			case 5:
				load++
				from := ""
				if len(committed) > 0 {
					from = rapid.SampledFrom(committed).Draw(t, "loaded")
				}
				l.add(source, "s", now, &events.RestoreBegun{Attempt: attempt, Load: load, Checkpoint: from})
				loads = append(loads, load)
				see(true)
			case 6:
				if len(loads) > 0 {
					l.add(source, "n0", now, &events.RestoreCompleted{Attempt: attempt, Load: rapid.SampledFrom(loads).Draw(t, "ended"), Tier: "files"})
					see(true)
				}
			case 7:
				l.add(source, "n0", now, &events.WorkerExited{Attempt: attempt, Rank: saves, Signal: "SIGKILL"})
				see(true)
			case 8:
				l.add(source, "n0", now, &events.GroupStopped{Attempt: attempt})
				see(true)
				stop = true
			case 9: // of an old attempt
				l.add(source, "n0", now, &events.GroupStopped{Attempt: attempt - 1})
			case 10: // of another node
				l.add(source, "n7", now, &events.WorkerExited{Attempt: attempt, Rank: saves + 1, Signal: "SIGKILL"})
				see(before.Node == "") // before training started, the node of the clock is unknown
			case 11: // repeated
				r := rapid.SampledFrom(l.log).Draw(t, "repeated")
				if !r.Kind.Decides() {
					r.Sequence = uint64(len(l.log) + 1)
					l.log = append(l.log, r)
					if err := Apply(l.rows, r); err != nil {
						t.Fatal(err)
					}
				}
			}
			u := l.usage()
			for name, seconds := range map[string]float64{"wall": u.Wall, "kept": u.Kept, "lost": u.Lost, "restoring": u.Restoring, "blocked": u.Blocked, "other": u.Other} {
				if seconds < 0 {
					t.Fatalf("%s is %v after event %d", name, seconds, len(l.log))
				}
			}
			if sum := u.Kept + u.Lost + u.Restoring + u.Blocked + u.Other; math.Abs(sum-u.Wall) > 1e-6 {
				t.Fatalf("the uses add up to %v of %v", sum, u.Wall)
			}
			if all := covered + latest - began; u.Wall > all+1e-6 {
				t.Fatalf("the wall time is %v, and the clocks covered %v", u.Wall, all)
			}
		}
		again := NewMemory()
		for _, r := range l.log {
			if err := Apply(again, r); err != nil {
				t.Fatal(err)
			}
		}
		a, err := Digest(l.rows)
		b, err2 := Digest(again)
		if err != nil || err2 != nil || a != b {
			t.Fatalf("a replay differs: %v, %v", err, err2)
		}
	})
}

// TestUsageRewinds checks that a resume moves exactly the training behind it.
func TestUsageRewinds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := &timeline{t: t, rows: NewMemory()}
		now, total := 0.0, 0.0
		at := map[string]float64{"": 0} // training in the line of a checkpoint
		ids := []string{""}
		for attempt := range rapid.IntRange(1, 8).Draw(t, "attempts") {
			n := attempt + 1
			resume := rapid.SampledFrom(ids).Draw(t, "resume")
			l.add("trainer", "s", now, &events.GroupStarted{Attempt: n, WorldSize: 1, Resume: resume})
			line := at[resume]
			if u := l.usage(); math.Abs(u.Kept-line) > 1e-6 || math.Abs(u.Lost-(total-line)) > 1e-6 {
				t.Fatalf("after a resume from %q: %+v, want %v of %v kept", resume, u, line, total)
			}
			l.add("trainer", "n0", now, &events.TrainingStarted{Attempt: n})
			for i := range rapid.IntRange(0, 3).Draw(t, "saves") {
				d := rapid.Float64Range(0, 100).Draw(t, "trained")
				now, total, line = now+d, total+d, line+d
				id := fmt.Sprintf("s%d.a%d", i, n)
				l.add("trainer", "s", now, &events.CheckpointBegun{Attempt: n, Checkpoint: id, Name: id, Step: int64(i), WorldSize: 1})
				l.add("trainer", "s", now, &events.CheckpointCommitted{Attempt: n, Checkpoint: id, Manifest: "m"})
				at[id], ids = line, append(ids, id)
			}
			d := rapid.Float64Range(0, 100).Draw(t, "tail")
			now, total = now+d, total+d
			l.add("trainer", "n0", now, &events.GroupStopped{Attempt: n})
		}
	})
}
