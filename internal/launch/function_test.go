package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/client/function"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/projections"
)

// functionRole declares a worker that is a training function.
func functionRole(name string, train any) []string {
	return role(name, func(ctx context.Context, _ []string) error {
		os.Exit(function.Main(ctx, train))
		return nil
	})
}

var trains = functionRole("trains", func(ctx context.Context, config function.Config, r *function.Reporter) error {
	for n := range 3 {
		if err := r.Report(ctx, function.Result{"loss": config["lr"].(float64) / float64(n+1), "step": 10 * n}); err != nil {
			return err
		}
	}
	return nil
})

// Each report of a function is one iteration; its end is none.
func TestFunction(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, trains...)
	j.cfg.TrialConfig = map[string]any{"lr": 0.5}
	j.must()
	got := bodiesOf[events.Metrics](t, runOf(t))
	if len(got) != 3 {
		t.Fatalf("%d iterations", len(got))
	}
	for n, m := range got {
		if m.Iteration != n+1 || m.Step != int64(10*n) || m.Metrics["loss"] != 0.5/float64(n+1) || len(m.Others) != 0 || m.Seconds <= 0 {
			t.Errorf("iteration %d is %+v", n+1, m)
		}
		for _, name := range []string{function.Duplicate, function.TimeThisIter, function.Step} {
			if _, has := m.Metrics[name]; has {
				t.Errorf("iteration %d reports %q", n+1, name)
			}
		}
	}
	if trial := trialOf(t); trial.Status != projections.Completed || trial.Iterations != 3 {
		t.Errorf("trial %+v", trial)
	}
}

var saysDone = functionRole("reports done", func(ctx context.Context, _ function.Config) error {
	if err := function.Report(ctx, function.Result{"loss": 1.0, "done": true}); err != nil {
		return err
	}
	if err := function.Report(ctx, function.Result{"loss": 2.0}); !errors.Is(err, function.ErrDone) {
		return fmt.Errorf("a report after done: %w", err)
	}
	return nil
})

// "done" is sent with the last iteration.
func TestFunctionDone(t *testing.T) {
	t.Parallel()
	newJob(t, 2, saysDone...).must()
	if m := one[events.Metrics](t, runOf(t)); m.Metrics["loss"] != 1.0 {
		t.Errorf("iteration %+v", m)
	}
}

var onceThenPanics = functionRole("panics", func(ctx context.Context, _ function.Config, r *function.Reporter) error {
	if err := r.Report(ctx, function.Result{"loss": 1.0}); err != nil {
		return err
	}
	var layers []int
	return fmt.Errorf("layer %d", layers[3])
})

// A panic is recorded in the log with its stack, after the reports.
func TestFunctionPanics(t *testing.T) {
	t.Parallel()
	failed := newJob(t, 1, onceThenPanics...).fails()
	if !strings.Contains(failed.Cause, "index out of range [3]") {
		t.Errorf("cause %q", failed.Cause)
	}
	exited := one[events.WorkerExited](t, runOf(t))
	if exited.Code != 1 || !strings.Contains(exited.Traceback, "internal/launch/function_test.go") {
		t.Errorf("exit %+v", exited)
	}
	one[events.Metrics](t, runOf(t))
}

var wrongSignature = functionRole("has a wrong signature", func(context.Context, int) {})

// A function that cannot run reports it, and so does a function without a
// trainer.
func TestFunctionCannotRun(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, wrongSignature...)
	if failed := j.fails(); failed.Rank != 0 {
		t.Errorf("%+v", failed)
	}
	wantText(t, j.out, "no training function: parameter 2 is a int")
	if exited := one[events.WorkerExited](t, runOf(t)); exited.Code != 64 {
		t.Errorf("exit %+v", exited)
	}
}

var reportsUntilStopped = functionRole("reports until it is stopped", func(ctx context.Context, _ function.Config, r *function.Reporter) (err error) {
	for n := 0; err == nil; n++ {
		err = r.Report(ctx, function.Result{"n": n})
		if n == 2 {
			emit("reports")
		}
	}
	emit("cleans up: %v", err)
	return err
})

// A SIGTERM of the trainer stops the function at its next report, with time to
// clean up, and the exit code shows that it has not completed.
func TestFunctionTerminated(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, reportsUntilStopped...).start()
	j.out.await(t, 1, "reports")
	j.cancel(errors.New("the user's choice"))
	if err := j.wait(); err == nil {
		t.Error("the job went well")
	}
	wantText(t, j.out, "cleans up: a stop was requested")
	if exited := one[events.WorkerExited](t, runOf(t)); exited.Code != 128+15 || exited.Signal != "" {
		t.Errorf("exit %+v", exited)
	}
}

var continues = functionRole("saves and continues", func(ctx context.Context, _ function.Config, cp function.Checkpoint) (int, error) {
	state := client.State{Values: []client.Value{{FQN: "n", Data: []byte("0")}}}
	if cp.Resume == "" {
		s, err := cp.Save(ctx, 4, state, client.SaveOptions{})
		if err != nil {
			return 0, err
		}
		return 0, errors.Join(s.Wait(ctx, client.Committed), errors.New("dies after its save"))
	}
	state.Values[0].Data = nil
	if _, err := cp.Load(ctx, &state, client.LoadOptions{}); err != nil {
		return 0, err
	}
	emit("resumed from %s with %s", cp.Resume, state.Values[0].Data)
	return 0, nil
})

// A function saves, and its next attempt continues from there. Its return value
// is reported, also 0.
func TestFunctionResumes(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, continues...)
	j.cfg.MaxRestarts = 1
	j.must()
	wantText(t, j.out, "resumed from step-4.a1 with 0")
	if m := one[events.Metrics](t, runOf(t)); m.Metrics[function.Metric] != 0.0 || m.Attempt != 2 {
		t.Errorf("iteration %+v", m)
	}
}

// The socket requires the same of clients in every language.
func TestLastReportOnTheSocket(t *testing.T) {
	t.Parallel()
	_, ranks := doors(t, 2)
	other := make(chan int, 1)
	go func() {
		status, _ := ranks[1].post("report", `{"step":7,"metrics":{},"done":true}`)
		other <- status
	}()
	if status, reply := ranks[0].post("report", `{"step":7,"metrics":{},"done":true}`); status != 200 || <-other != 200 {
		t.Fatal(status, reply)
	}
	for _, late := range []string{`{"step":8,"metrics":{}}`, `{"step":8,"metrics":{"__duplicate__":true}}`} {
		if status, reply := ranks[0].post("report", late); status != 409 || !strings.Contains(reply, "already done: rank 0 finished with step 7") {
			t.Errorf("%s: %d %s", late, status, reply)
		}
	}
	if status, reply := ranks[1].post("report", `{"step":8,"metrics":{"time_this_iter_s":"soon"}}`); status != 400 {
		t.Errorf("%d %s", status, reply)
	}
	one[events.Metrics](t, runOf(t))
}

var savesWhenPreempted = functionRole("saves when it is preempted", func(ctx context.Context, _ function.Config, cp function.Checkpoint, r *function.Reporter) error {
	for step := int64(1); ; step++ {
		err := r.Report(ctx, function.Result{"step": step})
		if step == 2 {
			emit("at work")
		}
		if err == nil {
			continue
		}
		emit("%s at %d", r.Stopping(), step)
		s, serr := cp.Save(ctx, step, client.State{Values: []client.Value{{FQN: "step", Data: fmt.Append(nil, step)}}}, client.SaveOptions{})
		if serr != nil {
			return serr
		}
		return errors.Join(err, s.Wait(ctx, client.Committed))
	}
})

// All ranks of a function stop for a preemption at one step, in which they save;
// returning the stop signal is then a clean end.
func TestFunctionPreempted(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, savesWhenPreempted...)
	requests := j.preemptible()
	j.start()
	for rank := range 2 {
		j.out.await(t, 1, fmt.Sprintf("[rank%d] at work", rank))
	}
	requests <- launch.StopRequest{Preempt: true, Reason: "the test needs the machine"}
	e := j.preempted(j.wait())
	if want := fmt.Sprintf("step-%d.a1", agreed(t, j, client.Preempt, 2)); !e.Saved || e.Checkpoint != want {
		t.Errorf("%+v, want that %s is saved", e, want)
	}
	for _, exited := range bodiesOf[events.WorkerExited](t, runOf(t)) {
		if exited.Code != 0 {
			t.Errorf("exit %+v", exited)
		}
	}
}

var endlessly = functionRole("endlessly", func(ctx context.Context, _ function.Config, r *function.Reporter) error {
	for n := 0; ; n++ {
		if err := r.Report(ctx, function.Result{"loss": 1.0}); err != nil {
			emit("%s after %v", r.Stopping(), err)
			return err
		}
		if n == 3 {
			emit("pid %d", os.Getpid())
		}
	}
})

// A scheduler's SIGTERM to a function's process does not end it: the trainer
// stops all functions at one step. The trainer's own SIGTERM ends it.
func TestFunctionIsSignalled(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, endlessly...)
	j.cfg.PreemptGrace = patience
	j.start()
	for rank := range 2 {
		n, err := strconv.Atoi(j.out.await(t, 1, fmt.Sprintf("[rank%d] pid ", rank))[0])
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(n, syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
	}
	_ = j.preempted(j.wait())
	wantText(t, j.out, "[rank0] preempt after ", "[rank1] preempt after ")
}
