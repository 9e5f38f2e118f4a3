package launch_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// Trials of one job are trained at once: each has its own processes, memory and saves, and is
// asked to end by the reply to the report that was judged. The job begins and ends once.
func TestTrialsOfOneJob(t *testing.T) {
	t.Parallel()
	run, names := runOf(t), []string{"t0", "t1", "t2"}
	out, log := newTranscript(), newTranscript()
	base := config(run, 2, trainsUntilAsked, out, log)
	base.Shared = true
	st := storeOf(home, memory)
	ended, err := launch.Began(t.Context(), base, st)
	if err != nil {
		t.Fatal(err)
	}
	ends := make([]error, len(names))
	var all sync.WaitGroup
	for i, name := range names {
		cfg := base
		cfg.Trial, cfg.TrialConfig = name, map[string]any{"number": i}
		cfg.Judge = func(_ context.Context, m *events.Metrics) *launch.StopRequest {
			if m.Step < int64(10+i) {
				return nil
			}
			return &launch.StopRequest{Preempt: true, Reason: "it has to wait"}
		}
		all.Go(func() { ends[i] = launch.Run(t.Context(), cfg, st) })
	}
	all.Wait()
	for i, name := range names {
		want := fmt.Sprintf("step-%d.a1", 10+i)
		if e := (*launch.PreemptedError)(nil); !errors.As(ends[i], &e) || !e.Saved || e.Checkpoint != want {
			t.Errorf("trial %s: %v, want that %s is saved\n%s%s", name, ends[i], want, out, log)
		}
		row, err := query.Ask(t.Context(), home.Views(), query.Trial, query.Params{Run: run, Trial: name})
		if err != nil {
			t.Fatal(err)
		}
		if row.Status != projections.Paused || row.Head != want || row.Job != base.Job || row.Config["number"] != float64(i) || row.Iterations != 10+i {
			t.Errorf("trial %s: %+v", name, row)
		}
	}
	if got := len(out.lines("[rank0] " + client.Preempt + " at ")); got != len(names) {
		t.Errorf("%d trials were asked to save", got)
	}
	wantNobody(t, base.Job)
	if err := ended("it is over", nil); err != nil {
		t.Error(err)
	}
	jobs, err := query.Ask(t.Context(), home.Views(), query.Jobs, query.Params{Run: run})
	if err != nil || len(jobs) != 1 || !jobs[0].Ended || jobs[0].ID != base.Job || jobs[0].Reason != "it is over" {
		t.Errorf("jobs: %+v, %v", jobs, err)
	}
}

// A trial that dies takes no process of another one with it.
func TestTrialOfAJobDies(t *testing.T) {
	t.Parallel()
	out, log := newTranscript(), newTranscript()
	base := config(runOf(t), 1, nil, out, log)
	base.Shared, base.Job = true, store.NewID()
	st := storeOf(home, memory)
	ctx, cancel := context.WithCancel(t.Context())
	lives := base
	lives.Trial, lives.Command = "lives", []string{"sh", "-c", "echo lives; exec sleep 1000"}
	done := make(chan error, 1)
	go func() { done <- launch.Run(ctx, lives, st) }()
	out.await(t, 1, "lives")
	dies := base
	dies.Trial, dies.Command = "dies", []string{"sh", "-c", "sleep 1000 & exit 3"}
	if err := launch.Run(ctx, dies, st); !errors.As(err, new(*launch.FailedError)) {
		t.Errorf("the trial that dies: %v", err)
	}
	if left := survivors(t, base.Job); len(left) != 1 {
		t.Errorf("processes after the death of one trial: %q\n%s", left, log)
	}
	cancel()
	if err := <-done; err == nil {
		t.Error("the trial that lives ended without an error")
	}
	wantNobody(t, base.Job)
}
