package launch_test

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// leftBy is the environment of a worker of a job whose trainer is dead, without
// the identity of the store.
func leftBy(j *job) []string {
	return []string{
		client.EnvJob + "=" + j.cfg.Job, client.EnvRun + "=" + j.cfg.Run, client.EnvTrial + "=" + j.cfg.Trial,
		client.EnvSocket + "=" + filepath.Join(j.store.Runtime, "job-"+j.cfg.Job[len(j.cfg.Job)-8:], "a1-r0.sock"),
	}
}

// forge appends an attempt of a run that claims to belong to a job.
func forge(t *testing.T, run, job string) {
	t.Helper()
	agg := events.Aggregate{Run: run, Trial: projections.DefaultTrial}
	end, err := home.Log.LaneEnd(t.Context(), agg)
	if err != nil {
		t.Fatal(err)
	}
	trial, err := views{home.Views()}.Trial(t.Context(), run, agg.Trial)
	if err != nil {
		t.Fatal(err)
	}
	d, err := events.NewDecision(events.Stamp{ID: store.NewID(), Source: "attacker", Time: time.Now()}, agg,
		&events.GroupStarted{Attempt: trial.Attempt + 1, Job: job, WorldSize: 1, Backend: "none"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := home.Log.Decide(t.Context(), d, end); err != nil {
		t.Fatal(err)
	}
}

// waitsForFile is the command of a worker that reports that it is up, and ends
// well when a file exists.
func waitsForFile(t *testing.T) (command []string, release func()) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "release")
	return append(shell(`echo up; until [ -e "$0" ]; do sleep 0.01; done`), path), func() {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Error(err)
		}
	}
}

// anotherStore is a store with its own directory instead of shared memory.
func anotherStore(t *testing.T) session.Store {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	if _, err := store.Init(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	st, err := store.Open(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	return storeOf(st, t.TempDir())
}

// TestForgedJob: an attempt in the log that names a job of this user that lives, of
// another run, another store, or another copy of the store, has no worker of that job
// killed.
func TestForgedJob(t *testing.T) {
	t.Parallel()
	command, release := waitsForFile(t)
	victims := map[string]*job{"another run": newJob(t, 1, command...), "another store": newJob(t, 1, command...), "another copy": newJob(t, 1, command...)}
	victims["another run"].cfg.Run += " of another name"
	victims["another store"].store = anotherStore(t)
	victims["another copy"].store = anotherStore(t)
	victims["another copy"].store.ID = home.ID
	newJob(t, 1, "/bin/true").must()
	for _, victim := range victims {
		victim.start().out.await(t, 1, "up")
		forge(t, runOf(t), victim.cfg.Job)
	}
	attacker := newJob(t, 1, "/bin/true").must()
	wantText(t, attacker.log, "its trainer is alive")
	release()
	for what, victim := range victims {
		if err := victim.wait(); err != nil {
			t.Errorf("the job of %s: %v", what, err)
		}
	}
}

// TestOnlyOrphansAreKilled looks at each part of what proves a process to be left by an
// earlier job of the run.
func TestOnlyOrphansAreKilled(t *testing.T) {
	t.Parallel()
	first := newJob(t, 1, "/bin/true").must()
	alive := filepath.Join(first.store.Runtime, "job-alive", "a1-r0.sock")
	if err := os.MkdirAll(filepath.Dir(alive), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(filepath.Dir(alive)) })
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", alive)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })

	type process struct {
		cmd  *exec.Cmd
		done chan struct{} // closed when it has ended
	}
	all := map[string]process{}
	for what, changed := range map[string]string{
		"proven":             "PROVEN=yes",
		"another run":        client.EnvRun + "=another",
		"another trial":      client.EnvTrial + "=another",
		"another store":      client.EnvStoreID + "=another",
		"no socket":          client.EnvSocket + "=",
		"a trainer is alive": client.EnvSocket + "=" + alive,
	} {
		// The test's context kills what is left at its end.
		cmd := exec.CommandContext(t.Context(), "sleep", "1000")
		name, _, _ := strings.Cut(changed, "=")
		for _, kv := range append(leftBy(first), client.EnvStoreID+"="+home.ID) {
			if !strings.HasPrefix(kv, name+"=") {
				cmd.Env = append(cmd.Env, kv)
			}
		}
		cmd.Env = append(cmd.Env, changed)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		p := process{cmd, make(chan struct{})}
		all[what] = p
		go func() {
			defer close(p.done)
			_ = cmd.Wait() // its state is how it ended
		}()
	}
	newJob(t, 1, "/bin/true").must()
	for what, p := range all {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // ends it, unless it was killed
		select {
		case <-p.done:
		case <-time.After(patience):
			t.Fatalf("%s: the process was stopped", what)
		}
		killed := p.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
		if killed != (what == "proven") {
			t.Errorf("%s: killed is %v", what, killed)
		}
	}
}
