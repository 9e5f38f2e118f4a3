package launch_test

import (
	"context"
	"fmt"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// Workers that neither report nor ask get SIGTERM at once for a preemption.
// Without a checkpoint the job cannot be resumed.
func TestPreemptedDeafWorkers(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, shell(`trap 'echo told; exit 0' TERM; echo started; while :; do sleep 0.01; done`)...)
	requests := j.preemptible()
	j.start()
	j.out.await(t, 1, "[rank0] started")
	j.out.await(t, 1, "[rank1] started")
	requests <- launch.StopRequest{Preempt: true, Reason: "the test"}
	e := j.preempted(j.wait())
	if e.Saved || !strings.Contains(e.Error(), "no checkpoint was committed; started again, the run begins afresh") {
		t.Errorf("%v", e)
	}
	wantText(t, j.out, "[rank0] told\n", "[rank1] told\n")
	wantText(t, j.log, "neither report nor poll for stop requests")
	if got := stopOf(t); got.Failure != "preemption" || got.Reason != "preempt (the test): all workers ended" {
		t.Errorf("group.stopped: %+v", got)
	}
}

// savesBeforeResuming reports and saves one step; resumed, it does not get to report.
var savesBeforeResuming = workerRole("saves before it is resumed", func(ctx context.Context, c *client.Client) error {
	if c.Resume != "" {
		emit("resumed")
		<-ctx.Done()
		return ctx.Err()
	}
	if err := c.Report(ctx, 1, map[string]any{"loss": 1.0}); err != nil {
		return err
	}
	return save(ctx, c, 1)
})

// Workers that are preempted while they start have no progress to lose: a
// scheduler must start the job again.
func TestPreemptedAtTheStart(t *testing.T) {
	t.Parallel()
	if err := newJob(t, 2, savesBeforeResuming...).run(); err != nil {
		t.Fatal(err)
	}
	j := newJob(t, 2, savesBeforeResuming...)
	requests := j.preemptible()
	j.start()
	j.out.await(t, 1, "[rank0] resumed")
	j.out.await(t, 1, "[rank1] resumed")
	requests <- launch.StopRequest{Preempt: true, Reason: "the test"}
	if e := j.preempted(j.wait()); !e.Saved || e.Checkpoint != "step-1.a1" {
		t.Errorf("%v", e)
	}
}

// savesOnTerm knows nothing of preemptions except their signal.
var savesOnTerm = workerRole("saves on SIGTERM", func(ctx context.Context, c *client.Client) error {
	term := terms()
	emit("started")
	if err := term(ctx); err != nil {
		return err
	}
	return save(ctx, c, 7)
})

// A save after SIGTERM is as good as any other.
func TestPreemptedBySignalAlone(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, savesOnTerm...)
	requests := j.preemptible()
	j.start()
	j.out.await(t, 1, "[rank0] started")
	j.out.await(t, 1, "[rank1] started")
	requests <- launch.StopRequest{Preempt: true, Reason: "the test"}
	if e := j.preempted(j.wait()); !e.Saved || e.Checkpoint != "step-7.a1" {
		t.Errorf("%+v", e)
	}
}

// reportsOnly never checks for requests.
var reportsOnly = workerRole("reports only", func(ctx context.Context, c *client.Client) error {
	first := int64(40)
	if err := save(ctx, c, first); err != nil {
		return err
	}
	last := first
	if c.Config["goes_on"] == true {
		last++
	}
	for step := first; step <= last; step++ {
		if err := c.Report(ctx, step, map[string]any{"loss": 1.0}); err != nil {
			return err
		}
	}
	signal.Ignore(syscall.SIGTERM)
	emit("reported")
	<-ctx.Done()
	return ctx.Err()
})

// Workers that report but do not end when asked are killed eventually. Their
// progress is kept if a checkpoint has the step that they reported.
func TestPreemptedStubbornWorkers(t *testing.T) {
	t.Parallel()
	for says, goesOn := range map[string]bool{
		"step-40.a1 is committed; start the run again":                                   false,
		"the workers reported step 41; started again, the run continues from step-40.a1": true,
	} {
		t.Run(fmt.Sprint("continues ", goesOn), func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, reportsOnly...)
			j.cfg.TrialConfig = map[string]any{"goes_on": goesOn}
			j.cfg.PreemptGrace, j.cfg.Grace = shortly, shortly
			requests := j.preemptible()
			j.start()
			j.out.await(t, 1, "[rank0] reported")
			j.out.await(t, 1, "[rank1] reported")
			requests <- launch.StopRequest{Preempt: true, Reason: "the test"}
			if e := j.preempted(j.wait()); e.Saved == goesOn || !strings.Contains(e.Error(), says) {
				t.Errorf("%v", e)
			}
			wantText(t, j.log, "did not end when asked", "ignore SIGTERM and are killed")
			wantNobody(t, j.cfg.Job)
		})
	}
}

// reportsOnce reports, and ends well when the test asks it to.
var reportsOnce = workerRole("reports once", func(ctx context.Context, c *client.Client) error {
	if err := c.Report(ctx, 1, map[string]any{"loss": 1.0}); err != nil {
		return err
	}
	emit("done")
	return pause(ctx, shortly)
})

// Workers that end well before they learn of a preemption have completed.
func TestCompletedDespitePreemption(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, reportsOnce...)
	requests := j.preemptible()
	j.start()
	j.out.await(t, 1, "[rank0] done")
	j.out.await(t, 1, "[rank1] done")
	requests <- launch.StopRequest{Preempt: true, Reason: "the test"}
	if err := j.wait(); err != nil {
		t.Error(err)
	}
	if trial := trialOf(t); trial.Status != projections.Completed {
		t.Errorf("trial %+v", trial)
	}
}

// lateRequest asks for a preemption when a worker has ended, before the trainer
// has recorded it.
type lateRequest struct {
	session.Log
	requests chan<- launch.StopRequest
}

// Append implements session.Log.
func (l lateRequest) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	if facts[0].Kind == (events.WorkerExited{}).Kind() {
		l.requests <- launch.StopRequest{Preempt: true, Reason: "the test"}
		<-time.After(shortly) // let the trainer react
	}
	return l.Log.Append(ctx, facts...)
}

// Workers that had ended before the preemption was requested have completed, even
// if the log learns of it later.
func TestCompletedBeforePreemption(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, "/bin/true")
	j.store.Log = lateRequest{home.Log, j.preemptible()}
	j.must()
	wantText(t, j.log, "job asked to end")
	if trial := trialOf(t); trial.Status != projections.Completed {
		t.Errorf("trial %+v", trial)
	}
}

// savesThenReports reports steps after it has begun a save, and does not end when
// asked.
var savesThenReports = workerRole("saves, then reports", func(ctx context.Context, c *client.Client) error {
	s, err := c.Save(ctx, 40, state(40, c.Rank, c.WorldSize), client.SaveOptions{})
	if err != nil {
		return err
	}
	for step := int64(40); step <= 41; step++ {
		if err := c.Report(ctx, step, map[string]any{"loss": 1.0}); err != nil {
			return err
		}
	}
	emit("reported")
	if err := s.Wait(ctx, client.Committed); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
})

// lateCommit asks for a preemption when a checkpoint is about to be committed.
type lateCommit struct {
	session.Log
	j        *job
	requests chan<- launch.StopRequest
}

// Decide implements session.Log.
func (l lateCommit) Decide(ctx context.Context, d events.Decision, after uint64) (uint64, error) {
	if d.Kind == (events.CheckpointCommitted{}).Kind() {
		awaitText(l.j.t, l.j.out, "reported")
		l.requests <- launch.StopRequest{Preempt: true, Reason: "the test"}
		awaitText(l.j.t, l.j.log, "job asked to end")
	}
	return l.Log.Decide(ctx, d, after)
}

// A save that began before a preemption and is committed after it has none of the
// steps that were reported in between.
func TestPreemptedWhileCommitting(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, savesThenReports...)
	j.cfg.PreemptGrace, j.cfg.Grace = shortly, shortly
	j.store.Log = lateCommit{home.Log, j, j.preemptible()}
	j.start()
	if e := j.preempted(j.wait()); e.Saved || e.Checkpoint != "step-40.a1" || !strings.Contains(e.Error(), "the workers reported step 41") {
		t.Errorf("%v", e)
	}
}

// A job that is asked to end between two attempts begins no other.
func TestPreemptedBetweenAttempts(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, "/bin/false")
	j.cfg.MaxRestarts, j.cfg.ShortLife = -1, time.Hour
	requests := j.preemptible()
	j.start()
	awaitText(t, j.log, "after=3.2s")
	requests <- launch.StopRequest{Preempt: true, Reason: "the test"}
	if e := j.preempted(j.wait()); e.Saved {
		t.Errorf("%+v", e)
	}
	if n := len(bodiesOf[events.GroupStarted](t, runOf(t))); n != 6 {
		t.Errorf("%d attempts, want 6", n)
	}
}
