package insight

import (
	"fmt"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/projections"
)

// States of a job, as far as the rows show. A lost job did not end and holds no
// lease: it was killed, or its machine is gone.
const (
	Running  = "running"
	Stopping = "stopping"
	Ended    = "ended"
	Lost     = "lost"
)

// Job is one job. It is the output of `jobs --json`.
type Job struct {
	Job       string    `json:"job"`
	Run       string    `json:"run"`
	Host      string    `json:"host"`
	PID       int       `json:"pid"`
	State     string    `json:"state"`
	ExitCode  *int      `json:"exit_code,omitempty"` // once it ended
	Reason    string    `json:"reason,omitempty"`
	StartedAt time.Time `json:"started_at,omitzero"`
	EndedAt   time.Time `json:"ended_at,omitzero"`
	Seconds   *float64  `json:"seconds,omitempty"` // unknown for a lost job
	NProc     int       `json:"nproc"`
	NNodes    int       `json:"nnodes"`
	Attempts  int       `json:"attempts"`
	Restarts  int       `json:"restarts"`
	Asked     string    `json:"resume"`           // the requested checkpoint
	From      string    `json:"from,omitempty"`   // checkpoint that its first attempt continued
	Head      string    `json:"head,omitempty"`   // last checkpoint that it committed
	Parent    string    `json:"parent,omitempty"` // checkpoint that the run was forked from
	Command   []string  `json:"command"`
	Flags     []string  `json:"flags,omitempty"` // of the trainer
	Dir       string    `json:"dir,omitempty"`
	Logs      string    `json:"logs,omitempty"`
	Unhealthy []string  `json:"unhealthy_devices,omitempty"` // GPUs that failed in it and did not recover, with the reason
	// Goodput is the part of the run's time that led to the present, over all its jobs; only in
	// the run's newest job.
	Goodput *float64 `json:"goodput,omitempty"`
	// LastEnd is the last end of one of its attempts; nil: none has ended.
	LastEnd *AttemptEnd `json:"last_end,omitempty"`
}

// AttemptEnd is the end of an attempt: a failure, a request, growth, or the end of the training.
type AttemptEnd struct {
	Attempt   int       `json:"attempt"`
	WorldSize int       `json:"world_size"`
	At        time.Time `json:"at"`
	Reason    string    `json:"reason"`
}

// String describes the end for people.
func (e AttemptEnd) String() string {
	ranks := "ranks"
	if e.WorldSize == 1 {
		ranks = "rank"
	}
	return fmt.Sprintf("attempt %d of %d %s: %s", e.Attempt, e.WorldSize, ranks, e.Reason)
}

// Over reports whether the job no longer trains: it ended, or it is lost.
func (j Job) Over() bool { return j.State == Ended || j.State == Lost }

// RunJobs holds the rows of a run from which the states of its jobs follow, and
// the live job, which only the lease shows.
type RunJobs struct {
	Run      string
	Jobs     []projections.Job // newest first
	trials   []projections.Trial
	attempts []projections.Attempt
	devices  []projections.Device
	Usage    projections.Usage // of all jobs of the run
	Live     string            // ID of the job that holds the run; empty if none does
	Parent   string
}

// Take replaces the rows by those of a later read.
func (r *RunJobs) Take(row projections.Launches) {
	r.Run, r.Jobs, r.trials, r.attempts, r.devices, r.Usage = row.Run, row.Jobs, row.Trials, row.Attempts, row.Devices, row.Usage
	for _, t := range r.trials {
		if t.Parent != nil && t.Name == projections.DefaultTrial {
			r.Parent = projections.ParentRef(*t.Parent)
		}
	}
}

// Trials returns the run's trials by name, without what follows from reports.
func (r RunJobs) Trials() []projections.Trial { return r.trials }

// state returns the state of a job.
func (r RunJobs) state(j projections.Job) string { return StateOf(j, r.Live, r.trials) }

// StateOf returns the state of a job. live is the ID of the job that holds the run, trials are
// those of the run.
func StateOf(j projections.Job, live string, trials []projections.Trial) string {
	switch {
	case j.Ended:
		return Ended
	case live == "" || live != j.ID:
		return Lost
	}
	has := func(s projections.Status) bool {
		return slices.ContainsFunc(trials, func(t projections.Trial) bool { return t.Job == j.ID && t.Status == s })
	}
	if has(projections.Stopping) && !has(projections.Running) { // the trials of a search take turns
		return Stopping
	}
	return Running
}

// List returns the jobs as they are at a time.
func (r RunJobs) List(now time.Time) (list []Job) {
	for _, j := range r.Jobs {
		out := Job{
			Job: j.ID, Run: j.Run, Host: j.Host, PID: j.PID, State: r.state(j), Reason: j.Reason,
			StartedAt: j.StartedAt, EndedAt: j.EndedAt, NProc: j.NProc, NNodes: j.NNodes, Asked: j.Resume,
			Parent: r.Parent, Command: append([]string{}, j.Command...), Flags: j.Flags, Dir: j.Dir, Logs: j.Logs,
		}
		end := now
		if j.Ended {
			out.ExitCode, end = &j.ExitCode, j.EndedAt
		}
		if out.State != Lost && !j.StartedAt.IsZero() {
			seconds := end.Sub(j.StartedAt).Seconds()
			out.Seconds = &seconds
		}
		r.trained(&out)
		if part, ok := Goodput(r.Usage); ok && len(list) == 0 {
			out.Goodput = &part
		}
		list = append(list, out)
	}
	return list
}

// trained fills in the results of a job's attempts.
func (r RunJobs) trained(out *Job) {
	groups := map[string]int{}
	last := uint64(0)
	for _, t := range r.attempts {
		if t.Job != out.Job {
			continue
		}
		if groups[t.Trial]++; out.Attempts == 0 {
			out.From = t.Resume
		}
		out.Attempts++
		if !t.StoppedAt.IsZero() && (out.LastEnd == nil || t.StoppedAt.After(out.LastEnd.At)) {
			out.LastEnd = &AttemptEnd{t.Attempt, t.WorldSize, t.StoppedAt, t.Reason}
		}
		if t.CommittedSeq > last {
			last, out.Head = t.CommittedSeq, t.Committed
		}
	}
	for _, n := range groups {
		out.Restarts += n - 1
	}
	for _, d := range r.devices {
		// A failure before this job began belongs to another job.
		if !d.Healthy && !d.UnhealthyAt.Before(out.StartedAt) && (out.EndedAt.IsZero() || !d.UnhealthyAt.After(out.EndedAt)) {
			out.Unhealthy = append(out.Unhealthy, d.Device+": "+d.Reason)
		}
	}
}
