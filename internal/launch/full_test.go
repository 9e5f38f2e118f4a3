package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// fullLog is the log of a nearly full disk: it refuses facts of some kinds, and
// takes decisions.
type fullLog struct {
	session.Log
	refuses []events.Body
}

var errFull = fmt.Errorf("the disk of the store has no room: %w", syscall.ENOSPC)

// Append implements session.Log.
func (l fullLog) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	for _, f := range facts {
		for _, b := range l.refuses {
			if f.Kind == b.Kind() {
				return nil, errFull
			}
		}
	}
	return l.Log.Append(ctx, facts...)
}

// A worker's end that the log has no room for waits for room: the job ends as on
// an empty disk.
func TestFullAtWorkersEnd(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		script   string
		status   projections.Status
		attempts int
	}{
		{"exit 3", projections.Errored, 2},
		{"exit 0", projections.Completed, 1},
	} {
		t.Run(c.script, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, shell(c.script)...)
			j.cfg.MaxRestarts = 1
			j.store.Log = roomyLog{fullLog{home.Log, []events.Body{events.WorkerExited{}, events.GroupStopped{}}}, func() bool {
				return strings.Contains(j.log.String(), "log has no room; retrying")
			}}
			if err := j.run(); errors.Is(err, syscall.ENOSPC) || (err == nil) != (c.status == projections.Completed) {
				t.Errorf("error %v", err)
			}
			wantText(t, j.log, "log has room again")
			if trial := trialOf(t); trial.Status != c.status || trial.Attempt != c.attempts {
				t.Errorf("trial %+v", trial)
			}
		})
	}
}

// A job that is asked to end while there is no room does not wait for room much
// longer. The log, which takes decisions, has the trial's end.
func TestFullAtTheEnd(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, shell("exit 0")...)
	j.store.Log = fullLog{home.Log, []events.Body{events.WorkerExited{}, events.GroupStopped{}}}
	j.start()
	deadline := time.Now().Add(patience)
	for tick := time.Tick(10 * time.Millisecond); !strings.Contains(j.log.String(), "log has no room; retrying"); <-tick {
		if time.Now().After(deadline) {
			t.Fatal("nothing waits for room")
		}
	}
	j.cancel(errors.New("the test ends it"))
	if err := j.wait(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("error %v", err)
	}
	if trial := trialOf(t); trial.Status != projections.Paused || trial.Attempt != 1 {
		t.Errorf("trial %+v", trial)
	}
}

var goesOn = signalRole("continues ahead of its metrics", func(ctx context.Context, c *client.Client, done string) error {
	for step := range int64(5) {
		if err := c.Report(ctx, step, map[string]any{"loss": 1.0}); err != nil {
			return err
		}
	}
	return os.WriteFile(done, nil, 0o600)
})

// roomyLog is a fullLog that has room once the workers have got far enough.
type roomyLog struct {
	fullLog
	far func() bool
}

// Append implements session.Log.
func (l roomyLog) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	if l.far() {
		return l.Log.Append(ctx, facts...)
	}
	return l.fullLog.Append(ctx, facts...)
}

// Metrics wait while the log has no room for them, and the training continues.
// Metrics without room at its end are lost, and this is logged.
func TestFullForMetrics(t *testing.T) {
	t.Parallel()
	full := fullLog{home.Log, []events.Body{events.Metrics{}}}
	for name, c := range map[string]struct {
		room       bool
		iterations int
	}{"and there is room": {true, 5}, "and there is none": {false, 0}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			done := filepath.Join(t.TempDir(), "done")
			j := newJob(t, 2, slices.Concat(goesOn, []string{done})...)
			j.store.Log = roomyLog{full, func() bool {
				_, err := os.Stat(done)
				return c.room && err == nil
			}}
			j.must()
			wantText(t, j.log, "no room for metrics; retrying")
			if trial := trialOf(t); trial.Status != projections.Completed || trial.Iterations != c.iterations {
				t.Errorf("trial %+v", trial)
			}
			if said := strings.Contains(j.log.String(), "metrics refused by the log after their ranks continued"); said == c.room {
				t.Errorf("loss of metrics logged: %v", said)
			}
		})
	}
}

var savesThrice = workerRole("saves three times", func(ctx context.Context, c *client.Client) error {
	for step := range int64(3) {
		if err := save(ctx, c, step+1); err != nil {
			return err
		}
	}
	return nil
})

// Any fact of a save that the log has no room for waits, and the save is
// committed: its deadline does not pass, and its worker gets no error.
func TestFullForSaves(t *testing.T) {
	t.Parallel()
	for _, refused := range []events.Body{events.LocalPlan{}, events.GlobalPlan{}, events.WriteSealed{}, events.WriteCompleted{}} {
		t.Run(string(refused.Kind()), func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, savesThrice...)
			j.store.Log = roomyLog{fullLog{home.Log, []events.Body{refused}}, func() bool {
				return strings.Contains(j.log.String(), "log has no room; retrying")
			}}
			j.must()
			wantText(t, j.log, "log has room again")
			wantEnded(t, []string{"step-1.a1", "step-2.a1", "step-3.a1"}, nil)
		})
	}
}

// sealsWithoutRoom makes a file while the disk must be full.
var sealsWithoutRoom = signalRole("seals a save that has no room", func(ctx context.Context, c *client.Client, full string) error {
	if err := save(ctx, c, 0); err != nil {
		return err
	}
	if c.Rank == 0 {
		if err := os.WriteFile(full, nil, 0o600); err != nil {
			return err
		}
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	for step := int64(1); step < 3; step++ { // into mapped memory, and into unmapped
		s, err := c.Begin(ctx, step, state(step, c.Rank, c.WorldSize), client.SaveOptions{})
		if err != nil {
			return err
		}
		if c.Rank == 0 {
			err = s.Seal(ctx)
		}
		gone := (*client.AbortedError)(nil)
		if why := s.Wait(ctx, client.Committed); !errors.As(why, &gone) || !gone.NoRoom || !strings.Contains(gone.Reason, "are kept for the log") {
			return fmt.Errorf("error %w, want no room", why)
		}
		if c.Rank == 1 {
			err = s.Seal(ctx)
		}
		if err != nil {
			return fmt.Errorf("a call that needs no room: %w", err)
		}
		if err := meet(ctx, c); err != nil {
			return err
		}
	}
	if c.Rank == 0 {
		if err := os.Remove(full); err != nil {
			return err
		}
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	return save(ctx, c, 3)
})

// A save that does not fit is aborted, and its waiters get the error: no call
// that copies and seals fails, neither before the abort nor after it.
func TestSaveThatDoesNotFit(t *testing.T) {
	t.Parallel()
	full := filepath.Join(t.TempDir(), "full")
	j := newJob(t, 2, slices.Concat(sealsWithoutRoom, []string{full})...)
	j.cfg.StagingSlots = 1
	j.gated("no file has this name")
	j.store.Data.KeepFree(func(u data.Usage) int64 {
		if _, err := os.Stat(full); err != nil {
			return 0
		}
		return int64(u.Free) //nolint:gosec // bytes of a disk
	})
	j.must()
	wantEnded(t, []string{"step-0.a1", "step-3.a1"}, []string{"step-1.a1", "step-2.a1"})
}
