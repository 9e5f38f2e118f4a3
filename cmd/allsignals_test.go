package cmd_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// training starts a Python worker with the package: testdata/signals/train.py, which
// describes its modes.
func training(t *testing.T, modes ...string) string {
	t.Helper()
	script, err := filepath.Abs(filepath.Join("testdata", "signals", "train.py"))
	if err != nil {
		t.Fatal(err)
	}
	sources, err := filepath.Abs(filepath.Join("..", "python", "src"))
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("exec python3 -B %s %s %s", script, sources, strings.Join(modes, " "))
}

// tree returns every process of a job as a scheduler sees it: the trainer and its
// descendants in any group and session, including the guard.
func (j *trainer) tree() []int {
	j.t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		j.t.Fatal(err)
	}
	children := map[int][]int{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		if err != nil {
			continue // it has just ended
		}
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		parent, err := strconv.Atoi(string(fields[1]))
		if err != nil {
			j.t.Fatal(err)
		}
		children[parent] = append(children[parent], pid)
	}
	all := []int{j.Process.Pid}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	return all
}

// signalAll sends signals to every process of the job, as Slurm does.
func (j *trainer) signalAll(workersFirst bool, signals ...syscall.Signal) {
	j.t.Helper()
	all := j.tree()
	if len(all) < 3 {
		j.t.Fatalf("only the processes %v", all)
	}
	if workersFirst {
		slices.Reverse(all)
	}
	for _, sig := range signals {
		for _, pid := range all {
			_ = syscall.Kill(pid, sig) // an earlier signal may have ended it
		}
	}
}

// count returns how often the workers have printed a text.
func (j *trainer) count(text string) int { return strings.Count(j.out.String(), text) }

// trained returns the step up to which all ranks have trained.
func (j *trainer) trained(ranks int) int {
	j.t.Helper()
	step := 0
	for rank := range ranks {
		_, rest, _ := strings.Cut(j.out.String(), fmt.Sprintf("[rank%d] trained ", rank))
		var at int
		if _, err := fmt.Sscan(rest, &at); err != nil || rank > 0 && at != step {
			j.t.Fatalf("rank %d has trained to %d, %v\n%s%s", rank, at, err, j.out.String(), j.err.String())
		}
		step = at
	}
	return step
}

// ready waits until two ranks train.
func (j *trainer) ready() *trainer {
	j.t.Helper()
	j.appears("ready0")
	j.appears("ready1")
	return j
}

// A scheduler signals every process of a job. The ranks agree on a step, save it and
// end. Child processes without the library end by the signal as usual. The next job
// continues at that step: no step is lost.
func TestEveryProcessIsSignalled(t *testing.T) {
	t.Parallel()
	const cont, term, usr1 = syscall.SIGCONT, syscall.SIGTERM, syscall.SIGUSR1
	for _, c := range []struct {
		name         string
		modes        []string
		workersFirst bool
		first        []syscall.Signal
		saving       []syscall.Signal // while the ranks save
		childrenGet  syscall.Signal
	}{
		{"warning", []string{"children"}, false, []syscall.Signal{usr1}, nil, usr1},
		{"preemption", []string{"children"}, true, []syscall.Signal{cont, term}, nil, term},
		{"warning, then preemption", []string{"children", "slow"}, true, []syscall.Signal{usr1}, []syscall.Signal{usr1, cont, term}, usr1},
		{"connected by a thread", []string{"thread"}, true, []syscall.Signal{usr1, term}, nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			flags := []string{"--nproc=2", "--grace=1h", "--preempt-grace=1h"}
			j := startTrainer(t, dir, nil, training(t, c.modes...), flags...).ready()
			j.signalAll(c.workersFirst, c.first...)
			if c.saving != nil {
				j.appears("saving0")
				j.signalAll(c.workersFirst, c.saving...)
			}
			j.ends(75, "is committed; start the run again to continue from there")
			step := j.trained(2)
			if !strings.Contains(j.err.String(), fmt.Sprintf("step-%d.a1 is committed", step)) {
				t.Errorf("trained to step %d\n%s", step, j.err.String())
			}
			if strings.Contains(j.err.String(), "guard died") {
				t.Errorf("the signals have ended the guard:\n%s", j.err.String())
			}
			if c.childrenGet != 0 && j.count(fmt.Sprintf("children ended by %[1]d %[1]d %[1]d\n", c.childrenGet)) != 2 || j.count("default\n") != j.count("] child ") {
				t.Errorf("the children:\n%s", j.out.String())
			}
			for _, name := range []string{"ready0", "ready1"} {
				if err := os.Remove(filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			}
			next := startTrainer(t, dir, nil, training(t, "thread"), flags...).ready()
			if next.count(fmt.Sprintf("] starts at %d\n", step)) != 2 {
				t.Errorf("%d steps were trained; the next job\n%s", step, next.out.String())
			}
			next.signalAll(false, usr1, term)
			next.ends(75)
		})
	}
}

// A worker in Go holds signals too.
func TestEveryProcessOfGoWorkersIsSignalled(t *testing.T) {
	t.Parallel()
	for _, workersFirst := range []bool{false, true} {
		dir := t.TempDir()
		const worker = "touch ready$RANK; exec trainer demo-worker --steps=1000000 --save-every=1000000"
		for attempt := 1; attempt <= 2; attempt++ {
			j := startTrainer(t, dir, nil, worker, "--nproc=2", "--grace=1h", "--preempt-grace=1h").ready()
			j.reports(attempt)
			j.signalAll(workersFirst, syscall.SIGUSR1, syscall.SIGTERM)
			j.ends(75, fmt.Sprintf(".a%d is committed", attempt))
			for _, name := range []string{"ready0", "ready1"} {
				if err := os.Remove(filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// reports waits until an attempt of the run has reported.
func (j *trainer) reports(attempt int) {
	j.t.Helper()
	deadline := time.Now().Add(patience)
	for tick := time.Tick(50 * time.Millisecond); ; <-tick {
		cmd := exec.CommandContext(j.t.Context(), "ckptstore", "events", "--store", "ckpts", "-o", "jsonl")
		cmd.Dir = j.dir
		out, err := cmd.Output()
		if err == nil && bytes.Contains(out, []byte(`report.metrics`)) && bytes.Contains(out[max(0, bytes.LastIndex(out, []byte("group.started"))):], []byte("report.metrics")) && bytes.Count(out, []byte("group.started")) >= attempt {
			return
		}
		if time.Now().After(deadline) {
			j.t.Fatalf("no report of attempt %d: %v\n%s", attempt, err, j.err.String())
		}
	}
}

// A signal to one worker alone asks the whole job to stop.
func TestOneWorkerIsSignalled(t *testing.T) {
	t.Parallel()
	j := startTrainer(t, t.TempDir(), nil, training(t, "alone"), "--nproc=2", "--grace=1h", "--preempt-grace=1h")
	j.ends(75, "preempted (rank 1 received SIGTERM): step-")
	if step := j.trained(2); step < 20 {
		t.Errorf("stopped at step %d, before the signal", step)
	}
}

// The trainer's own SIGTERM ends workers that hold signals as fast as others: none of
// these jobs may wait for the grace period.
func TestTrainerEndsHoldingWorkers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		modes []string
		flags []string
		all   []syscall.Signal // to every process, when the ranks are ready
		alone syscall.Signal   // to the trainer
		code  int
		says  string
	}{
		{"one rank fails", []string{"fails"}, []string{"--max-restarts=0"}, nil, 0, 1, "rank 1 exited with code 9"},
		{"a rank fails, the other is in C", []string{"fails", "stuck"}, []string{"--max-restarts=0"}, nil, 0, 1, "rank 1 exited with code 9"},
		{"never reports", []string{"silent"}, []string{"--preempt-grace=1h"}, []syscall.Signal{syscall.SIGUSR1}, 0, 143, "sending SIGTERM"},
		{"never speaks", []string{"plain"}, []string{"--preempt-grace=1h"}, []syscall.Signal{syscall.SIGTERM}, 0, 143, "no checkpoint was committed"},
		{"does not stop", []string{"deaf"}, []string{"--preempt-grace=1s"}, []syscall.Signal{syscall.SIGUSR1}, 0, 143, "did not end when asked"},
		{"is interrupted", []string{"deaf"}, []string{"--preempt-grace=1h"}, nil, syscall.SIGINT, 130, "told to stop by SIGINT"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			j := startTrainer(t, t.TempDir(), nil, training(t, c.modes...), append(c.flags, "--nproc=2", "--grace=1h")...)
			if c.code != 1 {
				j.ready()
			}
			if c.all != nil {
				j.signalAll(true, c.all...)
			}
			if c.alone != 0 {
				j.send(c.alone)
			}
			j.ends(c.code, c.says)
			if strings.Contains(j.err.String(), "may hold SIGTERM back") {
				t.Errorf("the workers did not confirm in time:\n%s", j.err.String())
			}
		})
	}
}

// A script's own handlers win, whether installed before or after it connects.
func TestOwnHandlersWin(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"before", "after"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			// A scheduler's signal: the handler runs at once.
			j := startTrainer(t, t.TempDir(), nil, training(t, mode), "--nproc=2", "--grace=1h", "--preempt-grace=1h").ready()
			j.signalAll(true, syscall.SIGTERM)
			j.ends(143)
			// The trainer's signal, which ends the group.
			k := startTrainer(t, t.TempDir(), nil, training(t, mode, "deaf"), "--nproc=2", "--grace=1h", "--preempt-grace=1s").ready()
			k.send(syscall.SIGUSR1)
			k.ends(143)
			for _, job := range []*trainer{j, k} {
				if job.count("own handler SIGTERM\n") != 2 {
					t.Errorf("the handlers did not run:\n%s%s", job.out.String(), job.err.String())
				}
			}
		})
	}
}
