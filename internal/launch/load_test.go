package launch_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/collective"
)

var _ collective.Transport = client.Collectives{}

var loadsOther = workerRole("loads another than rank 0", func(ctx context.Context, c *client.Client) error {
	got := state(0, c.Rank, c.WorldSize)
	_, err := c.Load(ctx, &got, client.LoadOptions{Ref: fmt.Sprintf("step-%d", c.Rank)})
	if err := refused(err, 409); err != nil {
		return err
	}
	_, err = c.Load(ctx, &got, client.LoadOptions{})
	if err := refused(err, 409); err != nil {
		return err
	}
	_, err = c.Load(ctx, &got, client.LoadOptions{Ref: "absent"})
	return refused(err, 409)
})

// All ranks get the same checkpoint, or all get the error.
func TestLoadDisagreement(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, loadsOther...).must()
	for _, rank := range []string{"[rank0] ", "[rank1] "} {
		got := j.out.lines(rank + "refused ")
		want := []string{
			`load 1: rank 0 asks for "step-0" and rank 1 for "step-1"`,
			"load 2: there is nothing to resume from",
			"absent",
		}
		if !slices.EqualFunc(got, want, strings.Contains) {
			t.Errorf("%swas told %q, want %q", rank, got, want)
		}
	}
}

var neverLoads = workerRole("never loads", func(ctx context.Context, c *client.Client) error {
	if c.Rank == 1 {
		return untilTerm(ctx)
	}
	got := state(0, c.Rank, c.WorldSize)
	_, err := c.Load(ctx, &got, client.LoadOptions{Ref: "step-1"})
	return errors.Join(refused(err, 504), errors.New("without rank 1"))
})

var endsWithoutLoad = workerRole("ends without loading", func(ctx context.Context, c *client.Client) error {
	if c.Rank == 1 {
		return nil
	}
	got := state(0, c.Rank, c.WorldSize)
	_, err := c.Load(ctx, &got, client.LoadOptions{Ref: "step-1"})
	if err := refused(err, 409); err != nil {
		return err
	}
	if _, err = c.Load(ctx, &got, client.LoadOptions{Ref: "step-1"}); err == nil {
		return errors.New("a load with a rank that has ended")
	}
	if err := refused(err, 409); err != nil {
		return err
	}
	return refused(meet(ctx, c), 409)
})

// A load that a rank does not join ends with an error that names the rank.
func TestRankNeverLoads(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, neverLoads...)
	j.cfg.Collective = time.Second
	if failed := j.fails(); failed.Rank != 0 {
		t.Errorf("%+v", failed)
	}
	wantText(t, j.out, "[rank0] refused load 1 is a collective, and ranks [1] have not called it")
}

func TestRankEndsBeforeLoad(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, endsWithoutLoad...).must()
	if got := j.out.lines("[rank0] refused "); len(got) != 3 ||
		slices.ContainsFunc(got, func(s string) bool { return !strings.Contains(s, "rank 1 exited with code 0") }) {
		t.Errorf("rank 0 got %q", got)
	}
}

var collects = workerRole("collects", func(ctx context.Context, c *client.Client) error {
	group := c.Collectives()
	parts, err := group.AllGather(ctx, []byte{byte(group.Rank()), 0, 0xFF})
	if err != nil {
		return err
	}
	for rank, part := range parts {
		if !slices.Equal(part, []byte{byte(rank), 0, 0xFF}) {
			return fmt.Errorf("part %d is %v", rank, part)
		}
	}
	for root := range group.Size() {
		data := make([]byte, 100_000)
		if group.Rank() == root {
			data = slices.Repeat([]byte{byte(root) + 1}, len(data))
		}
		got, err := group.Broadcast(ctx, root, data)
		if err != nil {
			return err
		}
		if !slices.Equal(got, slices.Repeat([]byte{byte(root) + 1}, len(data))) {
			return fmt.Errorf("broadcast from %d gives %d bytes %v…", root, len(got), got[:1])
		}
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	_, err = group.AllGather(ctx, make([]byte, group.Rank()))
	return refused(err, 409)
})

// Collectives give every rank the bytes of all; a length that differs is an
// error for all, which names the ranks.
func TestCollectives(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, collects...).must()
	for _, rank := range []string{"[rank0] ", "[rank1] ", "[rank2] "} {
		got := strings.Join(j.out.lines(rank+"refused "), "")
		if !strings.Contains(got, "by rank 0") || !strings.Contains(got, "by rank 2") {
			t.Errorf("%swas told %q", rank, got)
		}
	}
}
