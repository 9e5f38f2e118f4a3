package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/handoff"
	"github.com/ckptstore/ckptstore/projections"
)

// A worker that leaves a pipe instead of its error file counts as failed like any
// other.
func TestPipeForErrorFile(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, shell("mkfifo $TORCHELASTIC_ERROR_FILE; exit 3")...)
	if failed := j.fails(); failed.Cause != "rank 0 exited with code 3" {
		t.Errorf("%+v", failed)
	}
	wantText(t, j.log, "error file not readable", "is not a regular file")
}

var tellsAtLength = workerRole("tells at length", func(_ context.Context, c *client.Client) error {
	if c.Attempt == 2 {
		return nil
	}
	file := fmt.Sprintf(`{"message":{"message":"first %s","extraInfo":{"py_callstack":"%s last","timestamp":"1"}}}`,
		strings.Repeat("<", 1<<20), strings.Repeat("<", 3<<20))
	return errors.Join(os.WriteFile(os.Getenv("TORCHELASTIC_ERROR_FILE"), []byte(file), 0o600), errors.New("as told"))
})

// A failure with a long report restarts like any other. The log has the beginning
// of its message and the end of its traceback.
func TestLongTraceback(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, tellsAtLength...)
	j.cfg.MaxRestarts = 1
	j.must()
	got := bodiesOf[events.WorkerExited](t, runOf(t))
	if len(got) != 2 {
		t.Fatalf("%d exits", len(got))
	}
	if e := got[0]; len(e.Message) > 16<<10 || len(e.Traceback) > 64<<10 ||
		!strings.HasPrefix(e.Message, "first <") || !strings.Contains(e.Message, "more bytes") ||
		!strings.HasSuffix(e.Traceback, "< last") || !strings.Contains(e.Traceback, "bytes before") {
		t.Errorf("message of %d bytes %.30q, traceback of %d bytes %.50q", len(e.Message), e.Message, len(e.Traceback), e.Traceback)
	}
}

// lateLog delays the events of a worker's end.
type lateLog struct {
	session.Log
	late time.Duration
}

// Append implements session.Log.
func (l lateLog) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	if facts[0].Kind == (events.WorkerExited{}).Kind() {
		select {
		case <-time.After(l.late):
		case <-ctx.Done():
		}
	}
	return l.Log.Append(ctx, facts...)
}

// A worker that has ended is not reported as ignoring SIGTERM, however long the
// log takes to record its end.
func TestEndedIsNotKilled(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, shell("exit 3")...)
	j.cfg.Grace = 4 * shortly // both end well before it, also on a busy machine
	j.store.Log = lateLog{home.Log, 2 * j.cfg.Grace}
	if failed := j.fails(); strings.Contains(j.log.String(), "ignore SIGTERM") {
		t.Errorf("a worker that has ended is complained of, after %v:\n%s", failed, j.log)
	}
}

// The log records the end of an attempt whose processes cannot start.
func TestNotStarted(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(program, []byte("echo without an interpreter\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	j := newJob(t, 2, program)
	if err := j.run(); !errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), "exec format error") {
		t.Errorf("error %v", err)
	}
	if got := one[events.GroupStopped](t, runOf(t)); got.Attempt != 1 || !strings.Contains(got.Reason, "exec format error") {
		t.Errorf("group.stopped: %+v", got)
	}
	if got := one[events.TrialErrored](t, runOf(t)); got.Attempt != 1 || !strings.Contains(got.Message, "exec format error") {
		t.Errorf("trial.errored: %+v", got)
	}
	if trial := trialOf(t); trial.Status != projections.Errored {
		t.Errorf("trial %+v", trial)
	}
}

// If a rank's save is refused, the others do not wait: in any order, they learn
// at once which rank it was and why.
func TestRefusedSave(t *testing.T) {
	t.Parallel()
	const good, bad = `{"step":5,"items":[{"fqn":"w","value":true,"bytes":3}]}`, `{"step":5,"items":[{"fqn":"w","value":true,"bytes":4611686018427387904}]}`
	for _, first := range []int{0, 1} {
		t.Run(fmt.Sprint("rank ", first, " first"), func(t *testing.T) {
			t.Parallel()
			_, ranks := doors(t, 2)
			for _, rank := range []int{first, 1 - first} {
				status, reply := ranks[rank].post("save", []string{good, bad}[rank])
				if rank == 1 && (status == 200 || !strings.Contains(reply, "reserve 4611686018427392000 bytes")) {
					t.Errorf("rank 1: %d %s", status, reply)
				}
			}
			status, reply := ranks[0].post("wait", `{"checkpoint":"step-5.a1","state":"committed"}`)
			if status != 200 || !strings.Contains(reply, client.Aborted) || !strings.Contains(reply, "rank 1 could not save: reserve 4611686018427392000 bytes") {
				t.Errorf("rank 0: %d %s", status, reply)
			}
			if got := one[events.CheckpointAborted](t, runOf(t)); !slices.Equal(got.Ranks, []int{1}) {
				t.Errorf("checkpoint.aborted: %+v", got)
			}
		})
	}
}

// Metrics that would not fit the log are rejected, and metrics that fit are
// accepted from every rank at once.
func TestLargeReport(t *testing.T) {
	t.Parallel()
	const world = 20
	_, ranks := doors(t, world)
	report := func(rank, size int) (int, string) {
		return ranks[rank].post("report", fmt.Sprintf(`{"step":1,"metrics":{"%02d":%q}}`, rank, strings.Repeat("x", size)))
	}
	limit := handoff.ReportLimit(world) - len(`{"00":""}`)
	if status, reply := report(3, limit+1); status != 400 || !strings.Contains(reply, "each of 20 ranks may report") {
		t.Errorf("%d %s", status, reply)
	}
	if status, reply := report(3, 2<<20); status != 400 {
		t.Errorf("%d %s", status, reply)
	}
	var all sync.WaitGroup
	for rank := range world {
		all.Go(func() {
			if status, reply := report(rank, limit); status != 200 {
				t.Errorf("rank %d: %d %.200s", rank, status, reply)
			}
		})
	}
	all.Wait()
	one[events.Metrics](t, runOf(t))
}
