package agent_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/agent"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// startRank is a process that finds the agent of a rank of a launch over several
// machines. Its arguments are the store, the launch, the rank, a time limit and options of
// the agent.
func startRank(args []string) error {
	rank, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	limit, err := time.ParseDuration(args[3])
	if err != nil {
		return err
	}
	locate := func(ctx context.Context) (store.Whereabouts, error) {
		return store.Locate(ctx, store.Options{Location: args[0]})
	}
	c, _, err := agent.StartRank(context.Background(), args[0], agent.Rank{Launch: args[1], Rank: rank, Master: "127.0.0.1", Limit: limit},
		agent.StartOptions{Program: "/proc/self/exe", Args: args[4:], Version: "test", Limit: patience}, locate)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(c)
}

// machine is where a rank of a test runs: a runtime directory of its own, as another
// machine has.
type machine struct {
	*place
	runtime string
}

// machines returns machines that share the store of a place; the first is the test's own.
func (p *place) machines(n int) []machine {
	p.t.Helper()
	list := []machine{{p, os.Getenv("XDG_RUNTIME_DIR")}}
	for range n - 1 {
		dir, err := os.MkdirTemp("/tmp", "ag") //nolint:usetesting // short enough for sockets
		if err != nil {
			p.t.Fatal(err)
		}
		p.t.Cleanup(func() {
			if logs, err := filepath.Glob(filepath.Join(dir, "*", "*.log")); err == nil && p.t.Failed() {
				for _, path := range logs {
					text, err := os.ReadFile(path)
					p.t.Logf("%s: %v\n%s", path, err, text)
				}
			}
			_ = os.RemoveAll(dir)
		})
		list = append(list, machine{p, dir})
	}
	return list
}

// rank finds the agent of a rank on a machine.
func (m machine) rank(launch string, rank int, limit time.Duration, options ...string) (agent.Card, error) {
	var c agent.Card
	args := append([]string{"startrank", m.at.Location, launch, strconv.Itoa(rank), limit.String(), "--shared=" + m.shared}, options...)
	cmd := exec.CommandContext(m.t.Context(), "/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+m.runtime)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return c, fmt.Errorf("%w: %s", err, out)
	}
	return c, json.Unmarshal(out, &c)
}

// launched returns the agents of rank 0 on the first machine, of rank 1 on the second and
// so on, which look for each other at the same time.
func launched(t *testing.T, launch string, at []machine, options ...string) []agent.Card {
	t.Helper()
	var all sync.WaitGroup
	cards := make([]agent.Card, len(at))
	for rank, m := range at {
		all.Go(func() {
			var err error
			if cards[rank], err = m.rank(launch, rank, patience, options...); err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
	for _, c := range cards[1:] {
		stopAfter(t, c)
	}
	return cards
}

// stopAfter stops an agent after the test.
func stopAfter(t *testing.T, c agent.Card) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if _, err := agent.Stop(ctx, c, agent.StopRequest{Now: true, Reason: "the test is over"}); err == nil {
			if err := agent.Gone(ctx, c); err != nil {
				t.Error(err)
			}
		}
	})
}

// Ranks on two machines save together and resume together. Only the agent of rank 0's
// machine owns the store.
func TestRanksOnTwoMachines(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	at := p.machines(2)
	cards := launched(t, "one", at)
	if cards[0].Socket == cards[1].Socket {
		t.Fatalf("both ranks have the agent at %s", cards[0].Socket)
	}
	s := p.open()
	first, job, resume := runAt(t, cards, "leave")
	if resume != "" {
		t.Errorf("the first session resumes from %q", resume)
	}
	if e := p.ended(s, job); e.ExitCode != 0 || e.Reason != "" {
		t.Errorf("the first job ended with %+v", e)
	}
	if trial := p.trial(s, "real"); trial.Head != first || trial.Status != projections.Paused {
		t.Errorf("after the first session: %+v, want %s and paused", trial, first)
	}
	second, job, resume := runAt(t, launched(t, "two", at), "vanish")
	if resume != first {
		t.Errorf("the second session resumes from %q, want %q", resume, first)
	}
	if e := p.ended(s, job); e.ExitCode != 1 || !strings.Contains(e.Reason, "without leaving") {
		t.Errorf("the second job ended with %+v", e)
	}
	if trial := p.trial(s, "real"); trial.Head != second || trial.Attempt != 2 {
		t.Errorf("after the second session: %+v, want %s", trial, second)
	}
}

// A rank that never joins is named, with the processes that have joined and their
// machines.
func TestAbsentMachineIsNamed(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	cards := launched(t, "absent", p.machines(2), "--join=1s")
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	_, err = post[agent.JoinReply](t.Context(), cards[1].Socket, cards[1].Token, "join", request("k", "r", 1, 3, os.Getpid()))
	wants(t, err, http.StatusGatewayTimeout, "ranks [0 2] of 3", `run "r"`, fmt.Sprintf("[%d] on %s", os.Getpid(), host))
}

// Without rank 0, the other ranks' machines have no agent to follow.
func TestLaunchWithoutRankZero(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	_, err := p.machines(2)[1].rank("alone", 1, time.Second)
	if err == nil || !strings.Contains(err.Error(), "no agent coordinates this launch in the store "+p.at.Location) {
		t.Errorf("error %v", err)
	}
}
