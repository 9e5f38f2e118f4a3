package launch_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

var failsToWrite = workerRole("has a save that cannot be written", func(ctx context.Context, c *client.Client) error {
	if c.Attempt > 1 {
		emit("resumes %s", c.Resume)
		return errors.Join(load(ctx, c, "", 1), save(ctx, c, 2))
	}
	if err := save(ctx, c, 1); err != nil {
		return err
	}
	s, err := c.Save(ctx, 2, state(2, c.Rank, 2), client.SaveOptions{})
	if err != nil {
		return err
	}
	emit("trains on")
	why := s.Wait(ctx, client.Committed)
	if gone := (*client.AbortedError)(nil); errors.As(why, &gone) {
		emit("for want of room: %v", gone.NoRoom)
	}
	emit("told %v", why)
	return cmp.Or(loadLatest(ctx, c), meet(ctx, c), why)
})

// A write that fails in the background, on one rank and long after Save has
// returned, is reported to the waiting callers, the log, the trainer's output and
// the end of the attempt. Its save is never the latest, not even while it is
// staged: a collection meanwhile keeps the last good one, which the next attempt
// resumes from.
func TestFailedWrite(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, failsToWrite...)
	j.cfg.MaxRestarts = 1
	g := j.gated("step-2.a1/r00001.safetensors")
	g.err = syscall.ENOSPC
	j.start()
	g.await(t)
	j.out.await(t, 1, "[rank0] trains on")
	j.out.await(t, 1, "[rank1] trains on")
	awaitWritten(t, 0, "step-2.a1")
	out, err := home.Collect(t.Context(), collection.Options{Runs: []string{j.cfg.Run}, Policy: retention.Policy{Last: 1}, Apply: true})
	if err != nil || len(out.Checkpoints) != 1 || out.Checkpoints[0].Action != collection.Keep {
		t.Errorf("in parallel with the save: %+v, %v", out, err)
	}
	close(g.open)
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
	wantEnded(t, []string{"step-1.a1", "step-2.a2"}, []string{"step-2.a1"})
	for _, rank := range []string{"[rank0] ", "[rank1] "} {
		if got := j.out.lines(rank); !slices.ContainsFunc(got, func(s string) bool {
			return strings.Contains(s, "step-2.a1 was aborted: rank 1 could not be written: ") && strings.Contains(s, "no space left on device; free space")
		}) || !slices.Contains(got, "loaded step-1.a1 with 1") || !slices.Contains(got, "resumes step-1.a1") || !slices.Contains(got, "for want of room: true") {
			t.Errorf("%ssays %q", rank, got)
		}
	}
	wantText(t, j.log, "write failed", "checkpoint aborted", "r00001.safetensors")
	if got := one[events.WriteFailed](t, runOf(t)); got.Rank != 1 || !strings.Contains(got.Error, "no space left") {
		t.Errorf("write.failed: %+v", got)
	}
	if got := one[events.CheckpointAborted](t, runOf(t)); !slices.Equal(got.Ranks, []int{1}) {
		t.Errorf("checkpoint.aborted: %+v", got)
	}
	rows, err := query.Ask(t.Context(), home.Views(), query.Checkpoints, query.Params{Run: j.cfg.Run})
	if err != nil || len(rows) != 2 || slices.ContainsFunc(rows, func(c projections.Checkpoint) bool { return c.ID == "step-2.a1" }) {
		t.Errorf("the run lists %+v, %v", rows, err)
	}
	if got := left(t); !slices.Equal(got, []string{"step-1.a1", "step-2.a2"}) {
		t.Errorf("there are receipts of %q", got)
	}
	if _, err := os.Stat(dirOf(t, "step-2.a1")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("leftovers of the failed save: %v", err)
	}
}

var losesFile = workerRole("loses a file", func(ctx context.Context, c *client.Client) error {
	s, err := c.Save(ctx, 1, state(1, c.Rank, c.WorldSize), client.SaveOptions{})
	if err != nil {
		return err
	}
	emit("told %v", s.Wait(ctx, client.Committed))
	return errors.Join(save(ctx, c, 2), load(ctx, c, "step-2", 2))
})

// A file that is written but disappears before the last rank has written is
// noticed before the commit: the save is aborted with the name of the file.
func TestFileVanishesBeforeCommit(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, losesFile...)
	g := j.gated("step-1.a1/r00002.safetensors")
	j.start()
	g.await(t)
	awaitWritten(t, 0, "step-1.a1")
	awaitWritten(t, 1, "step-1.a1")
	if err := os.Remove(filepath.Join(dirOf(t, "step-1.a1"), "r00001.safetensors")); err != nil {
		t.Fatal(err)
	}
	close(g.open)
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
	wantEnded(t, []string{"step-2.a1"}, []string{"step-1.a1"})
	for rank := range 3 {
		if got := j.out.lines(fmt.Sprintf("[rank%d] told ", rank)); len(got) != 1 || !strings.Contains(got[0], "was aborted: commit: ") || !strings.Contains(got[0], "r00001.safetensors") {
			t.Errorf("rank %d got %q", rank, got)
		}
	}
}

var savesOver = workerRole("saves over leftovers", func(ctx context.Context, c *client.Client) error {
	s, why := c.Save(ctx, 1, state(1, c.Rank, c.WorldSize), client.SaveOptions{})
	if why == nil { // otherwise another rank was refused before this rank had sealed
		why = s.Wait(ctx, client.Committed)
	}
	emit("told %v", why)
	if why == nil {
		return load(ctx, c, "step-1", 1)
	}
	return errors.Join(save(ctx, c, 1), load(ctx, c, "step-1", 1))
})

// An existing directory in the place of a save does no harm if it holds the
// remains of an interrupted save: none of them gets into the checkpoint. If it
// holds a checkpoint, or may hold one, it stays unchanged: no rank writes, all
// get an error, and the next save of that name goes elsewhere.
func TestSaveOverLeftovers(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("left over ", 20_000)
	for _, c := range []struct {
		name  string
		there map[string]string
		told  string
		ends  []string // committed
	}{
		{"of a cut save", map[string]string{
			"r00000.safetensors": long, "r00000.idx": long, "r00000.safetensors.tmp": long, "r00001.idx": "CKIX",
			"r00001.safetensors.tmp": long, "manifest-0.tmp": "", checkpoint.ReceiptFile + ".tmp": "{",
		}, "<nil>", []string{"step-1.a1"}},
		{"of a checkpoint", map[string]string{"manifest-0": "{", "r00000.safetensors": long}, "manifest-0 is a damaged manifest, which is left as it is", []string{"step-1.a1.2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := dirOf(t, "step-1.a1")
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			for name, text := range c.there {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			j := newJob(t, 2, savesOver...).must()
			for rank := range 2 {
				if got := j.out.lines(fmt.Sprintf("[rank%d] told ", rank)); len(got) != 1 || !strings.Contains(got[0], c.told) {
					t.Errorf("rank %d got %q", rank, got)
				}
			}
			if got, _ := ended(t, runOf(t)); !slices.Equal(got, c.ends) {
				t.Errorf("committed %q, want %q", got, c.ends)
			}
			report, err := home.Data.Verify(t.Context(), checkpoint.RefOf(runOf(t), projections.DefaultTrial, c.ends[0]), checkpoint.Digest{}, nil)
			if err != nil || !report.Clean() {
				t.Errorf("findings %v, %v", report.Findings, err)
			}
			if c.told == "<nil>" {
				return
			}
			for name, want := range c.there {
				if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
					t.Errorf("%s has %d bytes, %v", name, len(got), err)
				}
			}
		})
	}
}
