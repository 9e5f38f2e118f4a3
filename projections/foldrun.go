package projections

import (
	"strconv"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// at returns the event's time in the form that all rows use.
func (f *fold) at() time.Time { return f.r.Time.UTC() }

func (f *fold) storeCreated(b *events.StoreCreated) error {
	_, found, err := load[Store](f.t, key(keyStore))
	if err != nil || found {
		return err
	}
	return store(f.t, key(keyStore), Store{
		ID: b.Store, Format: b.Format, Data: b.Data, CreatedSeq: f.r.Sequence, CreatedAt: f.at(),
	})
}

// loadRun returns the row of the event's run. The row is new if this is the run's first
// event.
func (f *fold) loadRun() (run Run, found bool, err error) {
	run, found, err = load[Run](f.t, key(keyRun, f.run))
	if !found {
		run = Run{Name: f.run, CreatedSeq: f.r.Sequence, CreatedAt: f.at()}
	}
	return run, found, err
}

// seeRun makes sure that the run of a new trial has a row: decisions overtake queued
// facts, so a trial can be in the log before its job.
func (f *fold) seeRun() error {
	run, found, err := f.loadRun()
	if err != nil || found {
		return err
	}
	return store(f.t, key(keyRun, f.run), run)
}

// changeJob changes the row of a job. The first fact about the job creates it.
func (f *fold) changeJob(id string, change func(*Job)) error {
	k := key(keyJob, f.run, id)
	job, found, err := load[Job](f.t, k)
	if err != nil {
		return err
	}
	if !found {
		job = Job{ID: id, Run: f.run}
	}
	change(&job)
	return store(f.t, k, job)
}

func (f *fold) jobStarted(b *events.JobStarted) error {
	first := false
	err := f.changeJob(b.Job, func(job *Job) {
		if job.StartedSeq != 0 {
			return
		}
		first = true
		job.Host, job.PID, job.Command = b.Host, b.PID, b.Command
		job.NProc, job.NNodes, job.Resume = b.NProc, b.NNodes, b.Resume
		job.Flags, job.Dir, job.Logs = b.Flags, b.Dir, b.Logs
		job.StartedSeq, job.StartedAt = f.r.Sequence, f.at()
	})
	if err != nil || !first {
		return err
	}
	run, _, err := f.loadRun()
	if err != nil {
		return err
	}
	run.Job, run.Jobs = b.Job, run.Jobs+1
	run.StartedSeq, run.StartedAt = f.r.Sequence, f.at()
	return store(f.t, key(keyRun, f.run), run)
}

func (f *fold) jobEnded(b *events.JobEnded) error {
	if over, err := f.overtaken(key(keyJobTerm, f.run, b.Job), b.Term); over || err != nil {
		return err
	}
	return f.changeJob(b.Job, func(job *Job) {
		if !job.Ended {
			job.Ended, job.EndedSeq, job.EndedAt = true, f.r.Sequence, f.at()
			job.ExitCode, job.Reason = b.ExitCode, b.Reason
		}
	})
}

// A node may join and leave a job again and again. A repeated fact carries the time of
// the first, which distinguishes it from a new stay.

func (f *fold) nodeJoined(b *events.NodeJoined) error {
	return f.changeJob(b.Job, func(job *Job) {
		for _, n := range job.Nodes {
			if n.Node == b.Node && n.JoinedAt.Equal(f.at()) {
				return
			}
		}
		job.Nodes = append(job.Nodes, JobNode{Node: b.Node, Host: b.Host, JoinedAt: f.at()})
	})
}

// replicated keeps the newest replica of a node. A repeated fact carries the time of the first.
func (f *fold) replicated(b *events.ReplicaNode) error {
	node, err := strconv.Atoi(strings.TrimPrefix(string(f.r.Scope.Actor), "n"))
	if err != nil {
		return nil // it is not a node's
	}
	k := replicaKey(f.run, f.name, node)
	old, found, err := load[Replica](f.t, k)
	if err != nil || found && !f.at().After(old.At) {
		return err
	}
	return store(f.t, k, Replica{
		Run: f.run, Trial: f.name, Node: node, Attempt: b.Attempt, Checkpoint: b.Checkpoint, On: b.Node, At: f.at(), Bytes: b.Bytes, Seconds: b.Seconds,
	})
}

// A coordinator that was replaced may have lost the others only because it was cut off itself.
func (f *fold) nodeLeft(b *events.NodeLeft) error {
	if over, err := f.overtaken(key(keyJobTerm, f.run, b.Job), b.Term); over || err != nil {
		return err
	}
	return f.changeJob(b.Job, func(job *Job) {
		open := -1
		for i, n := range job.Nodes {
			if n.Node != b.Node {
				continue
			}
			if n.LeftAt.Equal(f.at()) {
				return
			}
			if n.LeftAt.IsZero() {
				open = i
			}
		}
		if open < 0 {
			// Kept, because a repetition of this fact could otherwise end a later stay.
			job.Nodes = append(job.Nodes, JobNode{Node: b.Node, Host: b.Host})
			open = len(job.Nodes) - 1
		}
		job.Nodes[open].LeftAt, job.Nodes[open].Reason, job.Nodes[open].Lost = f.at(), b.Reason, b.Lost
		job.Nodes[open].Excluded, job.Nodes[open].Boot = b.Excluded, b.Boot
	})
}

// nodeSlow keeps the newest facts about the speed of a node's stay. A repeated fact carries the time
// of the first, which is before a stay that began since.
func (f *fold) nodeSlow(b *events.NodeSlow) error {
	return f.changeJob(b.Job, func(job *Job) {
		i := len(job.Nodes) - 1
		for i >= 0 && (job.Nodes[i].Node != b.Node || job.Nodes[i].JoinedAt.After(f.at())) {
			i--
		}
		if i < 0 {
			return
		}
		switch n := &job.Nodes[i]; {
		case b.Over && f.at().After(n.WellAt):
			n.WellAt = f.at()
		case !b.Over && f.at().After(n.SlowAt):
			n.SlowAt, n.SlowAttempt, n.SlowBy, n.SlowSeconds, n.SlowOthers = f.at(), b.Attempt, b.By, b.Seconds, b.Others
		}
	})
}

// nodeMeasured gives the rate to the node's newest stay.
func (f *fold) nodeMeasured(b *events.NodeMeasured) error {
	return f.changeJob(b.Job, func(job *Job) {
		for i := len(job.Nodes) - 1; i >= 0; i-- {
			if job.Nodes[i].Node == b.Node {
				job.Nodes[i].BytesPerSecond, job.Nodes[i].ClockSeconds = &b.BytesPerSecond, b.Clock
				return
			}
		}
	})
}
