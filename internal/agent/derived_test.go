package agent_test

import (
	"net/http"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/agent"
)

// script joins a process whose run is named by its script alone.
func script(t *testing.T, c agent.Card, key, resume string) (*rank, error) {
	t.Helper()
	r := &rank{t: t, proc: sleeper(t)}
	in := request(key, "train", 0, 1, r.proc.Process.Pid)
	in.Derived, in.Resume = true, resume
	var err error
	if r.JoinReply, err = post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", in); err == nil {
		must[client.Context](r, "hello", client.Hello{Protocols: []int{client.Protocol}, PID: r.proc.Process.Pid})
	}
	return r, err
}

// TestDerivedName checks that each of two processes of one script has its own
// run. When both runs have checkpoints, the next process is asked to choose one.
func TestDerivedName(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c := p.start()
	named := func(key, want string) *rank {
		t.Helper()
		r, err := script(t, c, key, "")
		if err != nil || r.Run != want {
			t.Fatalf("%s: run %q, %v; want %q", key, r.Run, err, want)
		}
		return r
	}
	first := named("a", "train")
	second, third := named("b", "train-2"), named("c", "train-3")
	if second.Resume != "" {
		t.Errorf("it resumes from %s, which another has saved", second.Resume)
	}
	commit(t, []*rank{first}, 1)
	first.leave()
	again := named("d", "train") // at once: the previous process is about to end
	if again.Resume == "" {
		t.Error("it does not continue the existing run")
	}
	commit(t, []*rank{second}, 2)
	third.leave()
	again.leave()
	_, err := script(t, c, "e", "")
	wants(t, err, http.StatusConflict, "train (step 1), train-2 (step 2)", "CKPTSTORE_RUN=train")
	if fresh, err := script(t, c, "f", "none"); err != nil || fresh.Run != "train" || fresh.Resume != "" {
		t.Errorf("afresh: run %q from %q, %v", fresh.Run, fresh.Resume, err)
	}
	named("g", "train-4") // new, since train-3 was another process's
	in := request("h", "train", 0, 2, sleeper(t).Process.Pid)
	in.Derived = true
	_, err = post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", in)
	wants(t, err, http.StatusBadRequest, "has a name that was given")
}

// TestDerivedAfterKill checks that a program that is killed and started again at
// once continues with its run.
func TestDerivedAfterKill(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c := p.start()
	first, err := script(t, c, "a", "")
	if err != nil {
		t.Fatal(err)
	}
	commit(t, []*rank{first}, 1)
	for range 5 {
		kill(first.proc)
		next, err := script(t, c, "b"+first.Job, "")
		if err != nil || next.Run != "train" || next.Resume != "step-1.a1" {
			t.Fatalf("run %q from %q, %v", next.Run, next.Resume, err)
		}
		first = next
	}
}
