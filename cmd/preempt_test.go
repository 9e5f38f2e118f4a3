package cmd_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// trainer is a `trainer run` in a directory of its own.
type trainer struct {
	*exec.Cmd
	t        *testing.T
	dir      string
	out, err transcript
	done     chan struct{}
}

// transcript collects what a process writes, and can be read meanwhile.
type transcript struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (o *transcript) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

// String returns the output so far.
func (o *transcript) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// startTrainer starts a job of run "a" in dir, with a shell script as its worker.
func startTrainer(t *testing.T, dir string, env []string, script string, flags ...string) *trainer {
	t.Helper()
	args := append([]string{"run", "-q", "--store", "ckpts", "--name", "a"}, flags...)
	j := &trainer{Cmd: exec.CommandContext(t.Context(), "trainer", append(args, "--", "sh", "-c", script)...), t: t, dir: dir, done: make(chan struct{})}
	j.Dir, j.Stdout, j.Stderr = dir, &j.out, &j.err
	j.Env = append(os.Environ(), env...)
	if err := j.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = j.Wait(); close(j.done) }()
	return j
}

// patience is how long a test waits for an expected event.
const patience = 60 * time.Second

// prints waits for a text on standard error.
func (j *trainer) prints(text string) {
	j.t.Helper()
	deadline := time.Now().Add(patience)
	for tick := time.Tick(10 * time.Millisecond); !strings.Contains(j.err.String(), text); <-tick {
		if time.Now().After(deadline) {
			j.t.Fatalf("%q did not come; there is:\n%s", text, j.err.String())
		}
	}
}

// appears waits for a file in the trainer's directory.
func (j *trainer) appears(name string) {
	j.t.Helper()
	deadline := time.Now().Add(patience)
	for tick := time.Tick(10 * time.Millisecond); ; <-tick {
		if _, err := os.Stat(filepath.Join(j.dir, name)); err == nil {
			return
		}
		if time.Now().After(deadline) {
			j.t.Fatalf("no file %s after %v", name, patience)
		}
	}
}

// ends waits for the trainer's end, and checks its exit code and its standard error.
func (j *trainer) ends(code int, says ...string) {
	j.t.Helper()
	select {
	case <-j.done:
	case <-time.After(patience):
		j.t.Fatalf("the trainer does not end")
	}
	if got := j.ProcessState.ExitCode(); got != code {
		j.t.Errorf("exit code %d, want %d\n%s%s", got, code, j.out.String(), j.err.String())
	}
	for _, text := range says {
		if !strings.Contains(j.err.String(), text) {
			j.t.Errorf("%q is not in:\n%s", text, j.err.String())
		}
	}
}

func (j *trainer) send(sig syscall.Signal) {
	j.t.Helper()
	if err := j.Process.Signal(sig); err != nil {
		j.t.Fatal(err)
	}
}

// lastJobEnd returns the newest job.ended in the log of a trainer's store.
func lastJobEnd(t *testing.T, dir string) (code int, reason string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "ckptstore", "events", "--store", "ckpts", "-o", "jsonl")
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for line := range bytes.Lines(out) {
		var e struct {
			Kind string
			Type string
			Data struct {
				ExitCode int `json:"exit_code"`
				Reason   string
			}
		}
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(e.Kind+e.Type, "job.ended") {
			found, code, reason = true, e.Data.ExitCode, e.Data.Reason
		}
	}
	if !found {
		t.Fatalf("no job.ended in:\n%s", out)
	}
	return code, reason
}

// pagePath is the Python client that these scripts use.
func pagePath(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("..", "docs", "reference"))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// pythonWorker trains until it gets a stop request, then saves that step.
const pythonWorker = `exec python3 -B -c '
import sys; sys.path.insert(0, sys.argv[1])
import protocol_client as p
c, step = p.Client(), 0
while True:
    step += 1
    stop = c.report(step, {"loss": 1 / step})
    if step == 3: open(f"ready{c.rank}", "w").close()
    if stop:
        p_state = p.state_of(c.rank, c.world, step)
        c.wait(c.save(step, p_state), "committed")
        print(f"{stop} at {step}", flush=True)
        break
' "$DOCS"`

// A scheduler that takes the machine away sends SIGTERM or SIGUSR1: the ranks agree on a
// step, save it and end, with the exit code of a preemption.
func TestPreemptedBySignal(t *testing.T) {
	t.Parallel()
	for sig, name := range map[syscall.Signal]string{syscall.SIGTERM: "SIGTERM", syscall.SIGUSR1: "SIGUSR1"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			j := startTrainer(t, dir, []string{"DOCS=" + pagePath(t)}, pythonWorker, "--nproc=2")
			j.appears("ready0")
			j.appears("ready1")
			j.send(sig)
			j.ends(75, "trainer: preempted (told to stop by "+name+"): step-", "is committed; start the run again to continue from there")
			var at [2]string
			for rank := range at {
				_, rest, _ := strings.Cut(j.out.String(), fmt.Sprintf("[rank%d] preempt at ", rank))
				at[rank], _, _ = strings.Cut(rest, "\n")
			}
			if at[0] == "" || at[0] != at[1] || !strings.Contains(j.err.String(), "step-"+at[0]+".a1 is committed") {
				t.Errorf("the ranks got the request at %q\n%s%s", at, j.out.String(), j.err.String())
			}
			if code, reason := lastJobEnd(t, dir); code != 75 || !strings.Contains(reason, name) {
				t.Errorf("job.ended: %d %q", code, reason)
			}
		})
	}
}

// Before the scheduler's time limit, the trainer preempts the job in time.
func TestPreemptedByWalltime(t *testing.T) {
	t.Parallel()
	for _, walltime := range []string{"70s", "auto"} {
		t.Run(walltime, func(t *testing.T) {
			t.Parallel()
			// Known when the trainer starts: this test may have waited for others.
			slurm := fmt.Sprintf("SLURM_JOB_END_TIME=%d", time.Now().Unix()+70)
			j := startTrainer(t, t.TempDir(), []string{"DOCS=" + pagePath(t), slurm}, pythonWorker, "--nproc=2", "--walltime", walltime, "--preempt-grace=50s", "--grace=10s")
			j.ends(75, "trainer: preempted (the time of the job ends at ")
		})
	}
	j := startTrainer(t, t.TempDir(), []string{"SLURM_JOB_END_TIME=", "SLURM_JOB_ID="}, "true", "--walltime=auto")
	j.ends(64, "neither $SLURM_JOB_END_TIME nor $SLURM_JOB_ID is set")
}

// A second SIGTERM, or a SIGINT, does not wait for the workers to save. A SIGTERM after
// SIGUSR1 counts as the first.
func TestSecondSignalStops(t *testing.T) {
	t.Parallel()
	const deaf = `exec python3 -B -c '
import signal, sys, time; sys.path.insert(0, sys.argv[1])
import protocol_client as p
c = p.Client()
c.report(1, {})
signal.signal(signal.SIGTERM, lambda *_: (open("told", "w").close(), sys.exit(0)))
open("ready", "w").close()
while True: time.sleep(0.01)
' "$DOCS"`
	for sig, code := range map[syscall.Signal]int{syscall.SIGTERM: 143, syscall.SIGINT: 130} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			t.Parallel()
			j := startTrainer(t, t.TempDir(), []string{"DOCS=" + pagePath(t)}, deaf, "--preempt-grace=1h")
			j.appears("ready")
			j.send(syscall.SIGUSR1)
			j.prints("job asked to end")
			j.send(syscall.SIGUSR1) // schedulers repeat it
			if sig == syscall.SIGTERM {
				j.send(sig)
				<-time.After(100 * time.Millisecond) // the kernel merges pending signals of one kind
			}
			j.send(sig)
			j.ends(code, "told to stop by")
			j.appears("told")
		})
	}
}

// If the trainer's parent blocks signals, its workers still do not.
func TestWorkersBlockNoSignals(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "python3", "-c", `
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP})
os.execvp("trainer", ["trainer", "run", "-q", "--store", "ckpts", "--name", "a", "--", "grep", "SigBlk", "/proc/self/status"])`)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if fields := strings.Fields(string(out)); err != nil || len(fields) != 2 || strings.Trim(fields[1], "0") != "" {
		t.Errorf("%v: a worker blocks signals: %q", err, out)
	}
}
