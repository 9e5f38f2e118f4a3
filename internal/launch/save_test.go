package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

var saves = workerRole("saves and trains on", func(ctx context.Context, c *client.Client) error {
	mine := state(3, c.Rank, c.WorldSize)
	s, err := c.Save(ctx, 3, mine, client.SaveOptions{})
	if err != nil {
		return err
	}
	overwrite(mine)
	// A barrier at the same time as the write: they share a connection, but not
	// an order.
	if err := meet(ctx, c); err != nil {
		return err
	}
	for _, state := range []string{client.Begun, client.Staged, client.Committed} {
		if err := s.Wait(ctx, state); err != nil {
			return err
		}
	}
	return load(ctx, c, s.Checkpoint, 3)
})

var restores = workerRole("restores", func(ctx context.Context, c *client.Client) error {
	emit("resumes %s", c.Resume)
	if err := load(ctx, c, "", 3); err != nil {
		return err
	}
	partly := state(0, c.Rank, c.WorldSize)
	partly.Tensors, partly.Values = partly.Tensors[:1], partly.Values[:0]
	if _, err := c.Load(ctx, &partly, client.LoadOptions{Strict: true}); err == nil || !strings.Contains(err.Error(), `["bias" "config" "rng"]`) {
		return fmt.Errorf("strict load of a part: %w", err)
	}
	loaded, err := c.Load(ctx, &partly, client.LoadOptions{})
	if err != nil {
		return err
	}
	emit("unread %q", loaded.Unread)
	partly.Values = []client.Value{{FQN: "absent"}}
	_, err = c.Load(ctx, &partly, client.LoadOptions{Ref: loaded.Checkpoint})
	return refused(err, 400)
})

// Two ranks and then six load what three ranks have saved, each with its own
// boxes; tensors that change after Save do not change the checkpoint.
func TestSaveAndLoad(t *testing.T) {
	t.Parallel()
	newJob(t, 3, saves...).must()
	wantEnded(t, []string{"step-3.a1"}, nil)
	if got := one[events.RestoreCompleted](t, runOf(t)); got.Checkpoint != "step-3.a1" || got.Bytes == 0 || len(got.Unread) > 0 {
		t.Errorf("restore.completed is %+v", got)
	}
	two := newJob(t, 2, restores...).must()
	wantText(t, two.out, "[rank0] resumes step-3.a1", "[rank1] resumes step-3.a1",
		`unread ["bias" "config" "rng"]`, `missing key "absent"`)
	failed := bodiesOf[events.RestoreFailed](t, runOf(t))
	if len(failed) != 1 || failed[0].Load != 4 {
		t.Errorf("restore.failed: %+v", failed)
	}

	// More ranks than have saved: a value of each rank's own is optional then.
	newJob(t, 6, grows...).must()
	receipts, damaged, err := home.Data.Checkpoints(t.Context())
	if err != nil || len(damaged) > 0 {
		t.Fatal(err, damaged)
	}
	if !slices.ContainsFunc(receipts, func(r checkpoint.Receipt) bool { return r.Run == runOf(t) && r.Checkpoint == "step-3.a1" }) {
		t.Error("there is no receipt of the checkpoint")
	}
}

var grows = workerRole("restores with more ranks", func(ctx context.Context, c *client.Client) error {
	got, want := state(0, c.Rank, c.WorldSize), state(3, c.Rank, c.WorldSize)
	_, err := c.Load(ctx, &got, client.LoadOptions{})
	status := 409
	if c.Rank >= 3 {
		status, want.Values[1].Data = 400, []byte("new")
	}
	if err := refused(err, status); err != nil {
		return err
	}
	got.Values[1].Optional, got.Values[1].Data = true, []byte("new")
	if _, err := c.Load(ctx, &got, client.LoadOptions{Strict: true}); err != nil {
		return err
	}
	return same(got, want)
})

var savesNames = workerRole("saves names", func(ctx context.Context, c *client.Client) error {
	for _, o := range []client.SaveOptions{{Name: "best"}, {Name: "best"}, {}, {Name: "alone", Participants: []int{1}}} {
		mine := state(7, c.Rank, c.WorldSize)
		if len(o.Participants) > 0 {
			if c.Rank == 0 {
				continue
			}
			mine = state(7, 0, 1)
		}
		s, err := c.Save(ctx, 7, mine, o)
		if err != nil {
			return err
		}
		emit("saved %s", s.Checkpoint)
		if err := s.Wait(ctx, client.Committed); err != nil {
			return err
		}
	}
	// The plan of the other rank ends the save, before or after this one's seal.
	s, err := c.Save(ctx, int64(c.Rank), state(7, c.Rank, c.WorldSize), client.SaveOptions{Name: "mixed"})
	if err == nil {
		err = s.Wait(ctx, client.Committed)
	}
	if err == nil || !strings.Contains(err.Error(), "was aborted: ") || !strings.Contains(err.Error(), "saves step") {
		return fmt.Errorf("a save of two steps: %w", err)
	}
	return save(ctx, c, 9) // the last one, which the job must not lose
})

// Every rank derives the same ID: the name, the attempt, and from the second
// save of a name its number. Two steps under one name are no checkpoint.
func TestCheckpointIDs(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, savesNames...).must()
	for rank, want := range [][]string{{"best.a1", "best.a1.2", "step-7.a1"}, {"best.a1", "best.a1.2", "step-7.a1", "alone.a1"}} {
		if got := j.out.lines(fmt.Sprintf("[rank%d] saved ", rank)); !slices.Equal(got, want) {
			t.Errorf("rank %d saved %q, want %q", rank, got, want)
		}
	}
	wantEnded(t, []string{"best.a1", "best.a1.2", "step-7.a1", "alone.a1", "step-9.a1"}, []string{"mixed.a1"})
	if _, err := os.Stat(dirOf(t, "mixed.a1")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("leftovers of the aborted save: %v", err)
	}
}

var savesLate = workerRole("saves late", func(ctx context.Context, c *client.Client) error {
	if c.Rank == 0 {
		s, err := c.Save(ctx, 1, state(1, 0, 2), client.SaveOptions{})
		if err != nil {
			return err
		}
		var aborted *client.AbortedError
		if err := s.Wait(ctx, client.Committed); !errors.As(err, &aborted) {
			return fmt.Errorf("a save without rank 1: %w", err)
		}
		emit("reason %s", aborted.Reason)
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	if err := save(ctx, c, 2); err != nil {
		return err
	}
	if c.Rank == 1 {
		_, err := c.Begin(ctx, 1, state(1, 1, 2), client.SaveOptions{})
		if err := refused(err, 409); err != nil {
			return err
		}
	}
	return save(ctx, c, 3)
})

// A rank that never calls save ends the save at its deadline, and is named. If it
// calls late it gets an error. The slots of both are free for the next save.
func TestRankNeverSaves(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, savesLate...)
	j.cfg.SaveTimeout = saveEnds
	j.must()
	wantText(t, j.out, "[rank0] reason these ranks did not call save", fmt.Sprintf("within %v (ranks [1])", saveEnds),
		"[rank1] refused checkpoint step-1.a1 was aborted: these ranks did not")
	if got := one[events.CheckpointAborted](t, runOf(t)); !slices.Equal(got.Ranks, []int{1}) {
		t.Errorf("checkpoint.aborted names the ranks %v", got.Ranks)
	}
	wantEnded(t, []string{"step-2.a1", "step-3.a1"}, []string{"step-1.a1"})
}

var savesTwice = workerRole("saves during a write", func(ctx context.Context, c *client.Client) error {
	if _, err := c.Save(ctx, 1, state(1, 0, 1), client.SaveOptions{}); err != nil {
		return err
	}
	soon, cancel := context.WithTimeout(ctx, shortly)
	_, err := c.Save(soon, 2, state(2, 0, 1), client.SaveOptions{Name: "refused"})
	cancel()
	if !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("a save while the slot is in use: %w", err)
	}
	emit("busy")
	if err := save(ctx, c, 2); err != nil {
		return err
	}
	return errors.Join(load(ctx, c, "step-1", 1), load(ctx, c, "step-2", 2))
})

// duringWrite runs a rank with one slot, whose first save is being written until
// the worker has printed a line. Then all saves must succeed.
func duringWrite(t *testing.T, command []string, line string) {
	t.Helper()
	j := newJob(t, 1, command...)
	j.cfg.StagingSlots = 1
	g := j.gated("r00000.safetensors")
	j.start()
	g.await(t)
	j.out.await(t, 1, line)
	close(g.open)
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
	wantEnded(t, []string{"step-1.a1", "step-2.a1"}, nil)
}

// A save during the write of the last one waits for the slot; the bytes being
// written do not change.
func TestSaveDuringWrite(t *testing.T) {
	t.Parallel()
	duringWrite(t, savesTwice, "busy")
}

var neverSeals = workerRole("never seals", func(ctx context.Context, c *client.Client) error {
	s, err := c.Begin(ctx, 1, state(1, c.Rank, 2), client.SaveOptions{})
	if err != nil || c.Rank == 1 {
		return errors.Join(err, untilTerm(ctx))
	}
	if err := s.Seal(ctx); err != nil {
		return err
	}
	why := s.Wait(ctx, client.Committed)
	// Its bytes are still read: there is no slot for another save.
	soon, cancel := context.WithTimeout(ctx, shortly)
	defer cancel()
	if _, err := c.Save(soon, 2, state(2, 0, 2), client.SaveOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("a save while the slot is read: %w", err)
	}
	emit("aborted: %v", why)
	return errors.New("enough")
})

// Files that are written after their save was aborted are removed too. Until then
// their memory is not reused.
func TestAbortDuringWrite(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, neverSeals...)
	j.cfg.SaveTimeout, j.cfg.StagingSlots = saveEnds, 1
	g := j.gated("step-1")
	j.start()
	g.await(t)
	j.out.await(t, 1, "[rank0] aborted: ")
	close(g.open)
	if err := j.wait(); err == nil {
		t.Fatal("the worker's failure is lost")
	}
	wantEnded(t, nil, []string{"step-1.a1"})
	if _, err := os.Stat(dirOf(t, "step-1.a1")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("leftovers of the aborted save: %v", err)
	}
}
