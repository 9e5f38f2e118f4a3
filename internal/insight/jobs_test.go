package insight

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// TestStatesOfJobs checks that a job that has not ended runs only while it holds
// the run, and that an ended job stays ended if another job holds the run.
func TestStatesOfJobs(t *testing.T) {
	begun := time.Unix(1000, 0)
	for name, c := range map[string]struct {
		live   string
		ended  bool
		status projections.Status
		want   string
		timed  bool
	}{
		"holds the run":             {live: "j", want: Running, timed: true},
		"holds it, asked to stop":   {live: "j", status: projections.Stopping, want: Stopping, timed: true},
		"no job holds it":           {want: Lost},
		"another job holds it":      {live: "k", want: Lost},
		"another, asked to stop":    {live: "k", status: projections.Stopping, want: Lost},
		"ended":                     {ended: true, want: Ended, timed: true},
		"ended, its run still held": {live: "j", ended: true, want: Ended, timed: true},
	} {
		job := projections.Job{ID: "j", Run: "r", StartedAt: begun}
		if c.ended {
			job.Ended, job.ExitCode, job.EndedAt = true, 3, begun.Add(30*time.Second)
		}
		r := RunJobs{Live: c.live}
		r.Take(projections.Launches{Run: "r", Jobs: []projections.Job{job}, Trials: []projections.Trial{{Job: "j", Status: c.status}}})
		got := r.List(begun.Add(time.Minute))[0]
		if got.State != c.want || (got.Seconds != nil) != c.timed || (got.ExitCode != nil) != c.ended {
			t.Errorf("%s: %+v, want %s", name, got, c.want)
		}
		if want := map[bool]float64{true: 30, false: 60}[c.ended]; c.timed && *got.Seconds != want {
			t.Errorf("%s: %v s, want %v", name, *got.Seconds, want)
		}
	}
	// A job without an ID is not the live job of a run that no job holds.
	r := RunJobs{Jobs: []projections.Job{{}}}
	if got := r.List(begun)[0].State; got != Lost {
		t.Errorf("a job without an ID is %s", got)
	}
}

// TestJobSumsUpItsAttempts checks restarts, checkpoints and failed devices: those of
// other jobs of the run do not count.
func TestJobSumsUpItsAttempts(t *testing.T) {
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	r := RunJobs{Live: "j"}
	r.Take(projections.Launches{
		Run:  "r",
		Jobs: []projections.Job{{ID: "j", StartedAt: at(100)}, {ID: "i", StartedAt: at(10), Ended: true, EndedAt: at(50)}},
		Trials: []projections.Trial{
			{Name: projections.DefaultTrial, Parent: &events.TrialParent{Run: "p", Trial: projections.DefaultTrial, Checkpoint: "c"}},
		},
		Attempts: []projections.Attempt{
			{Trial: "a", Job: "i", Committed: "old", CommittedSeq: 5},
			{Trial: "a", Job: "j", Resume: "old", Committed: "new", CommittedSeq: 9},
			{Trial: "a", Job: "j", Resume: "new"},
			{Trial: "b", Job: "j", Committed: "between", CommittedSeq: 7},
		},
		Devices: []projections.Device{
			{Device: "GPU-0", Reason: "Xid 79", UnhealthyAt: at(120)},
			{Device: "GPU-1", Reason: "Xid 48", UnhealthyAt: at(20)},
			{Device: "GPU-2", Reason: "Xid 79", UnhealthyAt: at(120), Healthy: true},
		},
	})
	list := r.List(at(200))
	var got []string
	for _, j := range list {
		got = append(got, fmt.Sprint(j.Job, " ", j.Attempts, j.Restarts, " ", j.From, ">", j.Head, " ", j.Unhealthy, " ", j.Parent))
	}
	want := []string{
		"j 3 1 old>new [GPU-0: Xid 79] " + projections.ParentRef(*r.trials[0].Parent),
		"i 1 0 >old [GPU-1: Xid 48] " + projections.ParentRef(*r.trials[0].Parent),
	}
	if !slices.Equal(got, want) {
		t.Errorf("jobs\n%q, want\n%q", got, want)
	}
}

// TestGapsOfReshards checks that values are listed once, by name, with their ranks.
func TestGapsOfReshards(t *testing.T) {
	p := &planner.Preview{
		Ranks:  []planner.RankPreview{{Rank: 0}, {Rank: 2, Lacks: []string{"a", "rng"}}, {Rank: 3, Lacks: []string{"rng"}}},
		Unread: []planner.UnreadValue{{FQN: "z", Rank: 4}, {FQN: "b", Rank: 4}, {FQN: "z", Rank: 5}},
	}
	if got, want := fmt.Sprint(Lacking(p), Unread(p)), "[{a [2]} {rng [2 3]}] [{b [4]} {z [4 5]}]"; got != want {
		t.Errorf("gaps %s, want %s", got, want)
	}
}

// TestChooseTrial checks that the name of a run is never a guess among several trials.
func TestChooseTrial(t *testing.T) {
	for want, names := range map[string][]string{
		"":                       {},
		"only":                   {"only"},
		projections.DefaultTrial: {"a", projections.DefaultTrial, "b"},
		"none":                   {"a", "b"},
	} {
		var trials []projections.Trial
		for _, name := range names {
			trials = append(trials, projections.Trial{Name: name})
		}
		got, ok := ChooseTrial(trials)
		if wanted := want != "" && want != "none"; ok != wanted || ok && got.Name != want {
			t.Errorf("of %q: %q (%v), want %q", names, got.Name, ok, want)
		}
	}
}
