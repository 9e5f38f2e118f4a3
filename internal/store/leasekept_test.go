package store

import (
	"context"
	"encoding/json"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/store/holder"
)

// briefTerm is so short that a test can wait for its end.
const briefTerm = 600 * time.Millisecond

// briefly opens a store whose leases have a short term.
func briefly(t *testing.T, dir string) *Store {
	t.Helper()
	s := open(t, dir)
	s.term = briefTerm
	return s
}

// expired waits until the lease of a run has expired.
func expired(t *testing.T, s *Store, run string) {
	t.Helper()
	eventually(t, "the lease expires", func() bool {
		held, err := s.Log.LeaseHolder(t.Context(), "run."+run)
		if err != nil || held == nil {
			t.Fatalf("lease of %s: %v, %v", run, held, err)
		}
		return held.Expired()
	})
}

// stillRefused checks that a second job of a run is refused because of the first.
func stillRefused(t *testing.T, s *Store, run, job string) {
	t.Helper()
	_, release, err := s.HoldRun(t.Context(), run, "second")
	var running *RunningError
	if !errors.As(err, &running) || running.Job != job {
		if err == nil {
			_ = release()
		}
		t.Fatalf("a second job of the run: %v", err)
	}
}

// TestHoldRunOfPausedOwner: the store's owner is stopped for many terms. The jobs keep their runs,
// and no second job of a run gets one, not even at first.
func TestHoldRunOfPausedOwner(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner := start(t, "actor")
	owner.do(request{Do: "open", Location: dir, Term: briefTerm})
	s := briefly(t, dir)
	if s.Owns() {
		t.Fatal("the wrong process owns the store")
	}
	held, release, err := s.HoldRun(t.Context(), "run", "job-1")
	if err != nil {
		t.Fatal(err)
	}
	owner.do(request{Do: "hold", Run: "its own", Name: "job-of-owner"})
	for range 2 {
		owner.signal(syscall.SIGSTOP)
		pause := time.NewTimer(5 * briefTerm)
		<-pause.C
		owner.signal(syscall.SIGCONT)
		stillRefused(t, s, "run", "job-1")
		stillRefused(t, s, "its own", "job-of-owner")
	}
	if held.Err() != nil {
		t.Errorf("the lease was lost: %v", context.Cause(held))
	}
	if owner.do(request{Do: "held"}).Text != "true" {
		t.Error("the owner has lost its own")
	}
	eventually(t, "the lease is renewed", func() bool {
		held, err := s.Log.LeaseHolder(t.Context(), "run.run")
		return err == nil && held != nil && !held.Expired()
	})
	owner.do(request{Do: "release"})
	if err := release(); err != nil {
		t.Fatal(err)
	}
	owner.end()
}

// TestHoldRunOfPausedJob: a stopped job keeps its run for as long as its process exists.
func TestHoldRunOfPausedJob(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := briefly(t, dir)
	job := start(t, "actor")
	job.do(request{Do: "open", Location: dir, Term: briefTerm})
	job.do(request{Do: "hold", Run: "run", Name: "job-1"})
	job.signal(syscall.SIGSTOP)
	expired(t, s, "run")
	stillRefused(t, s, "run", "job-1")
	if live, err := s.LiveJob(t.Context(), "run"); err != nil || live == nil || live.Job != "job-1" {
		t.Errorf("the live job is %v, %v", live, err)
	}
	job.signal(syscall.SIGCONT)
	if job.do(request{Do: "held"}).Text != "true" {
		t.Error("it has lost its run")
	}
	job.do(request{Do: "release"})
	job.end()
}

// TestHoldRunOfFarJob: of a job on another machine only its lease is known. An expired lease is
// taken, unless it is renewed soon after, as by a job whose log is back. After a takeover its
// holder is notified.
func TestHoldRunOfFarJob(t *testing.T) {
	t.Parallel()
	s := briefly(t, made(t))
	far, err := json.Marshal(holder.Process{Job: "job-1", Host: "far", PID: 1})
	if err != nil {
		t.Fatal(err)
	}
	lease, err := s.Log.Lease(t.Context(), "run.run", far, briefTerm)
	if err != nil {
		t.Fatal(err)
	}
	expired(t, s, "run")
	if live, err := s.LiveJob(t.Context(), "run"); err != nil || live != nil {
		t.Errorf("the live job is %v, %v", live, err)
	}
	// The holder comes back during the grace period.
	s.term = 30 * time.Second
	refused := make(chan error, 1)
	go func() {
		_, release, err := s.HoldRun(t.Context(), "run", "job-2")
		if err == nil {
			err = errors.Join(errors.New("it was taken"), release())
		}
		refused <- err
	}()
	pause := time.NewTimer(briefTerm)
	<-pause.C
	for waiting := true; waiting; {
		if err := lease.Renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-refused:
			var running *RunningError
			if waiting = false; !errors.As(err, &running) || running.Job != "job-1" {
				t.Errorf("a second job of the run: %v", err)
			}
		case <-time.After(briefTerm / 10):
		}
	}
	// The holder does not come back.
	expired(t, s, "run")
	s.term = briefTerm
	_, release, err := s.HoldRun(t.Context(), "run", "job-3")
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.Renew(t.Context()); !errors.Is(err, jetlog.ErrLeaseLost) {
		t.Errorf("the job that was far: %v", err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
}

// TestReleaseLater: a lease that the log did not release in time is released as
// soon as the log answers.
func TestReleaseLater(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner := start(t, "actor")
	owner.do(request{Do: "open", Location: dir})
	s := briefly(t, dir)
	_, release, err := s.HoldRun(t.Context(), "run", "job-1")
	if err != nil {
		t.Fatal(err)
	}
	owner.signal(syscall.SIGSTOP)
	err = release()
	owner.signal(syscall.SIGCONT)
	if err == nil {
		t.Fatal("a stopped owner has taken the release")
	}
	eventually(t, "the lease is released", func() bool {
		held, err := s.Log.LeaseHolder(t.Context(), "run.run")
		return err == nil && held == nil
	})
	owner.end()
}

// The holder of an expired lease gets a while to renew it, unless it has had a whole term with a new
// leader of the log.
func TestGraceOfExpiredLease(t *testing.T) {
	t.Parallel()
	if d := grace(&jetlog.LeaseHeldError{}, 15*time.Second); d != 5*time.Second {
		t.Errorf("%v for a term from the last renewal", d)
	}
	if d := grace(&jetlog.LeaseHeldError{Elected: true}, 15*time.Second); d != 0 {
		t.Errorf("%v for a term from an election", d)
	}
}
