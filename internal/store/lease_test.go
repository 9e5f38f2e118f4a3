package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

func TestHoldRun(t *testing.T) {
	t.Parallel()
	dir := made(t)
	p := actors(t, dir, 1)[0]
	s := open(t, dir)
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	p.do(request{Do: "hold", Run: strange, Name: "job-1"})
	_, _, err = s.HoldRun(t.Context(), strange, "job-2")
	var running *RunningError
	if !errors.As(err, &running) || *running != (RunningError{Run: strange, Job: "job-1", Host: host, PID: p.pid()}) {
		t.Fatalf("error %v", err)
	}
	wrong(t, err, nil, "job-1", host, fmt.Sprint(p.pid()), "wait for it or stop it")

	held, release, err := s.HoldRun(t.Context(), "another run", "job-3")
	if err != nil {
		t.Fatal(err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	if err := context.Cause(held); !errors.Is(err, context.Canceled) {
		t.Errorf("after its release a run is held until %v", err)
	}
	if p.do(request{Do: "held"}).Text != "true" {
		t.Error("the first holder lost it")
	}
	p.do(request{Do: "release"})
	_, release, err = s.HoldRun(t.Context(), strange, "job-2")
	if err != nil {
		t.Fatalf("after its release: %v", err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	p.end()
}

// TestHoldRunOfTheDead takes over leases that no process can release any more.
func TestHoldRunOfTheDead(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	p := actors(t, dir, 1)[0]
	p.do(request{Do: "hold", Run: "run", Name: "job-1"})
	// A zombie, as long as no process waits for it.
	p.signal(syscall.SIGKILL)
	<-p.read
	begin := time.Now()
	_, release, err := s.HoldRun(t.Context(), "run", "job-2")
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took > leaseTerm/3 {
		t.Errorf("it took %s", took)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Wait(); err == nil {
		t.Error("it was not killed")
	}

	// And when it was the owner of the store as well.
	shut(t, s)
	p = actors(t, dir, 1)[0]
	p.do(request{Do: "hold", Run: "run", Name: "job-3"})
	s = open(t, dir)
	p.kill()
	if _, release, err = s.HoldRun(t.Context(), "run", "job-4"); err != nil {
		t.Fatal(err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
}

// TestHoldRunTogether: of many processes that see a holder dead, one succeeds it.
func TestHoldRunTogether(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	p := actors(t, dir, 1)[0]
	p.do(request{Do: "hold", Run: "run", Name: "dead"})
	p.kill()
	type result struct {
		release func() error
		err     error
	}
	const jobs = 6
	results := make(chan result)
	for i := range jobs {
		go func() {
			_, release, err := s.HoldRun(t.Context(), "run", fmt.Sprint("job-", i))
			results <- result{release, err}
		}()
	}
	held := 0
	for range jobs {
		r := <-results
		var running *RunningError
		switch {
		case r.err == nil:
			held++
			defer func() {
				if err := r.release(); err != nil {
					t.Error(err)
				}
			}()
		case !errors.As(r.err, &running):
			t.Errorf("error %v", r.err)
		}
	}
	if held != 1 {
		t.Errorf("%d jobs hold the run", held)
	}
}

// TestHoldRunLost: a holder that loses its lease is notified.
func TestHoldRunLost(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	held, release, err := s.HoldRun(t.Context(), "run", "job-1")
	if err != nil {
		t.Fatal(err)
	}
	other := []byte(`{"job":"job-2","host":"far","pid":1}`)
	var lease *jetlog.Lease
	eventually(t, "another process takes it over", func() bool {
		_, err := s.Log.Lease(t.Context(), "run.run", other, leaseTerm)
		var taken *jetlog.LeaseHeldError
		if !errors.As(err, &taken) {
			t.Fatal(err)
		}
		lease, err = s.Log.TakeOver(t.Context(), taken, other, leaseTerm) // fails if it was just renewed
		return err == nil
	})
	select {
	case <-held.Done():
	case <-time.After(leaseTerm / 2):
		t.Fatal("the holder does not notice")
	}
	if err := context.Cause(held); !errors.Is(err, ErrLeaseLost) {
		t.Errorf("cause %v", err)
	}
	if err := release(); err != nil {
		t.Error(err)
	}
	_, _, err = s.HoldRun(t.Context(), "run", "job-3")
	var running *RunningError
	if !errors.As(err, &running) || running.Job != "job-2" || running.Host != "far" {
		t.Errorf("after the old holder's release: %v", err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestHoldRunOutlivesOwners: the lease is in the log, not in its server.
func TestHoldRunOutlivesOwners(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner := actors(t, dir, 1)[0]
	s := open(t, dir)
	held, release, err := s.HoldRun(t.Context(), "run", "job-1")
	if err != nil {
		t.Fatal(err)
	}
	owner.kill()
	second := open(t, dir)
	_, _, err = second.HoldRun(t.Context(), "run", "job-2")
	var running *RunningError
	if !errors.As(err, &running) || running.Job != "job-1" {
		t.Errorf("under the next owner: %v", err)
	}
	if held.Err() != nil {
		t.Errorf("it was lost: %v", context.Cause(held))
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
}
