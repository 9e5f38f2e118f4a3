package cmd_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestJobsJSON: the job commands print the members that testdata/schema records, for a
// running, an ended and a lost job.
func TestJobsJSON(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	store := "--store=" + filepath.Join(dir, "ckpts")
	output(t, 0, "trainer", "run", store, "--name=a", "-q", "--nproc=2", "--set=lr=1", "--",
		"sh", "-c", `echo hello; exec trainer demo-worker --steps=4 --save-every=2`)
	schema(t, "nodes", output(t, 0, "ckptstore", "nodes", "a", "--json", store))
	schema(t, "fork", output(t, 0, "ckptstore", "fork", "a@step-2", "b", "--set=lr=2", "--json", store))
	output(t, 0, "trainer", "run", store, "--name=b", "-q", "--", "trainer", "demo-worker", "--steps=4", "--save-every=2")
	schema(t, "continue-dry-run", output(t, 0, "ckptstore", "continue", "b", "--dry-run", "--json", store))
	lines := strings.Split(strings.TrimSpace(output(t, 0, "ckptstore", "logs", "a", "--json", store)), "\n")
	if len(lines) != 2 {
		t.Errorf("logs: %q", lines)
	}
	schema(t, "logs", lines[0])

	started := filepath.Join(dir, "started")
	cmd := exec.CommandContext(t.Context(), "trainer", "run", store, "--name=c", "-q", "--", "sh", "-c", `touch "$0"; exec sleep 1000`, started)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { _, err := os.Stat(started); return err == nil })
	var stopped struct {
		PID int
		Job string
	}
	text := output(t, 0, "ckptstore", "stop", "c", "--json", store)
	schema(t, "stop", text)
	if decode(t, text, &stopped); stopped.PID != cmd.Process.Pid || stopped.Job == "" {
		t.Errorf("stop prints %+v for process %d", stopped, cmd.Process.Pid)
	}
	_ = cmd.Process.Kill() // it may have obeyed
	_ = cmd.Wait()
	schema(t, "jobs", output(t, 0, "ckptstore", "jobs", "b", "--json", store))
	var jobs struct {
		Jobs []struct{ Run, State, From, Head, Parent string }
	}
	decode(t, output(t, 0, "ckptstore", "jobs", "--json", store), &jobs)
	if len(jobs.Jobs) != 3 || jobs.Jobs[0].Run != "c" || jobs.Jobs[0].State == "running" {
		t.Errorf("jobs: %+v", jobs.Jobs)
	}
	if b := jobs.Jobs[1]; b.State != "ended" || b.From != "a@step-2.a1" || b.Parent != "a@step-2.a1" || b.Head != "step-4.a1" {
		t.Errorf("the forked run: %+v", b)
	}
}

// await polls until a condition holds.
func await(t *testing.T, so func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !so() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("the condition does not hold within a minute")
		}
	}
}
