package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

// leaseTerm is how long a run stays a dead trainer's when nobody can tell that
// it is dead.
const leaseTerm = 15 * time.Second

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

// ErrLeaseLost says that what was held may be somebody else's by now.
var ErrLeaseLost = errors.New("the lease could not be renewed")

// HoldRun takes the lease of a run for a job. While it is held no other job of
// that run starts. A lease whose holder is dead, on this machine, is taken
// over at once. The context that comes back ends, with [ErrLeaseLost] as its
// cause, when the lease could not be renewed for half its term. release gives
// the lease up.
func (s *Store) HoldRun(ctx context.Context, run, job string) (_ context.Context, release func() error, err error) {
	return s.hold(ctx, "run."+run, job, func(other holder) error {
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
	lease, err := s.Log.Lease(ctx, name, text, leaseTerm)
	// Somebody else may see the holder's death first.
	for held := (*jetlog.LeaseHeldError)(nil); errors.As(err, &held); {
		var other holder
		if jerr := json.Unmarshal(held.Holder, &other); jerr != nil {
			return nil, nil, errors.Join(err, jerr)
		}
		// What this job could not renew, or release, is still its own.
		if other != me && !deadSoon(ctx, other, me) {
			return nil, nil, busy(other)
		}
		lease, err = s.Log.TakeOver(ctx, held, text, leaseTerm)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("take the lease %q: %w", name, err)
	}
	held2, lost := context.WithCancelCause(ctx)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		keep(held2, lease, stop, lost)
	}()
	return held2, func() error {
		close(stop)
		<-stopped
		lost(nil)
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaseTerm)
		defer cancel()
		return lease.Release(end)
	}, nil
}

// keep renews the lease until stop.
func keep(ctx context.Context, lease *jetlog.Lease, stop <-chan struct{}, lost func(error)) {
	tick := time.NewTicker(leaseTerm / 6)
	defer tick.Stop()
	renewed := time.Now()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		attempt, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaseTerm/6)
		err := lease.Renew(attempt)
		cancel()
		switch {
		case err == nil:
			renewed = time.Now()
		case errors.Is(err, jetlog.ErrLeaseLost) || time.Since(renewed) > leaseTerm/2:
			lost(fmt.Errorf("%w: %w", ErrLeaseLost, err))
			return
		}
	}
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

// dead reports whether h has certainly ended: it ran on this machine, in this
// boot, under numbers that this process sees, and its process is gone.
func dead(h, me holder) bool {
	if h.Host != me.Host || h.Boot != me.Boot || h.Space != me.Space {
		return false
	}
	start, zombie, err := startTime(h.PID)
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) || err == nil && (zombie || start != h.Start)
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
