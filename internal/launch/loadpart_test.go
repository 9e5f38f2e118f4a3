package launch_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
)

var loadsInParts = workerRole("loads with some of the ranks", func(ctx context.Context, c *client.Client) error {
	want := state(1, c.Rank, c.WorldSize)
	if err := saveAll(ctx, c, 1, want, client.SaveOptions{}); err != nil {
		return err
	}
	load := func(participants ...int) error {
		got := state(0, c.Rank, c.WorldSize)
		overwrite(got)
		if _, err := c.Load(ctx, &got, client.LoadOptions{Ref: "step-1", Strict: true, Participants: participants}); err != nil {
			return err
		}
		return same(got, want)
	}
	// Each of them would wait forever for a rank that does not take part.
	if c.Rank == 1 {
		if err := load(1); err != nil {
			return err
		}
	} else if err := load(2, 0); err != nil {
		return err
	}
	if err := load(); err != nil {
		return err
	}
	return refused(load((c.Rank+1)%c.WorldSize), 400)
})

// Ranks that load alone get their part, and all ranks together do so after that.
func TestLoadInParts(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, loadsInParts...).must()
	wantText(t, j.out, "[rank1] refused rank 1 takes part without being one of the participants [2]")
	plans := map[int][]int{}
	for _, p := range bodiesOf[events.LoadPlan](t, runOf(t)) {
		plans[p.Load] = append(plans[p.Load], p.Rank)
	}
	// Rank 1 may be done, and wait for all, before the others begin.
	sizes := map[int]bool{}
	for _, ranks := range plans {
		sizes[len(ranks)] = true
	}
	if len(plans) != 3 || len(sizes) != 3 {
		t.Errorf("loads and their ranks: %v", plans)
	}
}

var cannotLoad = workerRole("reports that it cannot load", func(ctx context.Context, c *client.Client) error {
	want := state(1, c.Rank, c.WorldSize)
	if err := saveAll(ctx, c, 1, want, client.SaveOptions{}); err != nil {
		return err
	}
	got := state(0, c.Rank, c.WorldSize)
	if c.Rank == 1 {
		if err := c.RefuseLoad(ctx, client.LoadOptions{Ref: "step-1"}, `"bias" is sparse`); err != nil {
			return err
		}
	} else {
		_, err := c.Load(ctx, &got, client.LoadOptions{Ref: "step-1"})
		if err := refused(err, 409); err != nil {
			return err
		}
	}
	// Everything continues.
	if _, err := c.Load(ctx, &got, client.LoadOptions{Ref: "step-1"}); err != nil {
		return err
	}
	return errors.Join(same(got, want), meet(ctx, c))
})

// A rank that cannot load is named to the others, whether they join before it or
// after.
func TestRankCannotLoad(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, cannotLoad...).must()
	for _, rank := range []int{0, 2} {
		got := j.out.lines(fmt.Sprintf("[rank%d] refused ", rank))
		if len(got) != 1 || !strings.Contains(got[0], `rank 1 cannot take part in it: "bias" is sparse`) {
			t.Errorf("rank %d got %q", rank, got)
		}
	}
}
