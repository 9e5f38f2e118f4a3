package launch_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// trainsUntilAsked reports each step, the ranks at different speeds, and saves
// and ends when asked.
var trainsUntilAsked = workerRole("trains until asked", func(ctx context.Context, c *client.Client) error {
	step := int64(0)
	if c.Resume != "" {
		if _, err := fmt.Sscanf(c.Resume, "step-%d.", &step); err != nil {
			return err
		}
		if err := load(ctx, c, "", step); err != nil {
			return err
		}
		emit("resumed at %d", step)
	}
	for {
		step++
		if err := pause(ctx, time.Duration(c.Rank)*5*time.Millisecond); err != nil {
			return err
		}
		if err := c.Report(ctx, step, map[string]any{"loss": 1.0}); err != nil {
			return err
		}
		if stop := c.StopRequested(); stop != "" {
			emit("%s at %d", stop, step)
			if stop == client.Stop {
				return nil
			}
			return save(ctx, c, step)
		}
		if step%50 == 1 {
			emit("at %d", step)
		}
	}
})

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// preemptible gives a job a way to be asked to end.
func (j *job) preemptible() chan<- launch.StopRequest {
	requests := make(chan launch.StopRequest, 1)
	j.cfg.Requests = requests
	return requests
}

// preempted expects an error to be a preemption, and the trial to be paused.
func (j *job) preempted(err error) *launch.PreemptedError {
	j.t.Helper()
	var e *launch.PreemptedError
	if !errors.As(err, &e) {
		j.t.Fatalf("error %v, want a PreemptedError", err)
	}
	if trial := trialOf(j.t); trial.Status != projections.Paused || trial.Head != e.Checkpoint || !strings.HasPrefix(trial.Message, "preempted: ") {
		j.t.Errorf("trial %+v", trial)
	}
	return e
}

// stopOf is the end of the newest attempt of the test's run.
func stopOf(t *testing.T) *events.GroupStopped {
	t.Helper()
	all := bodiesOf[events.GroupStopped](t, runOf(t))
	if len(all) == 0 {
		t.Fatal("no attempt has ended")
	}
	return all[len(all)-1]
}

// agreed is the one step at which all ranks of a job were asked to end.
func agreed(t *testing.T, j *job, how string, ranks int) (step int64) {
	t.Helper()
	for rank := range ranks {
		got := j.out.lines(fmt.Sprintf("[rank%d] %s at ", rank, how))
		if len(got) != 1 {
			t.Fatalf("rank %d was asked at %q, want one step", rank, got)
		}
		var at int64
		if _, err := fmt.Sscan(got[0], &at); err != nil {
			t.Fatal(err)
		}
		if rank == 0 {
			step = at
		}
		if at != step {
			t.Errorf("rank %d was asked at step %d, rank 0 at %d", rank, at, step)
		}
	}
	return step
}

// Ranks of different speeds agree on the step of a preemption, save it and end.
// The next job resumes there, and is preempted again: that costs no restart.
func TestPreempted(t *testing.T) {
	t.Parallel()
	from := int64(0)
	for attempt := 1; attempt <= 2; attempt++ {
		j := newJob(t, 2, trainsUntilAsked...)
		requests := j.preemptible()
		j.start()
		for rank := range 2 {
			j.out.await(t, 1, fmt.Sprintf("[rank%d] at ", rank))
		}
		requests <- launch.StopRequest{Preempt: true, Reason: "the test needs the machine"}
		e := j.preempted(j.wait())
		step := agreed(t, j, client.Preempt, 2)
		if want := fmt.Sprintf("step-%d.a%d", step, attempt); !e.Saved || e.Checkpoint != want {
			t.Errorf("%+v, want that %s is saved", e, want)
		}
		if got := stopOf(t); got.Failure != "preemption" || got.Attempt != attempt {
			t.Errorf("group.stopped: %+v", got)
		}
		if attempt == 2 {
			wantText(t, j.out, fmt.Sprintf("[rank0] resumed at %d\n", from), fmt.Sprintf("[rank1] resumed at %d\n", from))
		}
		from = step
		wantNobody(t, j.cfg.Job)
	}
}

// request appends a request to stop to the trial's lane, as a command would.
func request(t *testing.T, j *job, body events.TrialStopRequested) {
	t.Helper()
	requestAs(t, j, &body, nil)
}

// requestAs is request with another body on the wire, if there is one.
func requestAs(t *testing.T, j *job, body *events.TrialStopRequested, data []byte) {
	t.Helper()
	agg := events.Aggregate{Run: j.cfg.Run, Trial: projections.DefaultTrial}
	for deadline := time.Now().Add(patience); ; {
		d, err := events.NewDecision(events.Stamp{ID: store.NewID(), Source: "test", Time: time.Now()}, agg, body)
		if err != nil {
			t.Fatal(err)
		}
		if data != nil {
			d.Data = data
		}
		_, err = home.Log.Decide(t.Context(), d, trialOf(t).LaneSeq)
		if err == nil {
			return
		}
		if !j.store.Conflict(err) || time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// A job obeys requests to it in its log. It ignores requests to another job,
// earlier requests and messages that are not events.
func TestRequestsInTheLog(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, trainsUntilAsked...).start()
	j.out.await(t, 1, "[rank1] at ")
	requestAs(t, j, &events.TrialStopRequested{}, []byte(`"now"`))
	request(t, j, events.TrialStopRequested{Reason: "of another", Preempt: true, Job: "0192f0c1-0000-7000-8000-000000000001"})
	awaitText(t, j.log, "of another")
	request(t, j, events.TrialStopRequested{Reason: "maintenance", Preempt: true, Job: j.cfg.Job})
	e := j.preempted(j.wait())
	step := agreed(t, j, client.Preempt, 2)
	if !e.Saved || e.Reason != "maintenance" || e.Checkpoint != fmt.Sprintf("step-%d.a1", step) {
		t.Errorf("%+v at step %d", e, step)
	}

	// That request is not for the next job. It is stopped without a job's name.
	next := newJob(t, 2, trainsUntilAsked...).start()
	next.out.await(t, 1, "[rank1] resumed at ")
	next.out.await(t, 1, "[rank1] at ")
	request(t, next, events.TrialStopRequested{Reason: "enough"})
	if err := next.wait(); err != nil {
		t.Errorf("a stop that is obeyed is an error: %v", err)
	}
	agreed(t, next, client.Stop, 2)
	if trial := trialOf(t); trial.Status != projections.Paused || trial.Message != "stopped as asked: enough" || trial.Head != e.Checkpoint {
		t.Errorf("trial %+v", trial)
	}
	// Nor is a request without a name for a job that starts after it.
	last := newJob(t, 2, trainsUntilAsked...)
	requests := last.preemptible()
	last.start()
	last.out.await(t, 1, "[rank1] at ")
	requests <- launch.StopRequest{Preempt: true, Reason: "the test"}
	if e := last.preempted(last.wait()); e.Reason != "the test" {
		t.Errorf("%+v", e)
	}
}

// The events of a stopped job in the log.
func TestStopIsSaid(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, trainsUntilAsked...)
	requests := j.preemptible()
	j.start()
	j.out.await(t, 1, "[rank1] at ")
	requests <- launch.StopRequest{Preempt: true, Reason: "the machine goes"}
	if e := j.preempted(j.wait()); !e.Saved {
		t.Errorf("%+v", e)
	}
	next := newJob(t, 2, trainsUntilAsked...)
	requests = next.preemptible()
	next.start()
	next.out.await(t, 1, "[rank1] at ")
	requests <- launch.StopRequest{Reason: "enough"}
	if err := next.wait(); err != nil {
		t.Error(err)
	}
	ends := bodiesOf[events.JobEnded](t, runOf(t))
	if len(ends) != 2 || ends[0].ExitCode == 0 || ends[1].ExitCode != 0 || ends[1].Reason != "stopped as asked: enough" {
		t.Errorf("job.ended: %+v", ends)
	}
	if got := stopOf(t); got.Failure != "" || got.Reason != "stop (enough): all workers ended" {
		t.Errorf("group.stopped: %+v", got)
	}
}

// A job is preempted before its deadline.
func TestDeadline(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, trainsUntilAsked...)
	j.cfg.PreemptGrace = patience
	j.cfg.Deadline = time.Now().Add(j.cfg.PreemptGrace + j.cfg.Grace + 6*time.Second) // for the workers to start
	e := j.preempted(j.run())
	if step := agreed(t, j, client.Preempt, 2); !e.Saved || e.Checkpoint != fmt.Sprintf("step-%d.a1", step) || !strings.Contains(e.Reason, "the time of the job ends at") {
		t.Errorf("%+v at step %d", e, step)
	}
}

// asksWhetherToStop does not report. Rank 0 asks now and then, the others learn
// its answer at the same step.
var asksWhetherToStop = workerRole("asks whether to stop", func(ctx context.Context, c *client.Client) error {
	for step := int64(1); ; step++ {
		stop, err := c.ShouldStop(ctx, nil)
		if err != nil {
			return err
		}
		if stop != "" {
			emit("%s at %d", stop, step)
			return save(ctx, c, step)
		}
		if step == 5 {
			emit("at %d", step)
		}
	}
})

// Workers that do not report agree by asking.
func TestShouldStop(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, asksWhetherToStop...)
	requests := j.preemptible()
	j.start()
	j.out.await(t, 1, "[rank2] at ")
	requests <- launch.StopRequest{Preempt: true, Reason: "the test"}
	e := j.preempted(j.wait())
	if step := agreed(t, j, client.Preempt, 3); !e.Saved || e.Checkpoint != fmt.Sprintf("step-%d.a1", step) {
		t.Errorf("%+v at step %d", e, step)
	}
}
