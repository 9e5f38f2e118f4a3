package agent_test

import (
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/agent"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// Trials of a run are trained at once, under one job that ends with the last of them. One of
// them continues from a checkpoint of another, and is asked to end alone or with the others.
func TestTrialsOfARun(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c, s := p.start(), p.open()
	first := joinTrial(t, c, "a", "search", "t0", 2)
	second := joinTrial(t, c, "b", "search", "t1", 1)
	if first[0].Job != second[0].Job {
		t.Errorf("jobs %s and %s, want one", first[0].Job, second[0].Job)
	}
	commit(t, first, 10)
	commit(t, second, 10) // an ID that t0 has too

	for trial, words := range map[string][]string{"t0": {"is in use"}, "": {"is in use"}} {
		asked := request("c"+trial, "search", 0, 1, os.Getpid())
		asked.Trial = trial
		_, err := post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", asked)
		wants(t, err, http.StatusConflict, words...)
	}

	// t1 begins again, from a checkpoint of t0.
	second[0].leave()
	await(t, func() bool { return trialOf(p, s, "t1").Status == projections.Paused })
	asked := request("d", "search", 0, 1, second[0].proc.Process.Pid)
	asked.Trial, asked.Resume = "t1", "search/t0@step-10.a1"
	again, err := post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", asked)
	if err != nil {
		t.Fatal(err)
	}
	if again.Job != first[0].Job || again.Attempt != 2 || again.Resume == "" {
		t.Errorf("t1 joined again: %+v", again)
	}
	clone := &rank{t: t, proc: second[0].proc, JoinReply: again}
	must[client.Context](clone, "hello", client.Hello{Protocols: []int{client.Protocol}, PID: clone.proc.Process.Pid})
	commit(t, []*rank{clone}, 30)
	if row := trialOf(p, s, "t1"); row.Head != "step-30.a2" || !strings.Contains(row.Resume, "t0") {
		t.Errorf("t1: %+v", row)
	}

	// A request for the run is one for each of its trials.
	if _, err := s.StopRun(t.Context(), "search", "it is enough", true); err != nil {
		t.Fatal(err)
	}
	for _, r := range []*rank{first[0], first[1], clone} {
		await(t, func() bool { return must[client.StopReply](r, "should_stop", struct{}{}).Stop == client.Preempt })
		r.leave()
	}
	p.ended(s, first[0].Job)
	jobs, err := query.Ask(t.Context(), s.Views(), query.Jobs, query.Params{Run: "search"})
	if err != nil || len(jobs) != 1 {
		t.Errorf("jobs: %+v, %v", jobs, err)
	}

	// The run is free: its next trial has another job.
	next := joinTrial(t, c, "e", "search", "t2", 1)
	if next[0].Job == first[0].Job {
		t.Error("a new trial has the job that has ended")
	}
	next[0].leave()
	p.ended(s, next[0].Job)
	join(t, c, "f", "search", 1)[0].leave()
}

func trialOf(p *place, s *store.Store, name string) projections.Trial {
	p.t.Helper()
	got, err := query.Ask(p.t.Context(), s.Views(), query.Trial, query.Params{Run: "search", Trial: name})
	if err != nil {
		p.t.Fatal(err)
	}
	return got
}
