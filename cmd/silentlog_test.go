//go:build outlive

package cmd_test

import (
	"bytes"
	"encoding/json"
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

// Pauses of the process that serves the log: one of more than half the term of a lease,
// and one longer than the term. CKPTSTORE_TEST_PAUSE, such as 60s, replaces both.
var (
	shortPause = pause(12 * time.Second)
	longPause  = pause(20 * time.Second)
)

func pause(usual time.Duration) time.Duration {
	text := os.Getenv("CKPTSTORE_TEST_PAUSE")
	if text == "" {
		return usual
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		panic(fmt.Sprintf("CKPTSTORE_TEST_PAUSE: %v", err))
	}
	return d
}

// outliving is a store with three jobs that train until they get a stop request.
type outliving struct {
	t    *testing.T
	dir  string // of the store
	jobs []*outlivingJob
}

type outlivingJob struct {
	*exec.Cmd
	run  string
	out  transcript
	done chan struct{}
}

func outlive(t *testing.T) *outliving {
	return &outliving{t: t, dir: filepath.Join(t.TempDir(), "store")}
}

// start starts a job of a run. The job must not fail for any reason.
func (o *outliving) start(run string, flags ...string) *outlivingJob {
	o.t.Helper()
	j := &outlivingJob{run: run, done: make(chan struct{})}
	args := append([]string{
		"run", "--store", o.dir, "--name", run, "--nproc=2",
		"--max-restarts=0", "--max-infra-restarts=0", "--wait=30s", "--preempt-grace=40s",
	}, flags...)
	// A stopped trainer serves no collective: the workers' own deadline must be longer
	// than any pause.
	j.Cmd = exec.CommandContext(o.t.Context(), "trainer", append(args,
		"--", "trainer", "demo-worker", "--steps=100000000", "--save-every=50", "--collective-timeout=1h")...)
	j.Stdout, j.Stderr = &j.out, &j.out
	if err := j.Start(); err != nil {
		o.t.Fatal(err)
	}
	go func() { _ = j.Wait(); close(j.done) }()
	o.t.Cleanup(func() {
		_ = j.Process.Signal(syscall.SIGCONT)
		_ = j.Process.Kill()
		<-j.done
	})
	o.jobs = append(o.jobs, j)
	return j
}

// commits waits until each job has committed this many more checkpoints.
func (o *outliving) commits(more int) {
	o.t.Helper()
	const text = "checkpoint committed"
	want := make([]int, len(o.jobs))
	for i, j := range o.jobs {
		want[i] = strings.Count(j.out.String(), text) + more
	}
	deadline := time.Now().Add(3*patience + longPause)
	for tick := time.Tick(50 * time.Millisecond); ; <-tick {
		if !slices.ContainsFunc(o.jobs, func(j *outlivingJob) bool {
			return strings.Count(j.out.String(), text) < want[slices.Index(o.jobs, j)]
		}) {
			return
		}
		for _, j := range o.jobs {
			select {
			case <-j.done:
				o.t.Fatalf("job of %s ended with code %d:\n%s", j.run, j.ProcessState.ExitCode(), j.out.String())
			default:
			}
		}
		if time.Now().After(deadline) {
			o.t.Fatalf("not %d checkpoints more of each job", more)
		}
	}
}

// second starts a second job of each run, which must be refused.
func (o *outliving) second() {
	o.t.Helper()
	for _, j := range o.jobs {
		cmd := exec.CommandContext(o.t.Context(), "trainer", "run", "-q", "--store", o.dir, "--name", j.run, "--wait=60s", "--", "true")
		text, err := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != 5 || !strings.Contains(string(text), "is being run by job") {
			o.t.Errorf("a second job of %s: %v\n%s", j.run, err, text)
		}
	}
}

// end preempts all jobs and checks that the log has, for each, one attempt, every step,
// and the end of every save.
func (o *outliving) end() {
	o.t.Helper()
	began := time.Now()
	for _, j := range o.jobs {
		if err := j.Process.Signal(syscall.SIGTERM); err != nil {
			o.t.Fatal(err)
		}
	}
	for _, j := range o.jobs {
		select {
		case <-j.done:
		case <-time.After(3 * patience):
			o.t.Fatalf("job of %s does not end:\n%s", j.run, j.out.String())
		}
		if code := j.ProcessState.ExitCode(); code != 75 {
			o.t.Errorf("job of %s ended with code %d:\n%s", j.run, code, j.out.String())
		}
		o.t.Logf("job of %s had ended %v after the signal", j.run, time.Since(began).Round(time.Millisecond))
	}
	for _, j := range o.jobs {
		o.history(j.run)
	}
}

// history checks that the log of a run is complete.
func (o *outliving) history(run string) {
	o.t.Helper()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(o.t.Context(), "ckptstore", "events", run, "--store", o.dir, "-o", "jsonl")
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		o.t.Fatalf("%v\n%s", err, stderr.String())
	}
	open, step, committed, aborted := map[string]bool{}, int64(0), 0, 0
	seen := map[string]bool{}
	for line := range bytes.Lines(out) {
		var e struct {
			ID, Kind, Type string
			Data           struct {
				Attempt    int
				Step       int64
				Checkpoint string
				Reason     string
			}
		}
		if err := json.Unmarshal(line, &e); err != nil {
			o.t.Fatal(err)
		}
		if seen[e.ID] { // a fact that was resent after minutes may be in the log twice
			continue
		}
		seen[e.ID] = true
		kind, d := e.Kind+e.Type, e.Data
		switch {
		case strings.Contains(kind, "group.started") && d.Attempt != 1:
			o.t.Errorf("%s: attempt %d", run, d.Attempt)
		case strings.Contains(kind, "report.metrics"):
			if step++; d.Step != step {
				o.t.Fatalf("%s: step %d is followed by step %d", run, step-1, d.Step)
			}
		case strings.Contains(kind, "checkpoint.begun"):
			open[d.Checkpoint] = true
		case strings.Contains(kind, "checkpoint.committed"):
			delete(open, d.Checkpoint)
			committed++
		case strings.Contains(kind, "checkpoint.aborted"):
			if delete(open, d.Checkpoint); d.Reason == "" {
				o.t.Errorf("%s: %s was aborted without a reason", run, d.Checkpoint)
			}
			aborted++
		}
	}
	if len(open) > 0 || step == 0 || committed == 0 {
		o.t.Errorf("%s: %d steps, %d checkpoints committed, %v neither committed nor aborted", run, step, committed, open)
	}
	o.t.Logf("%s: %d steps, %d checkpoints committed, %d aborted", run, step, committed, aborted)
}

// serve starts an owner of the store that runs no job.
func (o *outliving) serve() *exec.Cmd {
	o.t.Helper()
	if _, err := os.Stat(filepath.Join(o.dir, "store.json")); err != nil {
		if out, err := exec.CommandContext(o.t.Context(), "ckptstore", "init", "--store", o.dir).CombinedOutput(); err != nil {
			o.t.Fatalf("%v\n%s", err, out)
		}
	}
	cmd := exec.CommandContext(o.t.Context(), "ckptstore", "serve", "--store", o.dir)
	if err := cmd.Start(); err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGCONT)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	o.owns(cmd)
	return cmd
}

// owns waits until a process owns the store.
func (o *outliving) owns(cmd *exec.Cmd) {
	o.t.Helper()
	deadline := time.Now().Add(patience)
	for tick := time.Tick(20 * time.Millisecond); ; <-tick {
		var card struct{ PID int }
		text, err := os.ReadFile(filepath.Join(o.dir, "owner.json"))
		if err == nil && json.Unmarshal(text, &card) == nil && card.PID == cmd.Process.Pid {
			return
		}
		if time.Now().After(deadline) {
			o.t.Fatalf("process %d does not own the store", cmd.Process.Pid)
		}
	}
}

// stop stops a process for a while.
func (o *outliving) stop(cmd *exec.Cmd, d time.Duration) {
	o.t.Helper()
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		o.t.Fatal(err)
	}
	pause := time.NewTimer(d)
	<-pause.C
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		o.t.Fatal(err)
	}
}

// TestJobsOutlivePausedOwner: the process that owns the store is stopped (SIGSTOP). No
// job ends, no step or save is lost, and no run can be run twice.
func TestJobsOutlivePausedOwner(t *testing.T) {
	t.Parallel()
	o := outlive(t)
	owner := o.serve()
	for i := range 3 {
		o.start(fmt.Sprint("job-", i))
	}
	o.commits(2)
	for _, d := range []time.Duration{shortPause, longPause} {
		o.stop(owner, d)
		o.second()
		o.commits(2)
	}
	o.end()
}

// TestJobsOutlivePausedTrainer: the same with a trainer as the owner. The time for which
// it was stopped does not count against ranks that wait for each other, even if it is
// longer than their time limit.
func TestJobsOutlivePausedTrainer(t *testing.T) {
	t.Parallel()
	o := outlive(t)
	first := o.start("job-0", fmt.Sprint("--collective-timeout=", longPause-time.Second))
	o.owns(first.Cmd)
	o.start("job-1")
	o.start("job-2")
	o.commits(2)
	o.stop(first.Cmd, longPause)
	o.second()
	o.commits(2)
	o.end()
}

// TestJobsOutliveSlowSync: the owner is a trainer, whose threads wait for syncs that take
// as long as a pause.
func TestJobsOutliveSlowSync(t *testing.T) {
	t.Parallel()
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Fatalf("this test slows the disk down with strace; install it, such as with `apt-get install strace`: %v", err)
	}
	o := outlive(t)
	first := o.start("job-0")
	o.owns(first.Cmd)
	o.start("job-1")
	o.start("job-2")
	o.commits(2)
	trace := filepath.Join(t.TempDir(), "trace")
	slow := exec.CommandContext(t.Context(), strace, "-f", "-qq", "-o", trace, "-p", strconv.Itoa(first.Process.Pid),
		"-e", "trace=fsync,fdatasync", "-e", fmt.Sprintf("inject=fsync,fdatasync:delay_enter=%d:when=1", shortPause.Microseconds()))
	var said bytes.Buffer
	slow.Stderr = &said
	if err := slow.Start(); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(2*patience + shortPause)
	for tick := time.Tick(50 * time.Millisecond); ; <-tick {
		// strace prints a line at the end of its call.
		if text, err := os.ReadFile(trace); err == nil && bytes.Contains(text, []byte("(DELAYED)")) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("no sync was delayed: %s", said.String())
		}
	}
	if err := slow.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = slow.Wait() // by the signal
	o.second()
	o.commits(2)
	o.end()
}
