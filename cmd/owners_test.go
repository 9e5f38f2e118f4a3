package cmd_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"
)

const (
	sharers      = 20 // trainers that run at once on one store
	ownerKills   = 3  // owners of the store that are killed
	shareSteps   = 2
	shareLimit   = 2 * time.Minute // for the whole test, on a slow machine
	sharePerKill = 6               // commits between kills
)

// sharer is one of the trainers.
type sharer struct {
	run string
	cmd *exec.Cmd
	out bytes.Buffer
}

func (s *sharer) start(t *testing.T, dir string, ended chan<- *sharer) {
	t.Helper()
	s.cmd = exec.CommandContext(t.Context(), "trainer", "run", "--store", dir, "--name", s.run, "--wait=60s", "--grace=1s",
		"--", "trainer", "demo-worker", fmt.Sprint("--steps=", shareSteps), "--save-every=1")
	s.cmd.Stdout, s.cmd.Stderr = &s.out, &s.out
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = s.cmd.Wait() // the state is checked instead
		ended <- s
	}()
}

// TestManyTrainersWhoseOwnersDie runs 20 trainers on one store and kills the
// `ckptstore serve` that owns it, and then each next owner. A killed trainer is launched
// again. All exit with 0, and every committed checkpoint is listed and intact.
func TestManyTrainersWhoseOwnersDie(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	output(t, 0, "ckptstore", "init", "--store", dir)
	serve := exec.CommandContext(t.Context(), "ckptstore", "serve", "--store", dir)
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	waitOwner(t, dir, serve.Process.Pid)
	ended := make(chan *sharer, sharers)
	var all []*sharer
	for i := range sharers {
		s := &sharer{run: fmt.Sprintf("sharer-%d-%02d", os.Getpid(), i)}
		all = append(all, s)
		s.start(t, dir, ended)
	}
	var killed []int
	limit, tick := time.After(shareLimit), time.NewTicker(2*time.Millisecond)
	defer tick.Stop()
	for left := sharers; left > 0; {
		select {
		case <-limit:
			t.Fatalf("%d trainers have not ended after %v; owners killed: %v", left, shareLimit, killed)
		case s := <-ended:
			switch {
			case s.cmd.ProcessState.ExitCode() == 0:
				left--
				killed = slices.DeleteFunc(killed, func(pid int) bool { return pid == s.cmd.Process.Pid }) // too late
			case slices.Contains(killed, s.cmd.Process.Pid) && diedOf(s.cmd) == syscall.SIGKILL:
				waitGone(t, s.run)
				s.start(t, dir, ended)
			default:
				t.Fatalf("%s: %v\n%s", s.run, s.cmd.ProcessState, s.out.String())
			}
		case <-tick.C:
			if len(killed) == ownerKills || len(receiptsIn(t, dir)) <= sharePerKill*len(killed) {
				continue
			}
			pid, owners := ownerPID(dir), []*exec.Cmd{serve}
			for _, s := range all {
				owners = append(owners, s.cmd)
			}
			at := slices.IndexFunc(owners, func(c *exec.Cmd) bool { return c.Process.Pid == pid })
			if at < 0 || slices.Contains(killed, pid) {
				continue
			}
			if err := owners[at].Process.Kill(); err == nil { // or it has just ended
				killed = append(killed, pid)
			}
			if owners[at] == serve {
				_ = serve.Wait()
			}
		}
	}
	if len(killed) < ownerKills {
		t.Fatalf("%d owners were killed: too few to mean anything", len(killed))
	}
	listed := map[string]bool{}
	steps := map[string]int{}
	var list struct {
		Checkpoints []struct {
			Run, ID, State string
			Step           int
		}
	}
	decode(t, output(t, 0, "ckptstore", "ls", "--all", "--json", "--store", dir), &list)
	for _, c := range list.Checkpoints {
		if c.State == "committed" {
			listed[filepath.Join(c.Run, "main", c.ID)] = true
			steps[fmt.Sprint(c.Run, " ", c.Step)]++
		} else if c.State != "aborted" {
			t.Errorf("%s@%s is %s", c.Run, c.ID, c.State)
		}
	}
	for _, s := range all {
		for step := 1; step <= shareSteps; step++ {
			if steps[fmt.Sprint(s.run, " ", step)] == 0 {
				t.Errorf("%s has no checkpoint of step %d", s.run, step)
			}
		}
	}
	receipts := receiptsIn(t, dir)
	for _, path := range receipts {
		if !listed[path] {
			t.Errorf("%s has a receipt and is not listed", path)
		}
	}
	var checked struct{ Findings []json.RawMessage }
	decode(t, output(t, 0, "ckptstore", "verify", "--json", "--store", dir), &checked)
	if len(checked.Findings) > 0 || len(receipts) != len(listed) {
		t.Errorf("%d receipts, %d committed, findings %s", len(receipts), len(listed), checked.Findings)
	}
	t.Logf("owners killed: %d; checkpoints: %d committed, %d in all", len(killed), len(listed), len(list.Checkpoints))
}

// ownerPID returns the process that owns a store, or 0.
func ownerPID(dir string) int {
	var owner struct{ PID int }
	text, err := os.ReadFile(filepath.Join(dir, "owner.json"))
	if err != nil || json.Unmarshal(text, &owner) != nil {
		return 0 // between two owners
	}
	return owner.PID
}

// receiptsIn returns the directories below data/ that have a receipt.
func receiptsIn(t *testing.T, dir string) (refs []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "data", "*", "*", "*", "COMMIT.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		ref, err := filepath.Rel(filepath.Join(dir, "data"), filepath.Dir(path))
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, ref)
	}
	return refs
}
