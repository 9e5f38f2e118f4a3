package launch_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/store"
)

// bareTrainer is a trainer in a process of its own: STORE MEMORY RUN. Its worker
// and the worker's children have an empty environment; one is also in its own
// session.
var bareTrainer = role("bare trainer", func(ctx context.Context, args []string) error {
	st, err := store.Open(ctx, store.Options{Location: args[0]})
	if err != nil {
		return err
	}
	defer func() { _ = st.Close() }()
	command := append(shell(`exec env -i /bin/sh -c "$0" "$1"`),
		`sh -c "$0" & setsid sh -c "$0" & echo pid $$; wait`, `echo pid $$; exec sleep 1000`)
	cfg := config(args[2], 1, command, os.Stdout, os.Stdout)
	emit("job %s", cfg.Job)
	return launch.Run(ctx, cfg, storeOf(st, args[1]))
})

// The guard kills the ranks and their descendants, also those without a marker.
// So does a guard that replaced a dead one.
func TestKilledTrainerOfBareWorkers(t *testing.T) {
	t.Parallel()
	for name, replaced := range map[string]bool{"first guard": false, "second guard": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), bareTrainer[0], append(bareTrainer[1:], home.Location, memory, runOf(t))...)
			out := newTranscript()
			cmd.Stdout, cmd.Stderr = out, out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			job := out.await(t, 1, "job ")[0]
			var fds []int
			for _, text := range out.await(t, 3, "pid ") {
				pid, err := strconv.Atoi(text)
				if err != nil {
					t.Fatal(err)
				}
				fd, err := unix.PidfdOpen(pid, 0)
				if err != nil {
					t.Fatal(err)
				}
				fds = append(fds, fd)
			}
			wantNobody(t, job) // by the marker
			if replaced {
				if err := unix.Kill(guardOf(t, job), unix.SIGKILL); err != nil {
					t.Fatal(err)
				}
				awaitText(t, out, "guard restarted")
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // it was killed
			for i, fd := range fds {
				if err := gone(fd); err != nil {
					t.Errorf("process %d outlives its trainer: %v", i, err)
					_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
				}
				_ = unix.Close(fd)
			}
		})
	}
}

// guardOf is the PID of a job's guard.
func guardOf(t *testing.T, job string) int {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range lines {
		line, err := os.ReadFile(path)
		if err == nil && bytes.HasSuffix(line, []byte("\x00"+process.GuardCommand+"\x00"+job+"\x00")) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	t.Fatalf("job %s has no guard", job)
	return 0
}

// A guard that dies is no failure of the job.
func TestDeadGuard(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, shell(`echo up; until [ -e "$0" ]; do sleep 0.01; done`)...)
	release := filepath.Join(t.TempDir(), "release")
	j.cfg.Command = append(j.cfg.Command, release)
	j.start()
	j.out.await(t, 1, "up")
	if err := unix.Kill(guardOf(t, j.cfg.Job), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	awaitText(t, j.log, "guard restarted")
	wantText(t, j.log, "guard died")
	guardOf(t, j.cfg.Job)
	if err := os.WriteFile(release, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := j.wait(); err != nil {
		t.Error(err)
	}
}

// deaf reports whether a process ignores the signals that schedulers send to all processes of a job.
func deaf(t *testing.T, pid int) bool {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "SigIgn:\t")
	ignored, err := strconv.ParseUint(strings.SplitN(rest, "\n", 2)[0], 16, 64)
	if err != nil {
		t.Fatalf("%v:\n%s", err, status)
	}
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT} {
		if ignored&(1<<(sig-1)) == 0 {
			return false
		}
	}
	return true
}

// The guard ignores the signals that schedulers send to all processes of a job before the first
// rank runs, although it takes a while to start. A Go program does not block them until then: its runtime
// unblocks them.
func TestGuardIsDeafWhenRanksRun(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, shell(`echo up; until [ -e "$0" ]; do sleep 0.01; done`)...)
	release := filepath.Join(t.TempDir(), "release")
	j.cfg.Command, j.cfg.Job = append(j.cfg.Command, release), slowGuard+j.cfg.Job
	j.start()
	j.out.await(t, 1, "up")
	if !deaf(t, guardOf(t, j.cfg.Job)) {
		t.Error("a rank runs, and a signal to all processes would end the guard")
	}
	if err := os.WriteFile(release, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := j.wait(); err != nil {
		t.Error(err)
	}
}

// Before a job's first attempt begins, it kills the remains of earlier jobs, in
// case their guard was killed with their trainer. A live job of another store
// that the log calls an earlier job is left alone.
func TestEarlierJob(t *testing.T) {
	t.Parallel()
	first := newJob(t, 1, "/bin/true").must()
	start := func(store string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), "sleep", "1000")
		cmd.Env = append(leftBy(first), client.EnvStoreID+"="+store)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if cmd.Process.Kill() == nil {
				_ = cmd.Wait() // it was killed
			}
		})
		return cmd
	}
	left, other := start(home.ID), start("another store")
	j := newJob(t, 1, append(shell(`grep -q sleep /proc/$0/cmdline || echo alone; grep -q sleep /proc/$1/cmdline && echo spared`),
		strconv.Itoa(left.Process.Pid), strconv.Itoa(other.Process.Pid))...)
	j.cfg.Run = first.cfg.Run
	j.must()
	wantText(t, j.out, "alone\n")
	wantText(t, j.out, "spared\n")
}

// Between attempts, a process without a marker is found by its group.
func TestRestartWithoutBareProcesses(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, append(shell(`
		if [ $CKPTSTORE_ATTEMPT = 1 ]; then
			env -i sleep 1000 &
			echo $! > "$0"
			exit 1
		fi
		grep -q sleep /proc/$(cat "$0")/cmdline || echo alone`), filepath.Join(t.TempDir(), "pid"))...)
	j.cfg.MaxRestarts = 1
	j.must()
	wantText(t, j.out, "alone\n")
}
