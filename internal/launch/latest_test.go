package launch_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
)

// loadLatest loads the checkpoint that latest resolves to and prints its name.
func loadLatest(ctx context.Context, c *client.Client) error {
	got := state(0, c.Rank, c.WorldSize)
	loaded, err := c.Load(ctx, &got, client.LoadOptions{Ref: "latest"})
	if err != nil {
		return err
	}
	emit("loaded %s with %v", loaded.Checkpoint, got.Tensors[1].Data[0])
	return nil
}

func saveStep(ctx context.Context, c *client.Client, step int64) error {
	s, err := c.Save(ctx, step, state(step, c.Rank, c.WorldSize), client.SaveOptions{})
	if err != nil {
		return err
	}
	return s.Wait(ctx, client.Committed)
}

var loadsAroundCommit = workerRole("loads latest around a commit", func(ctx context.Context, c *client.Client) error {
	if err := saveStep(ctx, c, 1); err != nil {
		return err
	}
	if c.Rank == 1 {
		if err := meet(ctx, c); err != nil {
			return err
		}
		if err := saveStep(ctx, c, 2); err != nil {
			return err
		}
		return loadLatest(ctx, c)
	}
	// This rank asks while step 1 is the newest: the next save is sealed here and
	// not yet begun by the other rank, which waits until this one has asked.
	if _, err := c.Save(ctx, 2, state(2, c.Rank, c.WorldSize), client.SaveOptions{}); err != nil {
		return err
	}
	asked := make(chan error, 1)
	go func() { asked <- loadLatest(ctx, c) }()
	if err := meet(ctx, c); err != nil {
		return err
	}
	return <-asked
})

// Two ranks that ask for latest, the first before a commit and the second after it, get the
// same checkpoint.
func TestLoadLatestAroundCommit(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, loadsAroundCommit...).must()
	for _, rank := range []string{"[rank0] ", "[rank1] "} {
		if got := j.out.lines(rank + "loaded "); !slices.Equal(got, []string{"step-2.a1 with 2"}) {
			t.Errorf("%sloaded %q", rank, got)
		}
	}
	if begun := one[events.RestoreBegun](t, j.cfg.Run); begun.Checkpoint != "step-2.a1" {
		t.Errorf("%+v", begun)
	}
}

var savesThree = workerRole("saves steps 1 to 3", func(ctx context.Context, c *client.Client) error {
	for step := range int64(3) {
		if err := saveStep(ctx, c, step+1); err != nil {
			return err
		}
	}
	return nil
})

var loadsLatestTwice = workerRole("loads latest before and after a save", func(ctx context.Context, c *client.Client) error {
	emit("resumes %s", c.Resume)
	if err := loadLatest(ctx, c); err != nil {
		return err
	}
	if err := saveStep(ctx, c, 2); err != nil {
		return err
	}
	return loadLatest(ctx, c)
})

// After resuming from an older checkpoint, the line continues from there: latest
// is the newest of that line, not the checkpoint with the greatest step, nor the
// one saved last before. The others keep their IDs.
func TestLatestAfterRollback(t *testing.T) {
	t.Parallel()
	newJob(t, 2, savesThree...).must()
	back := newJob(t, 2, loadsLatestTwice...)
	back.cfg.Resume = "step-1"
	back.must()
	for rank := range 2 {
		if got := back.out.lines(fmt.Sprintf("[rank%d] ", rank)); !slices.Equal(got, []string{
			"resumes step-1.a1", "loaded step-1.a1 with 1", "loaded step-2.a2 with 2",
		}) {
			t.Errorf("rank %d printed %q", rank, got)
		}
	}
	wantText(t, newJob(t, 1, resumesFrom...).must().out, "resumes step-2.a2\n")
	old := newJob(t, 1, resumesFrom...)
	old.cfg.Resume = "step-3.a1"
	wantText(t, old.must().out, "resumes step-3.a1\n")
}
