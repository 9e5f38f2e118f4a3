package launch_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/collective"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// refusingLog does not take the metrics of its first iterations.
type refusingLog struct {
	session.Log
	left atomic.Int32
}

// Append implements session.Log.
func (l *refusingLog) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	if facts[0].Kind == (events.Metrics{}).Kind() && l.left.Add(-1) >= 0 {
		return nil, errors.New("the stream is gone")
	}
	return l.Log.Append(ctx, facts...)
}

var countsRestarts = workerRole("counts restarts", func(ctx context.Context, c *client.Client) error {
	emit("attempt %d restart %s", c.Attempt, os.Getenv("TORCHELASTIC_RESTART_COUNT"))
	return c.Report(ctx, 1, map[string]any{"loss": 1.0})
})

// Failures of the log are not charged to the workers: they have a budget of their
// own, which ends as well.
func TestInfrastructureBudget(t *testing.T) {
	t.Parallel()
	for restarts, ends := range map[int]bool{2: false, 1: true} {
		t.Run(fmt.Sprint(restarts), func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 1, countsRestarts...)
			log := &refusingLog{Log: home.Log}
			log.left.Store(2)
			j.store.Log, j.cfg.MaxInfraRestarts = log, restarts
			if ends {
				failed := j.fails()
				if failed.Kind != blame.Infrastructure || failed.Restarts != 1 || !strings.Contains(failed.Error(), "no restart for failures of the infrastructure is left (1 used): the stream is gone") {
					t.Errorf("%v", failed)
				}
			} else {
				wantText(t, j.must().out, "attempt 1 restart 0\n", "attempt 2 restart 0\n", "attempt 3 restart 0\n")
			}
			if got := bodiesOf[events.GroupStopped](t, runOf(t))[0]; got.Failure != "infrastructure" {
				t.Errorf("group.stopped: %+v", got)
			}
		})
	}
}

// The event of an attempt's end has the budget that pays for it.
func TestFailureIsCharged(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, shell(`exit $((2 - CKPTSTORE_ATTEMPT))`)...)
	j.cfg.MaxRestarts = 1
	j.must()
	got := bodiesOf[events.GroupStopped](t, runOf(t))
	if len(got) != 2 || got[0].Failure != "worker" || got[1].Failure != "" {
		t.Errorf("group.stopped: %+v", got)
	}
}

var stopsItself = workerRole("stops itself", func(ctx context.Context, c *client.Client) error {
	pids, err := collective.AllGatherObject(ctx, collective.New(c.Collectives(), collective.Options{}), os.Getpid())
	if err != nil {
		return err
	}
	if c.Rank == 0 {
		return errors.Join(inState(ctx, pids[1], "T"), errors.New("a bug"))
	}
	if err := syscall.Kill(syscall.Getpid(), syscall.SIGSTOP); err != nil {
		return err
	}
	<-ctx.Done() // the signal may take a moment
	return errors.New("continued")
})

// inState waits until a process is in a state.
func inState(ctx context.Context, pid int, state string) error {
	for tick := time.Tick(time.Millisecond); ; {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(stat), ") "+state+" ") {
			return err
		}
		select {
		case <-tick:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// A stopped worker takes no SIGTERM; SIGKILL ends it anyway.
func TestStoppedWorker(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, stopsItself...)
	j.cfg.Grace = shortly
	if failed := j.fails(); failed.Rank != 0 {
		t.Errorf("%+v", failed)
	}
	for _, e := range bodiesOf[events.WorkerExited](t, runOf(t)) {
		if e.Rank == 1 && e.Signal != "SIGKILL" {
			t.Errorf("rank 1: %+v", e)
		}
	}
	wantNobody(t, j.cfg.Job)
}

// leavesZombies has a child that it never waits for, and a child that stays
// alive.
var leavesZombies = role("leaves zombies", func(ctx context.Context, _ []string) error {
	child := exec.Command("/bin/true")
	if err := child.Start(); err != nil {
		return err
	}
	if err := inState(ctx, child.Process.Pid, "Z"); err != nil {
		return err
	}
	// A shell that has a zombie of its own, in another session.
	other := exec.Command("/bin/sh", "-c", "sleep 0 & exec sleep 1000")
	other.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := other.Start(); err != nil {
		return err
	}
	emit("pid %d", os.Getpid())
	return nil
})

// Children that are never waited for do not keep an attempt from ending, and no
// worker stays a zombie of the trainer.
func TestZombies(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, leavesZombies...).must()
	for rank := range 2 {
		pid, err := strconv.Atoi(j.out.await(t, 1, fmt.Sprintf("[rank%d] pid ", rank))[0])
		if err != nil {
			t.Fatal(err)
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err == nil && strings.Contains(string(stat), fmt.Sprintf(") Z %d ", os.Getpid())) {
			t.Errorf("rank %d is a zombie: %s", rank, stat)
		}
	}
	wantNobody(t, j.cfg.Job)
}

// meetsAndSaves saves in the background while its ranks meet.
var meetsAndSaves = workerRole("meets and saves", func(ctx context.Context, c *client.Client) error {
	saved := make(chan error, 1)
	go func() {
		for step := range int64(5) {
			if err := save(ctx, c, step); err != nil {
				saved <- err
				return
			}
		}
		saved <- nil
	}()
	group := collective.New(c.Collectives(), collective.Options{})
	meetings := 0
	for done := false; !done; meetings++ {
		own := false
		select {
		case err := <-saved:
			if err != nil {
				return err
			}
			own = true
			saved <- nil
		default:
		}
		all, err := collective.AllGatherObject(ctx, group, own)
		if err != nil {
			return err
		}
		done = true
		for _, d := range all {
			done = done && d
		}
	}
	emit("met %d times", meetings)
	return nil
})

// Collectives of a group and its saves, both at once, do not wait for each other.
func TestCollectivesBesideSaves(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, meetsAndSaves...).must()
	wantCommitted(t, "step-0.a1", "step-1.a1", "step-2.a1", "step-3.a1", "step-4.a1")
	j.out.await(t, 1, "[rank2] met ")
}

// A preempted worker has the preemption's grace for its save, not that of
// SIGTERM.
func TestPreemptedInASlowSave(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, trainsUntilAsked...)
	j.cfg.Grace, j.cfg.PreemptGrace = shortly, 2*patience
	requests := j.preemptible()
	gate := j.gated("r00000.safetensors")
	j.start()
	j.out.await(t, 1, "at ")
	requests <- launch.StopRequest{Preempt: true, Reason: "the test"}
	gate.await(t)
	<-time.After(2 * j.cfg.Grace) // the save takes longer than SIGTERM's grace
	close(gate.open)
	if e := j.preempted(j.wait()); !e.Saved {
		t.Errorf("%+v", e)
	}
}

// losesSteps reports steps that its checkpoint does not have, and dies; the next
// attempt does them again, with other numbers.
var losesSteps = workerRole("loses steps", func(ctx context.Context, c *client.Client) error {
	first, last := int64(1), int64(4)
	if c.Attempt > 1 {
		first, last = 3, 5
		if err := load(ctx, c, "", 2); err != nil {
			return err
		}
	}
	for step := first; step <= last; step++ {
		if err := c.Report(ctx, step, map[string]any{"loss": float64(10*c.Attempt) + float64(step)}); err != nil {
			return err
		}
		if c.Attempt == 1 && step == 2 {
			if err := save(ctx, c, step); err != nil {
				return err
			}
		}
	}
	if c.Attempt == 1 {
		return errors.New("a bug")
	}
	return nil
})

// A recovery shows what was trained since, and loses nothing that was reported
// before: the newest metrics are those of the newest attempt.
func TestRecoveryKeepsMetrics(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, losesSteps...)
	j.cfg.MaxRestarts = 1
	j.must()
	table := func(all bool) (losses []any) {
		got, err := query.Ask(t.Context(), home.Views(), query.Metrics, query.Params{Run: runOf(t), Trial: projections.DefaultTrial, All: all})
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range got.Rows {
			losses = append(losses, row.Metrics["loss"].Last)
		}
		return losses
	}
	if line := fmt.Sprint(table(false)); line != "[11 12 23 24 25]" {
		t.Errorf("the line has the losses %s", line)
	}
	if all := fmt.Sprint(table(true)); strings.Count(all, " ") != 6 || !strings.Contains(all, "13") || !strings.Contains(all, "14") {
		t.Errorf("all losses are %s", all)
	}
	if trial := trialOf(t); trial.Iterations != 5 || trial.LastMetrics["loss"] != 25.0 {
		t.Errorf("trial %+v", trial)
	}
}

var holdsMasterPort = workerRole("holds the master port", func(ctx context.Context, c *client.Client) error {
	if c.Rank != 0 {
		return untilTerm(ctx)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(os.Getenv("MASTER_ADDR"), os.Getenv("MASTER_PORT")))
	if err != nil {
		return err
	}
	term := terms()
	emit("listens at %s", l.Addr())
	return errors.Join(term(ctx), l.Close())
})

// Jobs that run at the same time have ports of their own, and rank 0
// listens.
func TestJobsAtOnceHaveTheirPorts(t *testing.T) {
	t.Parallel()
	ports := map[string]bool{}
	var jobs []*job
	for n := range 3 {
		j := newJob(t, 2, holdsMasterPort...)
		j.cfg.Run = fmt.Sprint(runOf(t), " ", n)
		jobs = append(jobs, j.start())
	}
	for _, j := range jobs {
		ports[j.out.await(t, 1, "[rank0] listens at ")[0]] = true
	}
	if len(ports) != len(jobs) {
		t.Errorf("%d jobs listen at %v", len(jobs), ports)
	}
	for _, j := range jobs {
		j.cancel(errStop)
		// Workers that end well before the job has noticed have completed it.
		if err := j.wait(); err != nil && !errors.Is(err, errStop) {
			t.Error(err)
		}
	}
}

var trainsOneStep = workerRole("trains one step", func(ctx context.Context, c *client.Client) error {
	step := int64(0)
	if c.Resume != "" {
		if _, err := fmt.Sscanf(c.Resume, "step-%d.", &step); err != nil {
			return err
		}
		if err := load(ctx, c, "", step); err != nil {
			return err
		}
	}
	emit("trains step %d", step+1)
	return errors.Join(c.Report(ctx, step+1, map[string]any{"loss": 1.0}), save(ctx, c, step+1))
})

// A run that is completed is trained on by its next job.
func TestCompletedRunTrainsOn(t *testing.T) {
	t.Parallel()
	for n := 1; n <= 3; n++ {
		j := newJob(t, 2, trainsOneStep...).must()
		wantText(t, j.out, fmt.Sprintf("[rank1] trains step %d\n", n))
		if trial := trialOf(t); trial.Status != projections.Completed || trial.Attempt != n || trial.Iterations != n || trial.Head != fmt.Sprintf("step-%d.a%d", n, n) {
			t.Errorf("trial %+v", trial)
		}
	}
}
