package launch_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os/signal"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

var reports = workerRole("reports", func(ctx context.Context, c *client.Client) error {
	for step := range int64(3) {
		err := c.Report(ctx, step*10, map[string]any{
			"loss": []any{math.NaN(), math.Inf(1), float32(0.5)}[step], "low": math.Inf(-1),
			"phase": "warm-up", "ok": true, "rank": c.Rank / 2, "n": 3,
		})
		if err != nil {
			return err
		}
	}
	return nil
})

// Metrics arrive unchanged, rank 0's as the trial's; those of other ranks are
// listed only if they differ.
func TestReports(t *testing.T) {
	t.Parallel()
	newJob(t, 3, reports...).must()
	got := bodiesOf[events.Metrics](t, runOf(t))
	if len(got) != 3 {
		t.Fatalf("%d iterations", len(got))
	}
	for i, loss := range []any{"NaN", "Infinity", 0.5} {
		metrics := func(rank float64) map[string]any {
			return map[string]any{"loss": loss, "low": "-Infinity", "phase": "warm-up", "ok": true, "rank": rank, "n": 3.0}
		}
		want := &events.Metrics{
			Attempt: 1, Iteration: i + 1, Step: int64(i) * 10, Metrics: metrics(0), Seconds: got[i].Seconds,
			Others:  []events.RankMetrics{{Rank: 2, Metrics: metrics(1)}},
			Slowest: got[i].Slowest,
		}
		if late := got[i].Slowest; late == nil || late.Rank < 0 || late.Rank > 2 || late.Late < 0 || late.Late > got[i].Seconds+60 {
			t.Errorf("the slowest rank of iteration %d is %+v", i+1, late)
		}
		if !reflect.DeepEqual(got[i], want) || got[i].Seconds <= 0 {
			t.Errorf("iteration %d is %+v, want %+v", i+1, got[i], want)
		}
	}
	if trial := trialOf(t); trial.Iterations != 3 || trial.Status != projections.Completed {
		t.Errorf("trial %+v", trial)
	}
	one[events.TrainingStarted](t, runOf(t))
}

var reportsUnequally = workerRole("reports unequally", func(ctx context.Context, c *client.Client) error {
	signal.Ignore(syscall.SIGTERM) // which comes with the refusal
	if err := c.Report(ctx, 1, map[string]any{"loss": 1.0}); err != nil || c.Rank > 0 {
		return err
	}
	return refused(c.Report(ctx, 2, map[string]any{"loss": 0.5}), 409)
})

// Ranks that end while others report are an error that names both.
func TestUnequalReports(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, reportsUnequally...)
	failed := j.fails()
	const says = "ranks [0] reported while ranks [1 2] have ended"
	if !strings.Contains(failed.Cause, says) || failed.Rank != -1 {
		t.Errorf("cause %+v", failed)
	}
	wantText(t, j.out, "[rank0] refused "+says)
	one[events.Metrics](t, runOf(t))
}

var reportsOnceMore = workerRole("reports again", func(ctx context.Context, c *client.Client) error {
	if c.Rank > 0 {
		return nil
	}
	return c.Report(ctx, 1, map[string]any{"loss": 1.0})
})

// A rank that fails because its report was refused is not the cause, whichever
// news comes first.
func TestUnequalReportsAreTheCause(t *testing.T) {
	t.Parallel()
	for n := range 5 {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			const says = "ranks [0] reported while ranks [1] have ended"
			if failed := newJob(t, 2, reportsOnceMore...).fails(); !strings.Contains(failed.Cause, says) || failed.Rank != -1 {
				t.Errorf("cause %+v", failed)
			}
		})
	}
}

var helloOnly = workerRole("sends hello", func(context.Context, *client.Client) error { return nil })

// Workers that never report end well, and the log has a warning; a program that
// knows nothing of the trainer causes no warning.
func TestNoReport(t *testing.T) {
	t.Parallel()
	const warning = "ran until completion without reporting"
	j := newJob(t, 2, helloOnly...).must()
	wantText(t, j.log, "level=INFO", warning)
	one[events.TrainingStarted](t, runOf(t))
	if got := len(bodiesOf[events.Metrics](t, runOf(t))); got != 0 {
		t.Errorf("%d reports", got)
	}
	plain := newJob(t, 1, "/bin/true").must()
	if strings.Contains(plain.log.String(), warning) {
		t.Errorf("a plain program is warned of:\n%s", plain.log)
	}
	if trial := trialOf(t); trial.Status != projections.Completed || trial.Attempt != 2 {
		t.Errorf("trial %+v", trial)
	}
}

// The socket takes the bare numbers of Python's json module.
func TestPythonNumbers(t *testing.T) {
	t.Parallel()
	_, ranks := doors(t, 1)
	if status, reply := ranks[0].post("report", `{"step":4,"metrics":{"a":NaN,"b":-Infinity,"c":"NaN, or not"}}`); status != 200 {
		t.Fatal(status, reply)
	}
	got, err := query.Ask(t.Context(), home.Views(), query.Reports, query.Params{Run: runOf(t), Trial: projections.DefaultTrial})
	if err != nil || len(got) != 1 {
		t.Fatal(got, err)
	}
	if want := (map[string]any{"a": "NaN", "b": "-Infinity", "c": "NaN, or not"}); !reflect.DeepEqual(got[0].Metrics, want) {
		t.Errorf("metrics %v", got[0].Metrics)
	}
}

var reportsAndDies = workerRole("reports and dies", func(ctx context.Context, c *client.Client) error {
	if err := c.Report(ctx, 1, map[string]any{"loss": 1.0}); err != nil {
		return err
	}
	return errors.New(fmt.Sprint("rank ", c.Rank, " has a bug"))
})

// What was reported before a failure is in the log before it.
func TestReportBeforeFailure(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, reportsAndDies...)
	failed := j.fails()
	if failed.Rank != 0 || failed.Attempt != 1 || !strings.Contains(strings.Join(failed.Tail, ""), "rank 0 has a bug") {
		t.Errorf("%+v", failed)
	}
	var order []string
	for _, r := range logOf(t, runOf(t)) {
		order = append(order, string(r.Kind))
	}
	const want = "job.started job.node_joined trial.created group.started group.training_started report.metrics group.worker_exited group.stopped trial.errored job.node_left job.ended"
	// The rank that starts training is not the rank that reports: either may come
	// first.
	got := strings.Replace(strings.Join(order, " "), "report.metrics group.training_started", "group.training_started report.metrics", 1)
	if got != want {
		t.Errorf("the log has %s, want %s", got, want)
	}
}
