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

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
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

// holder identifies the process that holds a lease. Boot and Start distinguish a process
// from a later one with the same number, Space from one in another container. Witness shows
// a later container of the same pod whether the process lives.
type holder struct {
	Job   string `json:"job"`
	Host  string `json:"host"`
	PID   int    `json:"pid"`
	Boot  string `json:"boot"`  // of the machine
	Space string `json:"space"` // of process numbers
	Start string `json:"start"` // of the process, in the kernel's ticks

	Witness string `json:"witness,omitempty"` // name of the file that the process keeps locked
}

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
	return s.hold(ctx, jetlog.RunLease(run), job, func(other holder) error {
		return &RunningError{Run: run, Job: other.Job, Host: other.Host, PID: other.PID}
	})
}

// hold takes a lease for a job, or for another part of this process with its own identity.
// It returns the error of busy when another holder has it that may be alive.
func (s *Store) hold(ctx context.Context, name, job string, busy func(holder) error) (_ context.Context, release func() error, err error) {
	me, err := thisProcess(job)
	if err == nil {
		me.Witness, err = s.witness()
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
		var other holder
		if jerr := json.Unmarshal(held.Holder, &other); jerr != nil {
			return nil, nil, errors.Join(err, jerr)
		}
		switch {
		case other.same(me): // this job's own lease, which it could not renew or release
		case s.gone(other, me) || deadSoon(ctx, other, me):
		case !held.Expired() || other.near(me):
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
	sweepWitnesses(s.Runtime) // not before: one of them may have proved the end of the last holder
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
			s.touchWitness(renewed)
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

// deadSoon is dead, but waits a moment for the kernel to end a process that was just
// killed: users restart a trainer right after a kill.
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

// same reports whether h is the holder me. A store that is opened again has another witness.
func (h holder) same(me holder) bool {
	h.Witness = me.Witness
	return h == me
}

// near reports whether this process could see the process of h: it runs on this machine,
// in this boot, in the same process number space.
func (h holder) near(me holder) bool {
	return h.Host == me.Host && h.Boot == me.Boot && h.Space == me.Space
}

// dead reports whether h has certainly ended: its process would be near, and does not
// exist.
func dead(h, me holder) bool {
	if !h.near(me) {
		return false
	}
	start, zombie, err := startTime(h.PID)
	// Another user's process may be hidden in /proc, but exists.
	return (errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH)) && errors.Is(syscall.Kill(h.PID, 0), syscall.ESRCH) || err == nil && (zombie || start != h.Start)
}

// startTime returns field 22 of /proc/PID/stat, and whether the process is a zombie.
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
	var other holder
	if err := json.Unmarshal(held.Holder, &other); err != nil {
		return nil, fmt.Errorf("holder of run %q: %w", run, err)
	}
	me, err := thisProcess("")
	if err != nil {
		return nil, err
	}
	if dead(other, me) || s.gone(other, me) || held.Expired() && !other.near(me) {
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
	me, err := thisProcess(job)
	if err != nil {
		return err
	}
	var now holder
	if held != nil {
		if err := json.Unmarshal(held.Holder, &now); err != nil {
			return fmt.Errorf("holder of run %q: %w", run, err)
		}
	}
	if held == nil || !now.same(me) || held.Expired() {
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

// A process that holds a lease keeps a file locked, its witness, in the runtime directory:
//
//	witness-<UUID>    0600: flock(2) of the process; the lease has the name
//
// A process number means nothing in another container. A container that starts again in
// its pod has the files of the last one, though, as /tmp is a volume there: a witness
// without the lock proves that its process has ended, and the lease is taken over at once.
const witnessPrefix = "witness-"

// witnessAge is how long the witness of a process that was killed is kept, from its last renewal of a lease.
const witnessAge = 24 * time.Hour

// witness returns the name of this process's witness, which it makes. Close removes it.
func (s *Store) witness() (name string, err error) {
	s.witnessing.Lock()
	defer s.witnessing.Unlock()
	if s.witnessed == nil {
		if s.witnessed, err = makeWitness(s.Runtime); err != nil {
			return "", fmt.Errorf("make the witness of this process: %w", err)
		}
	}
	return filepath.Base(s.witnessed.Name()), nil
}

// makeWitness makes a locked file in a runtime directory.
func makeWitness(runtime string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(runtime, witnessPrefix+uuid.NewString()), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	// Its name is known to this process alone until the lease has it.
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, os.Remove(f.Name()), f.Close())
	}
	return f, nil
}

// sweepWitnesses removes the files of processes that ended without Close, but not soon: they
// prove that.
func sweepWitnesses(runtime string) {
	paths, err := filepath.Glob(filepath.Join(runtime, witnessPrefix+"*"))
	if err != nil {
		return // only for a bad pattern
	}
	for _, path := range paths {
		if info, err := os.Lstat(path); err == nil && time.Since(info.ModTime()) > witnessAge && unlocked(path) {
			_ = os.Remove(path) // or the next process does
		}
	}
}

// touchWitness notes in its witness that this process lived at a time.
func (s *Store) touchWitness(now time.Time) {
	s.witnessing.Lock()
	defer s.witnessing.Unlock()
	if s.witnessed != nil {
		_ = os.Chtimes(s.witnessed.Name(), now, now) // or the next renewal does
	}
}

// closeWitness removes the witness. No lease of this process is needed any more.
func (s *Store) closeWitness() error {
	s.witnessing.Lock()
	defer s.witnessing.Unlock()
	f := s.witnessed
	if f == nil {
		return nil
	}
	s.witnessed = nil
	return errors.Join(os.Remove(f.Name()), f.Close())
}

// gone reports whether h has certainly ended because nothing locks its witness: it had the
// same kernel, and this process sees the same file.
func (s *Store) gone(h, me holder) bool {
	if h.Boot != me.Boot || !strings.HasPrefix(h.Witness, witnessPrefix) || filepath.Base(h.Witness) != h.Witness {
		return false
	}
	return unlocked(filepath.Join(s.Runtime, h.Witness))
}

// unlocked reports whether a file is there, and no process has locked it.
func unlocked(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	info, err := f.Stat()
	return err == nil && info.Mode().IsRegular() && unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) == nil
}
