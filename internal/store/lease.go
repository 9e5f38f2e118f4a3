package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/holder"
	"github.com/ckptstore/ckptstore/internal/store/living"
	"github.com/ckptstore/ckptstore/projections"
)

const (
	// leaseTerm is how long a job on another machine keeps a run without renewing its
	// lease.
	leaseTerm = 15 * time.Second
	// renewals is how often a lease is renewed in a term. A renewal may take at most
	// this part of the term.
	renewals = 6
	// comeback is the part of a term that the holder of an expired lease gets to renew it: see
	// grace.
	comeback = 3
	// releaseTimeout bounds the release of a lease when its holder ends. An unreleased
	// lease of a dead holder can be taken over.
	releaseTimeout = 5 * time.Second
)

// RunningError reports that a run has a live job. A command adds how to choose another
// run.
type RunningError struct {
	Run  string
	Job  string
	Host string
	PID  int
}

func (e *RunningError) Error() string {
	return fmt.Sprintf("run %q is being run by job %s (process %d on %s): wait for it or stop it", e.Run, e.Job, e.PID, e.Host)
}

// ProblemKind returns [problem.Conflict].
func (*RunningError) ProblemKind() problem.Kind { return problem.Conflict }

// ErrLeaseLost reports that another process has taken a lease.
var ErrLeaseLost = problem.New(problem.Conflict, "another process has taken the lease")

// HoldRun takes the lease of a run for a job. While the job holds it, no other job of that
// run starts. A lease whose holder is dead on this machine is taken over at once; one whose
// holder lives on this machine never is. A lease of another machine is taken over when it
// has expired and is not renewed for a while after that: see grace.
//
// The returned context ends, with [ErrLeaseLost] as its cause, only when another job has
// taken the lease. A job whose log is slow, paused or away keeps its lease, and renews it
// when the log answers again. The number of the attempt fences what two jobs of a run
// decide meanwhile. release releases the lease.
func (s *Store) HoldRun(ctx context.Context, run, job string) (_ context.Context, release func() error, err error) {
	return s.hold(ctx, jetlog.RunLease(run), job, func(other holder.Process) error {
		return &RunningError{Run: run, Job: other.Job, Host: other.Host, PID: other.PID}
	})
}

// hold takes a lease for a job, or for another part of this process with its own identity.
// It returns the error of busy when another holder has it that may be alive.
func (s *Store) hold(ctx context.Context, name, job string, busy func(holder.Process) error) (_ context.Context, release func() error, err error) {
	me, err := holder.This(job)
	if err == nil {
		me.Witness, err = s.witness.Name(s.Runtime)
	}
	if err != nil {
		return nil, nil, err
	}
	text, err := json.Marshal(me)
	if err != nil {
		return nil, nil, err
	}
	term := s.leaseTerm()
	lease, err := s.Log.Lease(ctx, name, text, term)
	// Another process may notice the holder's death first.
	for held := (*jetlog.LeaseHeldError)(nil); errors.As(err, &held); {
		var other holder.Process
		if jerr := json.Unmarshal(held.Holder, &other); jerr != nil {
			return nil, nil, errors.Join(err, jerr)
		}
		switch {
		case other.Same(me): // this job's own lease, which it could not renew or release
		case other.Gone(s.Runtime, me) || other.DeadSoon(ctx, me):
		case !held.Expired() || other.Near(me):
			return nil, nil, busy(other)
		case !sleep(ctx, grace(held, term)):
			return nil, nil, context.Cause(ctx)
		}
		// Refused if the lease was renewed meanwhile.
		lease, err = s.Log.TakeOver(ctx, held, text, term)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("take the lease %q: %w", name, err)
	}
	holder.SweepWitnesses(s.Runtime) // not before: one of them may have proved the end of the last holder
	held2, lost := context.WithCancelCause(ctx)
	keeping, stop := context.WithCancel(context.WithoutCancel(ctx))
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		s.keep(keeping, lease, name, term, lost)
	}()
	return held2, func() error {
		stop()
		<-stopped
		lost(nil)
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		err := lease.Release(end)
		if err != nil {
			s.releaseLater(lease)
		}
		return err
	}, nil
}

// grace returns how long the holder of an expired lease gets to renew it before another process
// takes it. The log may have been away for everyone. A log that has elected a leader since the last
// renewal has given the holder a whole term already in which it answered.
func grace(held *jetlog.LeaseHeldError, term time.Duration) time.Duration {
	if held.Elected {
		return 0
	}
	return term / comeback
}

// keep renews the lease until ctx ends, whatever happens to the log. The lease is lost only
// when another process takes it.
func (s *Store) keep(ctx context.Context, lease *jetlog.Lease, name string, term time.Duration, lost func(error)) {
	tick := time.NewTicker(term / renewals)
	defer tick.Stop()
	renewed, silent := time.Now(), false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		attempt, cancel := context.WithTimeout(ctx, term/renewals)
		err := lease.Renew(attempt)
		cancel()
		switch {
		case err == nil:
			if silent {
				s.opts.Logger.Info("lease renewed", "lease", name, "after", time.Since(renewed).Round(time.Millisecond))
			}
			renewed, silent = time.Now(), false
			s.witness.Touch(renewed)
		case errors.Is(err, jetlog.ErrLeaseLost):
			lost(fmt.Errorf("%w: %w", ErrLeaseLost, err))
			return
		case ctx.Err() == nil && !silent && time.Since(renewed) > term/2:
			silent = true
			s.opts.Logger.Warn("lease not renewed; retrying until the log answers", "lease", name, "since", time.Since(renewed).Round(time.Millisecond), "error", err)
		}
	}
}

// releaseLater releases a lease that could not be released in time, as soon as the log
// answers again. Its holder is this process: without the release, no other process could
// take it while this one lives.
func (s *Store) releaseLater(lease *jetlog.Lease) {
	s.leasing.Go(func() {
		for {
			attempt, cancel := context.WithTimeout(s.life, leaseTerm)
			err := lease.Release(attempt)
			cancel()
			if err == nil || !sleep(s.life, time.Second) {
				return
			}
		}
	})
}

// leaseTerm returns the term of the leases that this process takes.
func (s *Store) leaseTerm() time.Duration {
	if s.term > 0 {
		return s.term
	}
	return leaseTerm
}

// Living returns the leases by which the nodes of a run show that their part of an attempt lives.
func (s *Store) Living(run string) *living.Leases { return living.New(s.Log, run, s.leaseTerm()) }

// sleep waits for d and reports whether ctx lasted that long.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// LiveJob returns the job that runs a run now, or nil: the job whose lease is held by a
// living process of this machine, or by a process of another machine that has renewed it.
// A job that was killed on another machine counts as live until its lease expires.
func (s *Store) LiveJob(ctx context.Context, run string) (*RunningError, error) {
	held, err := s.Log.LeaseHolder(ctx, jetlog.RunLease(run))
	if err != nil || held == nil {
		return nil, err
	}
	var other holder.Process
	if err := json.Unmarshal(held.Holder, &other); err != nil {
		return nil, fmt.Errorf("holder of run %q: %w", run, err)
	}
	me, err := holder.This("")
	if err != nil {
		return nil, err
	}
	if other.Dead(me) || other.Gone(s.Runtime, me) || held.Expired() && !other.Near(me) {
		return nil, nil
	}
	return &RunningError{Run: run, Job: other.Job, Host: other.Host, PID: other.PID}, nil
}

// Holds returns an error unless this process holds the lease of a run for a job, and has renewed it in
// time.
func (s *Store) Holds(ctx context.Context, run, job string) error {
	held, err := s.Log.LeaseHolder(ctx, jetlog.RunLease(run))
	if err != nil {
		return err
	}
	me, err := holder.This(job)
	if err != nil {
		return err
	}
	var now holder.Process
	if held != nil {
		if err := json.Unmarshal(held.Holder, &now); err != nil {
			return fmt.Errorf("holder of run %q: %w", run, err)
		}
	}
	if held == nil || !now.Same(me) || held.Expired() {
		return problem.Errorf(problem.Conflict, "this process does not hold the lease of run %q, or has not renewed it", run)
	}
	return nil
}

// NotRunningError reports that a run has no live job.
type NotRunningError struct{ Run string }

func (e *NotRunningError) Error() string {
	return fmt.Sprintf("run %q has no live job: see `ckptstore jobs %s`; `ckptstore continue %s` starts one", e.Run, e.Run, e.Run)
}

// ProblemKind returns [problem.Conflict].
func (*NotRunningError) ProblemKind() problem.Kind { return problem.Conflict }

// StopRun is [Store.Stop] for the trials that the live job of a run trains: its only trial, or
// all that a search trains now.
func (s *Store) StopRun(ctx context.Context, run, reason string, preempt bool) (live *RunningError, err error) {
	q := Queries{s.Views()}
	_, err = q.Trial(ctx, run, projections.DefaultTrial)
	if !errors.Is(err, projections.ErrNotFound) {
		return s.Stop(ctx, run, projections.DefaultTrial, reason, preempt)
	}
	if live, err = s.LiveJob(ctx, run); err != nil {
		return nil, err
	}
	if live == nil {
		return nil, &NotRunningError{run}
	}
	trials, err := q.Trials(ctx, run)
	if err != nil {
		return nil, err
	}
	trials = slices.DeleteFunc(trials, func(t projections.Trial) bool {
		return t.Job != live.Job || t.Status != projections.Running && t.Status != projections.Stopping
	})
	terms := termsOf(ctx)
	if terms.After != nil && len(trials) > 0 {
		return nil, problem.Errorf(problem.Invalid, "run %q trains %d trials, and the condition is about the decisions of one trial: stop it without a condition", run, len(trials))
	}
	for i, t := range trials {
		its := terms.origin()
		if i == len(trials)-1 {
			its.ID = terms.ID // with this event in the log, all trials were asked
		}
		if _, err := s.Stop(WithTerms(ctx, its), run, t.Name, reason, preempt); err != nil {
			return nil, err
		}
	}
	if len(trials) == 0 {
		return nil, problem.Errorf(problem.Conflict, "job %s of run %q trains no trial at this moment: try again, or end its process %d on %s", live.Job, run, live.PID, live.Host)
	}
	return live, nil
}

// Stop asks the live job of a run to end the training of a trial. With preempt, the job
// saves first. The decision is durable on return; the job acts on it later.
func (s *Store) Stop(ctx context.Context, run, trial, reason string, preempt bool) (*RunningError, error) {
	q := Queries{s.Views()}
	for range decideTries {
		live, err := s.LiveJob(ctx, run)
		if err != nil {
			return nil, err
		}
		if live == nil {
			return nil, &NotRunningError{run}
		}
		t, err := q.Trial(ctx, run, trial)
		if err != nil {
			return nil, err
		}
		if err := termsOf(ctx).holds(run, trial, t.LaneSeq); err != nil {
			return nil, err
		}
		_, err = s.decideAfter(ctx, projections.Checkpoint{Run: run, Trial: trial}, t.LaneSeq,
			&events.TrialStopRequested{Reason: reason, Preempt: preempt, Job: live.Job})
		if errors.Is(err, jetlog.ErrConflict) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("ask job %s of run %q to stop: %w", live.Job, run, err)
		}
		return live, nil
	}
	return nil, fmt.Errorf("ask run %q to stop: other decisions came first %d times; try again", run, decideTries)
}

// Namesake is a run with a derived name, such as train or train-2, and with checkpoints
// to continue from.
type Namesake struct {
	Run  string
	Step int64 // of its newest checkpoint
	n    int
}

// RunNames returns the names of all runs.
func (s *Store) RunNames(ctx context.Context) (map[string]bool, error) {
	runs, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{})
	known := make(map[string]bool, len(runs))
	for _, run := range runs {
		known[run.Name] = true
	}
	return known, err
}

// Namesakes returns the runs NAME, NAME-2, NAME-3 and so on that have checkpoints in their
// line, in this order. It excludes a run whose script has the run's own name: exp-2.py is
// not a second process of exp.py.
func (s *Store) Namesakes(ctx context.Context, name string) ([]Namesake, error) {
	runs, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{})
	if err != nil {
		return nil, err
	}
	var all []Namesake
	for _, run := range runs {
		n, of := namesake(run.Name, name)
		if !of {
			continue
		}
		if n > 1 {
			jobs, err := query.Ask(ctx, s.Views(), query.Jobs, query.Params{Run: run.Name})
			if err != nil {
				return nil, err
			}
			if slices.ContainsFunc(jobs, func(j projections.Job) bool { return slices.ContainsFunc(j.Command, scriptOf(run.Name)) }) {
				continue
			}
		}
		rows, err := query.Ask(ctx, s.Views(), query.Checkpoints, query.Params{Run: run.Name})
		if err != nil {
			return nil, err
		}
		newest, has := projections.Checkpoint{}, false
		for _, c := range rows {
			if c.Visible() && !c.IsFile() && c.CommittedSeq >= newest.CommittedSeq {
				newest, has = c, true
			}
		}
		if has {
			all = append(all, Namesake{run.Name, newest.Step, n})
		}
	}
	slices.SortFunc(all, func(a, b Namesake) int { return cmp.Compare(a.n, b.n) })
	return all, nil
}

// scriptOf returns a function that reports whether an argument of a command is a script
// that the run is named after.
func scriptOf(run string) func(string) bool {
	return func(argument string) bool { return strings.TrimSuffix(filepath.Base(argument), ".py") == run }
}

// namesake returns the number of a run with a derived name; name itself has 1.
func namesake(run, name string) (n int, ok bool) {
	if run == name {
		return 1, true
	}
	rest, ok := strings.CutPrefix(run, name+"-")
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(rest)
	return n, err == nil && n > 1 && strconv.Itoa(n) == rest
}
