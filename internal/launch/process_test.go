package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

func shell(script string) []string { return []string{"/bin/sh", "-c", script} }

var killsItself = workerRole("kills itself", func(ctx context.Context, c *client.Client) error {
	if c.Attempt == 2 {
		emit("restart %s resumes %s", os.Getenv("TORCHELASTIC_RESTART_COUNT"), c.Resume)
		return load(ctx, c, "", 2)
	}
	for step := range int64(3) {
		if err := save(ctx, c, step); err != nil {
			return err
		}
	}
	if c.Rank == 0 {
		return untilTerm(ctx)
	}
	return errors.Join(syscall.Kill(syscall.Getpid(), syscall.SIGKILL), errors.New("alive after SIGKILL"))
})

// A dead rank ends the group, and the next attempt resumes from the last
// committed checkpoint, saying which and why.
func TestRestart(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, killsItself...)
	j.cfg.MaxRestarts = 1
	j.must()
	wantText(t, j.out, "[rank0] restart 1 resumes step-2.a1", "[rank1] restart 1 resumes step-2.a1")
	wantText(t, j.log, `level=WARN msg="restarting the group" cause="rank 1 was killed by SIGKILL" from=step-2.a1`)
	stopped := bodiesOf[events.GroupStopped](t, runOf(t))
	if len(stopped) != 2 || stopped[0].Reason != "rank 1 was killed by SIGKILL" || stopped[1].Reason != "all workers ended" {
		t.Errorf("group.stopped: %+v", stopped)
	}
	exits := bodiesOf[events.WorkerExited](t, runOf(t))
	if at := slices.IndexFunc(exits, func(e *events.WorkerExited) bool { return e.Signal == "SIGKILL" }); at < 0 || exits[at].Rank != 1 || exits[at].Code != 137 {
		t.Errorf("group.worker_exited: %+v", exits)
	}
}

// The failure budget counts failures; the error has the root cause and the
// last lines of that rank's output.
func TestBudget(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, shell(`for i in $(seq 30); do echo line $i; done; echo $CKPTSTORE_ATTEMPT >&2; exit 7`)...)
	j.cfg.MaxRestarts = 2
	failed := j.fails()
	if failed.Attempt != 3 || failed.Restarts != 2 || failed.Rank != 0 || failed.Cause != "rank 0 exited with code 7" {
		t.Errorf("%+v", failed)
	}
	tail := strings.Join(failed.Tail, "")
	if len(failed.Tail) != 20 || !strings.Contains(tail, "line 30\n") || !strings.Contains(tail, "3\n") || strings.Contains(tail, "line 9\n") {
		t.Errorf("tail %q", failed.Tail)
	}
	if got := one[events.TrialErrored](t, runOf(t)); got.Attempt != 3 || got.Message != failed.Cause {
		t.Errorf("trial.errored: %+v", got)
	}
	if got := one[events.JobEnded](t, runOf(t)); got.ExitCode == 0 || got.Reason == "" {
		t.Errorf("job.ended: %+v", got)
	}
	// A job of the same name has a budget of its own and continues to count
	// attempts.
	again := newJob(t, 1, shell(`echo $CKPTSTORE_ATTEMPT $TORCHELASTIC_RESTART_COUNT`)...).must()
	wantText(t, again.out, "4 0\n")
}

var ignoresTerm = workerRole("ignores SIGTERM", func(ctx context.Context, c *client.Client) error {
	if c.Rank == 1 {
		signal.Ignore(syscall.SIGTERM)
	}
	if err := meet(ctx, c); err != nil || c.Rank == 0 {
		return errors.Join(err, errors.New("a bug"))
	}
	<-ctx.Done()
	return ctx.Err()
})

// A worker that ignores SIGTERM is killed after the grace.
func TestIgnoredTerm(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, ignoresTerm...)
	j.cfg.Grace = shortly
	if failed := j.fails(); failed.Rank != 0 || !strings.HasPrefix(failed.Cause, "rank 0 exited with code 1") {
		t.Errorf("%+v", failed)
	}
	wantText(t, j.log, "workers ignore SIGTERM and are killed")
	for _, e := range bodiesOf[events.WorkerExited](t, runOf(t)) {
		if e.Rank == 1 && e.Signal != "SIGKILL" {
			t.Errorf("rank 1: %+v", e)
		}
	}
	wantNobody(t, j.cfg.Job)
}

// hasFamily starts processes of the same group and of another session, whose
// output is that of the worker.
var hasFamily = role("has a family", func(ctx context.Context, args []string) error {
	for _, attr := range []*syscall.SysProcAttr{{}, {Setpgid: true}, {Setsid: true}} {
		child := exec.Command("/bin/sh", "-c", "trap '' TERM HUP; sleep 1000 & echo up; exec sleep 1000")
		child.Stdout, child.SysProcAttr = os.Stdout, attr
		if err := child.Start(); err != nil {
			return err
		}
		emit("family %d", child.Process.Pid)
	}
	emit("ready %d", os.Getpid())
	if len(args) > 0 {
		<-ctx.Done() // SIGTERM ends it
	}
	return nil
})

// No descendant of a worker outlives its attempt, in whatever group or session it
// is, even if the worker itself ended well.
func TestGrandchildren(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, hasFamily...).start()
	for _, rank := range []string{"[rank0] ", "[rank1] "} {
		j.out.await(t, 3, rank+"family")
	}
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
	wantNobody(t, j.cfg.Job)
}

// The next attempt starts only when nothing of the last one is left.
func TestRestartAlone(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, shell(`
		if [ $CKPTSTORE_ATTEMPT = 1 ]; then
			setsid sleep 1000 &
			echo $! > "$0"
			exit 1
		fi
		# Of a process that is gone or a zombie there is no environment.
		grep -q CKPTSTORE_JOB= /proc/$(cat "$0")/environ || echo alone`)...)
	j.cfg.Command = append(j.cfg.Command, filepath.Join(t.TempDir(), "pid"))
	j.cfg.MaxRestarts = 1
	j.must()
	wantText(t, j.out, "alone\n")
}

var errStop = errors.New("the test stops the job")

// When the context ends, everything is gone and the trial is paused.
func TestCancel(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, append(hasFamily, "stay")...).start()
	for _, rank := range []string{"[rank0] ", "[rank1] "} {
		j.out.await(t, 1, rank+"ready")
		j.out.await(t, 3, rank+"up")
	}
	if n := len(survivors(t, j.cfg.Job)); n < 2*(1+3) {
		t.Errorf("%d processes of the job: the test shows nothing", n)
	}
	j.cancel(errStop)
	if err := j.wait(); !errors.Is(err, errStop) {
		t.Errorf("error %v", err)
	}
	wantText(t, j.log, `msg="stopping workers" cause="the test stops the job"`)
	wantNobody(t, j.cfg.Job)
	if trial := trialOf(t); trial.Status != projections.Paused || trial.Message != errStop.Error() {
		t.Errorf("trial %+v", trial)
	}
	if files := slots(t, j); len(files) > 0 {
		t.Errorf("staging slots are left: %q", files)
	}
	newJob(t, 1, "/bin/true").must()
	if trial := trialOf(t); trial.Status != projections.Completed || trial.Attempt != 2 {
		t.Errorf("the next job's trial %+v", trial)
	}
}

// A job that cannot run as configured begins no attempt.
func TestBadConfig(t *testing.T) {
	t.Parallel()
	for says, change := range map[string]func(*launch.Config){
		"--nproc must be 1 or more": func(c *launch.Config) { c.Nodes = session.OneNode(0) },
		"no command to run":         func(c *launch.Config) { c.Command = nil },
		"not found in $PATH":        func(c *launch.Config) { c.Command = []string{"no-such-program-here"} },
		"no such file":              func(c *launch.Config) { c.Command = []string{"./no/such/program"} },
		"permission denied":         func(c *launch.Config) { c.Command = []string{"/dev/null"} },
		"--resume auto":             func(c *launch.Config) { c.Resume = "require" },
		"absent":                    func(c *launch.Config) { c.Resume = "absent" },
	} {
		j := newJob(t, 1, "/bin/true")
		change(&j.cfg)
		err := j.run()
		if !errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), says) {
			t.Errorf("error %v, want %q", err, says)
		}
	}
	if started := bodiesOf[events.GroupStarted](t, runOf(t)); len(started) > 0 {
		t.Errorf("%d attempts were begun", len(started))
	}
}

// Output is passed on line by line with the rank in front. Overlong lines come in
// pieces, each of them complete.
func TestOutput(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, shell(`head -c 200000 /dev/zero | tr '\0' x; echo; echo err >&2; printf 'no end'`)...).must()
	for _, rank := range []string{"[rank0] ", "[rank1] "} {
		long := 0
		for _, line := range j.out.lines(rank) {
			if strings.Trim(line, "x") == "" {
				long += len(line)
			}
		}
		if long != 200000 {
			t.Errorf("%d of 200000 bytes came through", long)
		}
		wantText(t, j.out, rank+"err\n", rank+"no end\n")
	}
	for line := range strings.Lines(j.out.String()) {
		if !strings.HasPrefix(line, "[rank0] ") && !strings.HasPrefix(line, "[rank1] ") || len(line) > 65<<10 {
			t.Fatalf("line of %d bytes %.20q", len(line), line)
		}
	}
	if alone := newJob(t, 1, shell("echo hello")...).must(); alone.out.String() != "hello\n" {
		t.Errorf("a single worker's output is %q", alone.out)
	}
}

const (
	fullError  = `{"message":{"message":"%s","extraInfo":{"py_callstack":"Traceback: in train","timestamp":"%d"}}}`
	plainError = `{"message":"%s"}`
)

// tells fails with what torchelastic's record decorator writes. Rank 0 ends
// first, of a failure that rank 1 had before.
func tells(name, format string, stamps ...int64) []string {
	return workerRole(name, func(ctx context.Context, c *client.Client) error {
		args := []any{fmt.Sprintf("bug of rank %d", c.Rank)}
		if len(stamps) > 0 {
			args = append(args, stamps[c.Rank])
		}
		if err := os.WriteFile(os.Getenv("TORCHELASTIC_ERROR_FILE"), fmt.Appendf(nil, format, args...), 0o600); err != nil {
			return err
		}
		untilTerm := terms()
		if err := meet(ctx, c); err != nil {
			return err
		}
		if c.Rank == 0 {
			return errors.New("as told")
		}
		return errors.Join(untilTerm(ctx), errors.New("as told"))
	})
}

var tellsAll, tellsPlainly = tells("tells all", fullError, 1_700_000_100, 1_700_000_099), tells("tells plainly", plainError)

// The cause is in the worker's own words. Of several failures it is the earliest
// by their own time, not the first that was seen.
func TestErrorFile(t *testing.T) {
	t.Parallel()
	for _, want := range []struct {
		command   []string
		cause     string
		traceback string
	}{
		{tellsAll, "rank 1 exited with code 1: bug of rank 1", "Traceback: in train"},
		{tellsPlainly, "rank 0 exited with code 1: bug of rank 0", ""},
	} {
		t.Run(want.command[2], func(t *testing.T) {
			failed := newJob(t, 2, want.command...).fails()
			if failed.Cause != want.cause || fmt.Sprint("rank ", failed.Rank) != want.cause[:6] {
				t.Errorf("%+v, want %q", failed, want.cause)
			}
			for _, e := range bodiesOf[events.WorkerExited](t, runOf(t)) {
				if e.Message != fmt.Sprint("bug of rank ", e.Rank) || e.Traceback != want.traceback {
					t.Errorf("%+v", e)
				}
			}
		})
	}
}
