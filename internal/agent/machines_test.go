package agent_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
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
		dir, err := os.MkdirTemp("/tmp", "ag") // short enough for sockets
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

// Rank 0 of the next launch is on another machine: the agent that has coordinated gives the
// store up, at once although it would be idle forever.
func TestRankZeroMoves(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	at := p.machines(2)
	cards := launched(t, "one", at)
	runAt(t, cards, "leave")
	moved := launched(t, "two", []machine{at[1], at[0]})
	stopAfter(t, moved[0])
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := agent.Gone(ctx, cards[0]); err != nil {
		t.Error(err)
	}
	if moved[0].Socket == cards[0].Socket {
		t.Errorf("rank 0 of the second launch has the agent of the first, %+v", moved[0])
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

// A directory that is not rank 0's is named, with its machine, whether it has a store or
// not.
func TestUnsharedDirectory(t *testing.T) {
	t.Parallel()
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	p, other := newPlace(t), newPlace(t)
	at := p.machines(2)
	if _, err := at[0].rank("apart", 0, patience); err != nil {
		t.Fatal(err)
	}
	empty := machine{&place{t: t, at: store.Whereabouts{Location: t.TempDir()}}, at[1].runtime}
	foreign := machine{other, at[1].runtime}
	for want, m := range map[string]machine{"there is no store in ": empty, "no agent coordinates this launch in the store ": foreign} {
		_, err := m.rank("apart", 1, time.Second)
		for _, word := range []string{"rank 1 on " + host, want + m.at.Location, "must be the directory of rank 0's machine (127.0.0.1)"} {
			if err == nil || !strings.Contains(err.Error(), word) {
				t.Errorf("error %v, want %q", err, word)
			}
		}
	}
}

// steady is a process that joins, and for each line of its input saves the step that the
// line has. It prints the outcome of each save.
func steady(args []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	rank, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	var c agent.Card
	if err := json.Unmarshal([]byte(args[0]), &c); err != nil {
		return err
	}
	j, err := post[agent.JoinReply](ctx, c.Socket, c.Token, "join", request(args[1], "steady", rank, 2, os.Getpid()))
	if err != nil {
		return err
	}
	for name, value := range map[string]string{client.EnvSocket: j.Socket, client.EnvToken: j.Token} {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	w, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	fmt.Printf("resume %q\n", j.Resume)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		step, err := strconv.ParseInt(lines.Text(), 10, 64)
		if err != nil {
			return err
		}
		state := client.State{Values: []client.Value{{FQN: "v", PerRank: true, Data: fmt.Appendf(nil, "rank %d", rank)}}}
		s, err := w.Save(ctx, step, state, client.SaveOptions{})
		if err == nil {
			err = s.Wait(ctx, client.Committed)
		}
		fmt.Printf("saved %v\n", err)
	}
	return nil
}

// worker is a process of the role steady.
type worker struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.Writer
	lines chan string
}

// workers starts a steady process for each rank.
func workers(t *testing.T, key string, at []agent.Card) (list []*worker) {
	t.Helper()
	for rank, c := range at {
		card, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		w := &worker{t: t, cmd: exec.CommandContext(t.Context(), "/proc/self/exe", "steady", string(card), key, strconv.Itoa(rank)), lines: make(chan string, 16)}
		w.cmd.Stderr = os.Stderr
		out, err := w.cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if w.in, err = w.cmd.StdinPipe(); err != nil {
			t.Fatal(err)
		}
		if err := w.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { kill(w.cmd) })
		go func() {
			defer close(w.lines)
			for lines := bufio.NewScanner(out); lines.Scan(); {
				w.lines <- lines.Text()
			}
		}()
		list = append(list, w)
	}
	return list
}

// saves has the worker save a step.
func (w *worker) saves(step int) {
	w.t.Helper()
	if _, err := fmt.Fprintln(w.in, step); err != nil {
		w.t.Error(err)
	}
}

// prints waits for the worker's next line, which must have all words.
func (w *worker) prints(limit time.Duration, words ...string) {
	w.t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case line, open := <-w.lines:
		for _, word := range words {
			if !open || !strings.Contains(line, word) {
				w.t.Errorf("the worker prints %q, want %q", line, words)
			}
		}
	case <-timer.C:
		w.t.Errorf("the worker prints nothing within %v, want %q", limit, words)
	}
}

// silence is the timeout of machines in the tests below.
const silence = 2 * time.Second

// A machine whose agent is killed is lost with its ranks: the save of the others is
// aborted, and names it. The same happens when it only stops.
func TestLostMachine(t *testing.T) {
	t.Parallel()
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for name, sig := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPlace(t)
			at := p.machines(2)
			cards := launched(t, name, at, "--silence="+silence.String())
			ranks := workers(t, name, cards)
			for _, w := range ranks {
				w.prints(patience, `resume ""`)
				w.saves(1)
			}
			for _, w := range ranks {
				w.prints(patience, "saved <nil>")
			}
			if err := syscall.Kill(cards[1].PID, sig); err != nil {
				t.Fatal(err)
			}
			ranks[0].saves(2)
			ranks[0].prints(patience, "machine "+host+" is lost: nothing was received for ")
			if sig == syscall.SIGSTOP {
				if err := syscall.Kill(cards[1].PID, syscall.SIGCONT); err != nil {
					t.Fatal(err)
				}
			}
			ranks[1].saves(2)
			ranks[1].prints(patience, "saved ")
			kill(ranks[0].cmd)
			kill(ranks[1].cmd)
			again := workers(t, name+" again", launched(t, name+"2", at, "--silence="+silence.String()))
			for _, w := range again {
				w.prints(patience, `resume "step-1.a1"`)
				w.saves(3)
			}
			for _, w := range again {
				w.prints(patience, "saved <nil>")
			}
		})
	}
}

// When the coordinating agent is killed, ranks on other machines get errors in time, and
// all ranks can join again.
func TestLostCoordinator(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	at := p.machines(2)
	cards := launched(t, "first", at, "--silence="+silence.String())
	ranks := workers(t, "key", cards)
	for _, w := range ranks {
		w.prints(patience, `resume ""`)
		w.saves(1)
	}
	for _, w := range ranks {
		w.prints(patience, "saved <nil>")
	}
	if err := syscall.Kill(cards[0].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ranks[1].saves(2)
	ranks[1].prints(patience, "saved ", "the coordinating node does not answer")
	p.gone(cards[1])
	for _, w := range ranks {
		kill(w.cmd)
	}
	again := workers(t, "key again", launched(t, "first", at, "--silence="+silence.String()))
	for _, w := range again {
		w.prints(patience, `resume "step-1.a1"`)
		w.saves(3)
	}
	for _, w := range again {
		w.prints(patience, "saved <nil>")
	}
}
