package insight

import (
	"fmt"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/projections"
)

// TestStatesOfNodes checks the state of node 1 of a job of two nodes.
func TestStatesOfNodes(t *testing.T) {
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	first := projections.JobNode{Node: 0, Host: "a", JoinedAt: at(1)}
	joined := projections.JobNode{Node: 1, Host: "b", JoinedAt: at(2)}
	silent := projections.JobNode{Node: 1, Host: "b", JoinedAt: at(2), LeftAt: at(20), Reason: "silent", Lost: true}
	group := projections.Attempt{Job: "j", StartedSeq: 5, StartedAt: at(10)}
	stopped := projections.Attempt{Job: "j", StartedSeq: 5, StartedAt: at(10), StoppedAt: at(30)}
	other := projections.Attempt{Job: "i", StartedSeq: 9, StartedAt: at(40)}
	both := []projections.Worker{{Rank: 0}, {Rank: 1}, {Rank: 2, Node: 1}, {Rank: 3, Node: 1}}
	one := both[:2]
	for name, c := range map[string]struct {
		stays   []projections.JobNode
		attempt projections.Attempt
		workers []projections.Worker
		live    string
		ended   bool
		want    string
	}{
		"before the first group":     {stays: []projections.JobNode{first, joined}, attempt: other, live: "j", want: "b ready [] 2  1"},
		"in the group":               {stays: []projections.JobNode{first, joined}, attempt: group, workers: both, live: "j", want: "b active [2 3] 10  1"},
		"join not recorded yet":      {stays: []projections.JobNode{first}, attempt: group, workers: both, live: "j", want: " active [2 3] 10  1"},
		"not needed":                 {stays: []projections.JobNode{first, joined}, attempt: group, workers: one, live: "j", want: "b spare [] 2  1"},
		"between two groups":         {stays: []projections.JobNode{first, joined}, attempt: stopped, workers: both, live: "j", want: "b ready [2 3] 30  1"},
		"lost":                       {stays: []projections.JobNode{first, silent}, attempt: group, workers: both, live: "j", want: "b lost [2 3] 20 silent 1"},
		"lost, then the job":         {stays: []projections.JobNode{first, silent}, attempt: group, workers: both, want: "b lost [2 3] 20 silent 1"},
		"replaced during a group":    {stays: []projections.JobNode{first, silent, {Node: 1, Host: "c", JoinedAt: at(21)}}, attempt: group, workers: both, live: "j", want: "c spare [] 21  2"},
		"replaced before it":         {stays: []projections.JobNode{first, {Node: 1, Host: "c", LeftAt: at(3), Lost: true}, joined}, attempt: group, workers: both, live: "j", want: "b active [2 3] 10  1"},
		"left in order":              {stays: []projections.JobNode{first, {Node: 1, Host: "b", JoinedAt: at(2), LeftAt: at(20), Reason: "SIGTERM"}}, attempt: group, workers: both, live: "j", want: "b left [2 3] 20 SIGTERM 1"},
		"left without a join":        {stays: []projections.JobNode{first, joined, {Node: 1, LeftAt: at(20), Reason: "silent", Lost: true}}, attempt: group, workers: both, live: "j", want: "b lost [2 3] 20 silent 1"},
		"excluded":                   {stays: []projections.JobNode{first, {Node: 1, Host: "b", JoinedAt: at(2), LeftAt: at(20), Reason: "2 failures", Excluded: true}}, attempt: group, workers: one, live: "j", want: "b excluded [] 20 2 failures 1"},
		"excluded, and the job over": {stays: []projections.JobNode{first, {Node: 1, Host: "b", JoinedAt: at(2), LeftAt: at(20), Reason: "2 failures", Excluded: true}}, attempt: group, workers: one, ended: true, want: "b excluded [] 20 2 failures 1"},
		"the job ended":              {stays: []projections.JobNode{first, joined}, attempt: stopped, workers: both, ended: true, want: "b left [2 3] 50 the job ended 1"},
		"the job is lost":            {stays: []projections.JobNode{first, joined}, attempt: group, workers: both, want: "b lost [2 3] 0 the job is lost: it recorded no end 1"},
	} {
		t.Run(name, func(t *testing.T) {
			job := projections.Job{ID: "j", Nodes: c.stays, Ended: c.ended}
			if c.ended {
				job.EndedAt = at(50)
			}
			r := RunJobs{Live: c.live}
			r.Take(projections.Launches{Jobs: []projections.Job{job}, Attempts: []projections.Attempt{c.attempt}})
			list := r.Nodes(job, c.workers)
			if len(list) != 2 || list[0].Host != "a" {
				t.Fatalf("nodes %+v", list)
			}
			n := list[1]
			since := int64(0)
			if !n.Since.IsZero() {
				since = n.Since.Unix()
			}
			if got := fmt.Sprint(n.Host, " ", n.State, " ", n.Ranks, " ", since, " ", n.Why, " ", n.Joins); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
	// An excluded node stays in the list when another one has its index.
	job := projections.Job{ID: "j", Nodes: []projections.JobNode{first, {Node: 1, Host: "b", JoinedAt: at(2), LeftAt: at(20), Reason: "2 failures", Excluded: true}, {Node: 1, Host: "c", JoinedAt: at(21)}}}
	r := RunJobs{Live: "j"}
	r.Take(projections.Launches{Jobs: []projections.Job{job}, Attempts: []projections.Attempt{group}})
	if list := r.Nodes(job, one); len(list) != 3 || list[1].Host != "b" || list[1].State != NodeExcluded || list[1].Why != "2 failures" || list[2].Host != "c" || list[2].State != NodeSpare {
		t.Errorf("nodes %+v", list)
	}
	if list := (RunJobs{}).Nodes(projections.Job{ID: "j"}, nil); list == nil || len(list) != 0 {
		t.Errorf("nodes of a job without any: %v", list)
	}
}

// The newest replica of a node of the running group is shown, and no other.
func TestReplicasOfNodes(t *testing.T) {
	job := projections.Job{ID: "j", Nodes: []projections.JobNode{{Node: 0, Host: "a", JoinedAt: time.Unix(1, 0)}, {Node: 1, Host: "b", JoinedAt: time.Unix(2, 0)}}}
	r := RunJobs{Live: "j"}
	r.Take(projections.Launches{Jobs: []projections.Job{job}, Attempts: []projections.Attempt{{Job: "j", Trial: "main", Attempt: 3, StartedSeq: 5, StartedAt: time.Unix(10, 0)}}})
	list := r.Nodes(job, []projections.Worker{{Rank: 0}, {Rank: 1, Node: 1}})
	r.Copied(job, list, []projections.Replica{
		{Trial: "main", Node: 0, Attempt: 2, Checkpoint: "step-1.a2", On: 1},
		{Trial: "main", Node: 1, Attempt: 3, Checkpoint: "step-2.a3", On: 0, Seconds: 1.5},
		{Trial: "other", Node: 0, Attempt: 3, Checkpoint: "step-3.a3", On: 1},
	})
	if of := list[1].Replica; of == nil || of.Checkpoint != "step-2.a3" || of.Node != 0 || of.Lag != 1.5 {
		t.Errorf("node 1 has %+v", of)
	}
	if of := list[0].Replica; of != nil {
		t.Errorf("node 0 has %+v of another attempt or trial", of)
	}
}

// A node of the running group that is slower than the others is shown, until it is well again or
// another group runs.
func TestSlowNodes(t *testing.T) {
	t.Parallel()
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	for name, c := range map[string]struct {
		slow, well time.Time
		attempt    int
		live       string
		want       string
	}{
		"slow":             {slow: at(20), attempt: 3, live: "j", want: "slow: is busy 0.5 s in an iteration, and the other nodes 0.2 s"},
		"slow again":       {slow: at(20), well: at(15), attempt: 3, live: "j", want: "slow: is busy 0.5 s in an iteration, and the other nodes 0.2 s"},
		"well again":       {slow: at(20), well: at(30), attempt: 3, live: "j", want: "<nil>"},
		"an older attempt": {slow: at(5), attempt: 2, live: "j", want: "<nil>"},
		"the job is lost":  {slow: at(20), attempt: 3, want: "<nil>"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			job := projections.Job{ID: "j", Nodes: []projections.JobNode{
				{Node: 0, Host: "a", JoinedAt: at(1)},
				{Node: 1, Host: "b", JoinedAt: at(2), SlowAt: c.slow, WellAt: c.well, SlowAttempt: c.attempt, SlowBy: "busy", SlowSeconds: 0.5, SlowOthers: 0.2},
			}}
			r := RunJobs{Live: c.live}
			r.Take(projections.Launches{Jobs: []projections.Job{job}, Attempts: []projections.Attempt{{Job: "j", Attempt: 3, StartedSeq: 5, StartedAt: at(10)}}})
			list := r.Nodes(job, []projections.Worker{{Rank: 0}, {Rank: 1, Node: 1}})
			if list[0].Slow != nil || fmt.Sprint(list[1].Slow) != c.want {
				t.Errorf("nodes %v and %v, want <nil> and %s", list[0].Slow, list[1].Slow, c.want)
			}
		})
	}
	copies := NodeSlowness{By: "copy", Seconds: 1.25, Others: 0.5}
	if got, want := copies.String(), "slow: copies a GB in 1.25 s, and the other nodes 0.5 s"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
