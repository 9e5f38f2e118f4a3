package launch_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// gatedTrainer is a trainer in a process of its own: STORE MEMORY RUN GATE. Its files stop at
// the gate until its standard input has a line.
var gatedTrainer = role("trainer with a gate", func(ctx context.Context, args []string) error {
	st, err := store.Open(ctx, store.Options{Location: args[0]})
	if err != nil {
		return err
	}
	defer func() { _ = st.Close() }()
	s := storeOf(st, args[1])
	g, err := gated(&s, st, args[3])
	if err != nil {
		return err
	}
	go func() {
		if n, _ := os.Stdin.Read(make([]byte, 1)); n == 1 {
			close(g.open)
		}
	}()
	cfg := config(args[2], 2, reportsAndSaves, os.Stdout, os.Stderr)
	cfg.MaxRestarts, cfg.SaveTimeout = 1, 10*patience // a save that is not sealed stays open
	return launch.Run(ctx, cfg, s)
})

// reportsAndSaves saves step 3 of 5 to the end, unless its run has no earlier save, and begins
// to save step 5. Its run's name has the number of ranks that seal it.
var reportsAndSaves = workerRole("reports and saves", func(ctx context.Context, c *client.Client) error {
	if c.Attempt > 1 {
		emit("resumes %s", c.Resume)
		return nil
	}
	emit("pid %d", os.Getpid())
	for step := int64(1); step <= 5; step++ {
		if err := c.Report(ctx, step, map[string]any{"loss": 1.0}); err != nil {
			return err
		}
		if step == 3 && !strings.Contains(c.Run, "first") {
			if err := save(ctx, c, step); err != nil {
				return err
			}
		}
	}
	s, err := c.Begin(ctx, 5, state(5, c.Rank, 2), client.SaveOptions{})
	if err != nil {
		return err
	}
	if err := s.Wait(ctx, client.Begun); err != nil {
		return err
	}
	if strings.Contains(c.Run, "2_sealed") || strings.Contains(c.Run, "1_sealed") && c.Rank == 0 {
		if err := s.Seal(ctx); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return ctx.Err()
})

// TestKilledNow compares the verdict on a kill, as it was just before, with what the run has lost: a rank is killed with SIGKILL, or the trainer, while no rank, one rank
// or all ranks have sealed a save, and while it is written and not committed.
func TestKilledNow(t *testing.T) {
	t.Parallel()
	for _, moment := range []struct {
		name, gate      string
		sealed, written int
		resumes         string
		steps           int64
	}{
		{"0 sealed", "none", 0, 0, "step-3.a1", 2},
		{"1 sealed", "none", 1, 1, "step-3.a1", 2},
		{"2 sealed", "step-5.a1/r00001.safetensors", 2, 1, "step-5.a1", 0},
		{"2 sealed, 2 written", "step-5.a1/manifest-", 2, 2, "step-5.a1", 0},
		{"first, 1 sealed", "none", 1, 1, "", 5},
		{"first, 2 sealed", "step-5.a1/r00001.safetensors", 2, 1, "step-5.a1", 0},
	} {
		for _, victim := range []string{"rank", "trainer"} {
			t.Run(moment.name+", "+victim, func(t *testing.T) {
				t.Parallel()
				ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
				defer cancel()
				cmd, out, open := startTrainer(ctx, t, gatedTrainer, moment.gate)
				pid, err := strconv.Atoi(out.await(t, 1, "[rank1] pid ")[0])
				if err != nil {
					t.Fatal(err)
				}
				told, newest := tellKilled(ctx, t, moment.sealed, moment.written)
				wantTold(t, told, moment.resumes, moment.steps, moment.sealed)

				before := usageOf(ctx, t)
				if victim == "trainer" {
					if err := cmd.Process.Kill(); err != nil {
						t.Fatal(err)
					}
					_ = cmd.Wait() // it was killed
					j := newJob(t, 2, reportsAndSaves...)
					j.must()
					wantText(t, j.out, fmt.Sprintf("[rank0] resumes %s\n", told.Resume))
				} else {
					fd, err := unix.PidfdOpen(pid, 0)
					if err != nil {
						t.Fatal(err)
					}
					err = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
					_ = unix.Close(fd)
					if err != nil {
						t.Fatal(err)
					}
					if _, err := io.WriteString(open, "\n"); err != nil {
						t.Fatal(err)
					}
					if err := cmd.Wait(); err != nil {
						t.Fatalf("the trainer: %v", err)
					}
					wantText(t, out, fmt.Sprintf("[rank0] resumes %s\n", told.Resume))
				}
				since := time.Since(newest)
				wantHidden(ctx, t, told, before, since)
			})
		}
	}
}

// tellKilled returns what a kill would cost, once the newest save has gone so far, and the time
// of the newest event of the training.
func tellKilled(ctx context.Context, t *testing.T, sealed, written int) (insight.KilledNow, time.Time) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		now, err := query.Ask(ctx, home.Views(), query.Standing, query.Params{Run: runOf(t)})
		if err == nil && len(now.Trials) == 1 && len(now.Trials[0].Open) == 1 {
			s := now.Trials[0]
			if save := s.Open[0]; save.ID == "step-5.a1" && save.Sealed == sealed && save.Writes == written {
				return insight.IfKilled(s), save.BegunAt
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("the save does not come to %d sealed and %d written: %+v, %v", sealed, written, now.Trials, err)
		}
	}
}

func wantTold(t *testing.T, told insight.KilledNow, resumes string, steps int64, sealed int) {
	t.Helper()
	t.Log(told.Text)
	if told.Resume != resumes || told.Steps == nil || *told.Steps != steps || told.Without != nil {
		t.Errorf("told %+v, want a resume from %q and %d steps", told, resumes, steps)
	}
	fate := insight.Dropped
	if resumes == "step-5.a1" {
		fate = insight.Finished
	}
	if len(told.Saves) != 1 || told.Saves[0].Fate != fate || told.Saves[0].Sealed != sealed || told.Saves[0].Ranks != 2 {
		t.Errorf("told of the saves %+v, want %s with %d sealed", told.Saves, fate, sealed)
	}
}

func usageOf(ctx context.Context, t *testing.T) projections.Usage {
	t.Helper()
	now, err := query.Ask(ctx, home.Views(), query.Standing, query.Params{Run: runOf(t)})
	if err != nil {
		t.Fatal(err)
	}
	return now.Usage
}

// wantHidden checks that the next attempt continued from the checkpoint of the verdict, and hid
// as many steps and as much training.
func wantHidden(ctx context.Context, t *testing.T, told insight.KilledNow, before projections.Usage, since time.Duration) {
	t.Helper()
	rows, err := query.Ask(ctx, home.Views(), query.Attempts, query.Params{Run: runOf(t), Trial: projections.DefaultTrial})
	if err != nil || len(rows) != 2 || rows[1].Resume != told.Resume {
		t.Fatalf("attempts %+v, want that the second resumes from %q: %v", rows, told.Resume, err)
	}
	table, err := query.Ask(ctx, home.Views(), query.Metrics, query.Params{Run: runOf(t), Trial: projections.DefaultTrial, All: true})
	if err != nil {
		t.Fatal(err)
	}
	hidden := int64(0)
	for _, row := range table.Rows {
		if row.Hidden {
			hidden += int64(row.Reports)
		}
	}
	if hidden != *told.Steps {
		t.Errorf("%d reports are hidden, the verdict was %d", hidden, *told.Steps)
	}
	after := usageOf(ctx, t)
	// What a save is found to have held up is no training any more.
	lost := after.Lost - before.Lost + after.Blocked - before.Blocked
	const rounding = 1e-6
	// A rank trains until its death is seen, a moment after the verdict.
	if least, most := told.Seconds-rounding, told.Seconds+since.Seconds()+rounding; lost < least || lost > most {
		t.Errorf("%v s of training are lost, the verdict was %v to %v; %+v, %+v", lost, least, most, before, after)
	}
}
