package launch_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/planner/retention"
)

var savesFive = workerRole("saves five times", func(ctx context.Context, c *client.Client) error {
	for step := range int64(5) {
		s, err := c.Save(ctx, step, state(step, c.Rank, c.WorldSize), client.SaveOptions{})
		if err != nil {
			return err
		}
		if err := s.Wait(ctx, client.Committed); err != nil {
			return err
		}
	}
	emit("saved five")
	return nil
})

// left are the checkpoints of a test's run that have a receipt.
func left(t *testing.T) (ids []string) {
	t.Helper()
	receipts, damaged, err := home.Data.Checkpoints(t.Context())
	if err != nil || len(damaged) > 0 {
		t.Fatal(err, damaged)
	}
	for _, r := range receipts {
		if r.Run == runOf(t) {
			ids = append(ids, r.Checkpoint)
		}
	}
	return ids
}

// TestKeep: checkpoints that the policy does not keep are deleted after each
// commit, and the next job resumes from the rest.
func TestKeep(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, savesFive...)
	j.cfg.Collect = func(ctx context.Context) error {
		_, err := home.Collect(ctx, collection.Options{Runs: []string{j.cfg.Run}, Policy: retention.Policy{Last: 2}, Apply: true})
		return err
	}
	j.must()
	if got := left(t); !slices.Equal(got, []string{"step-3.a1", "step-4.a1"}) {
		t.Errorf("left are %v", got)
	}
	if got := bodiesOf[events.CheckpointDeleted](t, runOf(t)); len(got) != 3 {
		t.Errorf("%d checkpoints were deleted, want 3", len(got))
	}
	newJob(t, 2, savesFive...).must()
	if got := left(t); len(got) != 7 {
		t.Errorf("left are %v", got)
	}
}

// TestKeepBeside: a slow collection delays no rank's saves, and a failing one is
// a warning.
func TestKeepBeside(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, savesFive...)
	release := make(chan struct{})
	j.cfg.Collect = func(ctx context.Context) error {
		select {
		case <-release:
			return errors.New("the disk is slow today")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	j.start()
	awaitText(t, j.out, "saved five")
	close(release)
	if err := j.wait(); err != nil {
		t.Error(err)
	}
	wantEnded(t, []string{"step-0.a1", "step-1.a1", "step-2.a1", "step-3.a1", "step-4.a1"}, nil)
	wantText(t, j.log, "some old checkpoints not deleted", "the disk is slow today")
}
