package store

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

const (
	// leaseTerm is how long a run stays the job's of another machine that has
	// not renewed its lease.
	leaseTerm = 15 * time.Second
	// renewals is how often in a term a lease is renewed, and by how many parts
	// of it a renewal is bounded.
	renewals = 6
	// comeback is the part of a term that a holder whose lease has expired has
	// to renew it before another takes it: the log may have been away for all.
	comeback = 3
	// releaseTimeout bounds the release of a lease when its holder ends: whoever
	// sees it dead takes the lease all the same.
	releaseTimeout = 5 * time.Second
)

// holder says who runs a run. Boot and Start tell a process from a later one
// with its number, Space from one of the same number in another container.
type holder struct {
	Job   string `json:"job"`
	Host  string `json:"host"`
	PID   int    `json:"pid"`
	Boot  string `json:"boot"`  // of the machine
	Space string `json:"space"` // of process numbers
	Start string `json:"start"` // of the process, in the kernel's ticks
}

// RunningError says that a run has a live job. A command adds how another run
// is chosen.
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

// ErrLeaseLost says that what was held is somebody else's now.
var ErrLeaseLost = problem.New(problem.Conflict, "another process has taken the lease")

// HoldRun takes the lease of a run for a job. While it is held no other job of
// that run starts. A lease whose holder is dead, on this machine, is taken over
// at once; one whose holder lives on this machine never is; one of another
// machine when it has expired and is not renewed for a while after that.
//
// The context that comes back ends, with [ErrLeaseLost] as its cause, when
// another job has taken the lease, and for no other reason: a job whose log is
// slow, paused or away keeps it, and renews it when the log answers again. What
// two jobs of a run decide meanwhile is fenced by the number of their attempts.
// release gives the lease up.
func (s *Store) HoldRun(ctx context.Context, run, job string) (_ context.Context, release func() error, err error) {
	return s.hold(ctx, jetlog.RunLease(run), job, func(other holder) error {
		return &RunningError{Run: run, Job: other.Job, Host: other.Host, PID: other.PID}
	})
}

// hold takes a lease for a job, or for whatever else has an identity of its
// own in this process. busy is the error when another has it that may be alive.
func (s *Store) hold(ctx context.Context, name, job string, busy func(holder) error) (_ context.Context, release func() error, err error) {
	me, err := thisProcess(job)
	if err != nil {
		return nil, nil, err
	}
	text, err := json.Marshal(me)
	if err != nil {
		return nil, nil, err
	}
	term := s.leaseTerm()
	lease, err := s.Log.Lease(ctx, name, text, term)
	// Somebody else may see the holder's death first.
	for held := (*jetlog.LeaseHeldError)(nil); errors.As(err, &held); {
		var other holder
		if jerr := json.Unmarshal(held.Holder, &other); jerr != nil {
			return nil, nil, errors.Join(err, jerr)
		}
		switch {
		case other == me: // what this job could not renew, or release, is still its own
		case deadSoon(ctx, other, me):
		case !held.Expired() || other.near(me):
			return nil, nil, busy(other)
		case !sleep(ctx, term/comeback):
			return nil, nil, context.Cause(ctx)
		}
		// Refused if the lease was renewed meanwhile.
		lease, err = s.Log.TakeOver(ctx, held, text, term)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("take the lease %q: %w", name, err)
	}
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

// keep renews the lease until ctx ends, whatever becomes of the log meanwhile.
// Only a lease that somebody else took is lost.
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
		case errors.Is(err, jetlog.ErrLeaseLost):
			lost(fmt.Errorf("%w: %w", ErrLeaseLost, err))
			return
		case ctx.Err() == nil && !silent && time.Since(renewed) > term/2:
			silent = true
			s.opts.Logger.Warn("lease not renewed; retrying until the log answers", "lease", name, "since", time.Since(renewed).Round(time.Millisecond), "error", err)
		}
	}
}

// releaseLater releases a lease that could not be released in time, as soon as
// the log answers again: its holder lives on as long as this process, and
// nobody else would get it.
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

// leaseTerm is the term of the leases that this process takes.
func (s *Store) leaseTerm() time.Duration {
	if s.term > 0 {
		return s.term
	}
	return leaseTerm
}

func thisProcess(job string) (holder, error) {
	host, err := os.Hostname()
	if err != nil {
		return holder{}, fmt.Errorf("hostname: %w", err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return holder{}, fmt.Errorf("identity of this boot: %w", err)
	}
	space, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return holder{}, fmt.Errorf("identity of this process: %w", err)
	}
	start, _, err := startTime(os.Getpid())
	return holder{Job: job, Host: host, PID: os.Getpid(), Boot: string(bytes.TrimSpace(boot)), Space: space, Start: start}, err
}

// deadSoon is dead, but gives a process that was just killed the moment that
// the kernel needs to end it: people start a trainer again right after a kill.
func deadSoon(ctx context.Context, h, me holder) bool {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	for !dead(h, me) {
		if h.Host != me.Host || !sleep(ctx, 10*time.Millisecond) {
			return false
		}
	}
	return true
}

// near reports whether this process can see that of h, if it exists: it runs on
// this machine, in this boot, under numbers of the same container.
func (h holder) near(me holder) bool {
	return h.Host == me.Host && h.Boot == me.Boot && h.Space == me.Space
}

// dead reports whether h has certainly ended: its process would be near, and is
// gone.
func dead(h, me holder) bool {
	if !h.near(me) {
		return false
	}
	start, zombie, err := startTime(h.PID)
	// Another user's may be hidden below /proc, and is there.
	return (errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH)) && errors.Is(syscall.Kill(h.PID, 0), syscall.ESRCH) || err == nil && (zombie || start != h.Start)
}

// startTime is field 22 of /proc/PID/stat, and whether the process only waits
// to be reaped.
func startTime(pid int) (start string, zombie bool, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", false, err
	}
	// The name in parentheses may hold anything; field 3 follows it.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 {
		return "", false, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	return string(fields[19]), fields[0][0] == 'Z', nil
}

// sleep reports whether the whole time passed before ctx ended.
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

// LiveJob is the job that runs a run now, nil if none does: the one whose lease
// is held by a process of this machine that lives, or by one of another that
// has renewed it. A job that was killed on another machine is live until its
// lease expires.
func (s *Store) LiveJob(ctx context.Context, run string) (*RunningError, error) {
	held, err := s.Log.LeaseHolder(ctx, jetlog.RunLease(run))
	if err != nil || held == nil {
		return nil, err
	}
	var other holder
	if err := json.Unmarshal(held.Holder, &other); err != nil {
		return nil, fmt.Errorf("holder of run %q: %w", run, err)
	}
	me, err := thisProcess("")
	if err != nil {
		return nil, err
	}
	if dead(other, me) || held.Expired() && !other.near(me) {
		return nil, nil
	}
	return &RunningError{Run: run, Job: other.Job, Host: other.Host, PID: other.PID}, nil
}

// NotRunningError says that a run has no live job.
type NotRunningError struct{ Run string }

func (e *NotRunningError) Error() string {
	return fmt.Sprintf("run %q has no live job: see `ckptstore jobs %s`; `ckptstore continue %s` starts one", e.Run, e.Run, e.Run)
}

// ProblemKind returns [problem.Conflict].
func (*NotRunningError) ProblemKind() problem.Kind { return problem.Conflict }

// Stop asks the live job of a run to end. With preempt, it saves first. The
// decision is durable on return; the job obeys in its own time.
func (s *Store) Stop(ctx context.Context, run, trial, reason string, preempt bool) (*RunningError, error) {
	q := Queries{s.Views()}
	for range collectTries {
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
	return nil, fmt.Errorf("ask run %q to stop: other decisions came first %d times; try again", run, collectTries)
}

// Namesake is a run of a name that was derived, such as train or train-2, which has
// checkpoints to go on with.
type Namesake struct {
	Run  string
	Step int64 // of the newest checkpoint
	n    int
}

// RunNames are the names of all runs.
func (s *Store) RunNames(ctx context.Context) (map[string]bool, error) {
	runs, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{})
	known := make(map[string]bool, len(runs))
	for _, run := range runs {
		known[run.Name] = true
	}
	return known, err
}

// Namesakes are the runs NAME, NAME-2, NAME-3 and so on that have checkpoints in their
// line, in this order. A run whose script is called like the run itself is none of
// another's: exp-2.py is no second process of exp.py.
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

// scriptOf reports whether an argument of a command is a script that a run has its
// name from.
func scriptOf(run string) func(string) bool {
	return func(argument string) bool { return strings.TrimSuffix(filepath.Base(argument), ".py") == run }
}

// namesake is the number of a run of a derived name: 1 is that name itself.
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
