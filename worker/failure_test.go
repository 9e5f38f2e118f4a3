package worker_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/worker"
	"github.com/ckptstore/ckptstore/worker/client"
)

// A worker that leaves a pipe in place of its error file has failed like any
// other.
func TestPipeForErrorFile(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, shell("mkfifo $TORCHELASTIC_ERROR_FILE; exit 3")...)
	if failed := j.fails(); failed.Cause != "rank 0 exited with code 3" {
		t.Errorf("%+v", failed)
	}
	wantText(t, j.log, "what a worker says of its failure is not known", "is no regular file")
}

var tellsAtLength = workerRole("tells at length", func(_ context.Context, c *client.Client) error {
	if c.Attempt == 2 {
		return nil
	}
	file := fmt.Sprintf(`{"message":{"message":"first %s","extraInfo":{"py_callstack":"%s last","timestamp":"1"}}}`,
		strings.Repeat("<", 1<<20), strings.Repeat("<", 3<<20))
	return errors.Join(os.WriteFile(os.Getenv("TORCHELASTIC_ERROR_FILE"), []byte(file), 0o600), errors.New("as told"))
})

// A failure of which there is much to say is restarted like any other. The
// log has the beginning of its message and the end of its traceback.
func TestLongTraceback(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, tellsAtLength...)
	j.cfg.MaxRestarts = 1
	j.must()
	got := said[events.WorkerExited](t, runOf(t))
	if len(got) != 2 {
		t.Fatalf("%d exits", len(got))
	}
	if e := got[0]; len(e.Message) > 16<<10 || len(e.Traceback) > 64<<10 ||
		!strings.HasPrefix(e.Message, "first <") || !strings.Contains(e.Message, "more bytes") ||
		!strings.HasSuffix(e.Traceback, "< last") || !strings.Contains(e.Traceback, "bytes before") {
		t.Errorf("message of %d bytes %.30q, traceback of %d bytes %.50q", len(e.Message), e.Message, len(e.Traceback), e.Traceback)
	}
}

// lateLog takes a while for the news of a worker's end.
type lateLog struct {
	worker.Log
	late time.Duration
}

// Append implements worker.Log.
func (l lateLog) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	if facts[0].Kind == (events.WorkerExited{}).Kind() {
		select {
		case <-time.After(l.late):
		case <-ctx.Done():
		}
	}
	return l.Log.Append(ctx, facts...)
}

// A worker that has ended is not said to ignore SIGTERM, however long the log
// takes to hear of its end.
func TestEndedIsNotKilled(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, shell("exit 3")...)
	j.cfg.Grace = shortly / 5
	j.store.Log = lateLog{home.Log, shortly}
	j.fails()
	if strings.Contains(j.log.String(), "ignore SIGTERM") {
		t.Errorf("a worker that has ended is complained of:\n%s", j.log)
	}
}
