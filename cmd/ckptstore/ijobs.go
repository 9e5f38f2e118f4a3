package main

import (
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/projections"
)

// States of a job, as far as anybody can know. A lost one never said that it
// ended, and nobody holds its run: it was killed, or its machine is gone.
const (
	jobRunning  = "running"
	jobStopping = "stopping"
	jobEnded    = "ended"
	jobLost     = "lost"
)

// launched is one job in `jobs --json`.
type launched struct {
	Job       string    `json:"job"`
	Run       string    `json:"run"`
	Host      string    `json:"host"`
	PID       int       `json:"pid"`
	State     string    `json:"state"`
	ExitCode  *int      `json:"exit_code,omitempty"` // once it ended
	Reason    string    `json:"reason,omitempty"`
	StartedAt time.Time `json:"started_at,omitzero"`
	EndedAt   time.Time `json:"ended_at,omitzero"`
	Seconds   *float64  `json:"seconds,omitempty"` // of a lost one nobody knows
	NProc     int       `json:"nproc"`
	NNodes    int       `json:"nnodes"`
	Attempts  int       `json:"attempts"`
	Restarts  int       `json:"restarts"`
	Asked     string    `json:"resume"`           // what was asked for
	From      string    `json:"from,omitempty"`   // checkpoint that its first attempt continued
	Head      string    `json:"head,omitempty"`   // checkpoint that it committed last
	Parent    string    `json:"parent,omitempty"` // checkpoint that the run was forked from
	Command   []string  `json:"command"`
	Flags     []string  `json:"flags,omitempty"` // of the trainer
	Dir       string    `json:"dir,omitempty"`
	Logs      string    `json:"logs,omitempty"`
	Unhealthy []string  `json:"unhealthy_devices,omitempty"` // GPUs that failed in it and did not recover, with the reason
}

// runJobs is what is known of the jobs of a run.
type runJobs struct {
	run      string
	jobs     []projections.Job // the newest first
	trials   []projections.Trial
	attempts []projections.Attempt
	devices  []projections.Device
	live     string // ID of the job that holds the run; empty if none does
	parent   string
}

// take replaces the rows by those of a later reading.
func (r *runJobs) take(row projections.Launches) {
	r.run, r.jobs, r.trials, r.attempts, r.devices = row.Run, row.Jobs, row.Trials, row.Attempts, row.Devices
	for _, t := range r.trials {
		if t.Parent != nil && t.Name == projections.DefaultTrial {
			r.parent = projections.ParentRef(*t.Parent)
		}
	}
}

// state is that of a job.
func (r runJobs) state(j projections.Job) string {
	switch {
	case j.Ended:
		return jobEnded
	case r.live != j.ID:
		return jobLost
	case slices.ContainsFunc(r.trials, func(t projections.Trial) bool {
		return t.Job == j.ID && t.Status == projections.Stopping
	}):
		return jobStopping
	}
	return jobRunning
}

// list returns the jobs as they are at a time.
func (r runJobs) list(now time.Time) (list []launched) {
	for _, j := range r.jobs {
		out := launched{
			Job: j.ID, Run: j.Run, Host: j.Host, PID: j.PID, State: r.state(j), Reason: j.Reason,
			StartedAt: j.StartedAt, EndedAt: j.EndedAt, NProc: j.NProc, NNodes: j.NNodes, Asked: j.Resume,
			Parent: r.parent, Command: append([]string{}, j.Command...), Flags: j.Flags, Dir: j.Dir, Logs: j.Logs,
		}
		end := now
		if j.Ended {
			out.ExitCode, end = &j.ExitCode, j.EndedAt
		}
		if out.State != jobLost && !j.StartedAt.IsZero() {
			seconds := end.Sub(j.StartedAt).Seconds()
			out.Seconds = &seconds
		}
		r.trained(&out)
		list = append(list, out)
	}
	return list
}

// trained says what the attempts of a job did.
func (r runJobs) trained(out *launched) {
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
		if t.CommittedSeq > last {
			last, out.Head = t.CommittedSeq, t.Committed
		}
	}
	for _, n := range groups {
		out.Restarts += n - 1
	}
	for _, d := range r.devices {
		// What failed before this job began was said of another.
		if !d.Healthy && !d.UnhealthyAt.Before(out.StartedAt) && (out.EndedAt.IsZero() || !d.UnhealthyAt.After(out.EndedAt)) {
			out.Unhealthy = append(out.Unhealthy, d.Device+": "+d.Reason)
		}
	}
}
