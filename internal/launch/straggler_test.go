package launch_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/ckptstore/ckptstore/client"
)

var sealsTooLate = workerRole("seals too late", func(ctx context.Context, c *client.Client) error {
	first, err := c.Begin(ctx, 1, state(1, 0, 1), client.SaveOptions{})
	if err != nil {
		return err
	}
	var gone *client.AbortedError
	if err := first.Wait(ctx, client.Committed); !errors.As(err, &gone) {
		return fmt.Errorf("a save that is never sealed: %w", err)
	}
	second, err := c.Begin(ctx, 2, state(2, 0, 1), client.SaveOptions{})
	if err != nil {
		return err
	}
	// There is no slot to copy into any more.
	if err := first.Seal(ctx); !errors.As(err, &gone) {
		return fmt.Errorf("the late seal: %w", err)
	}
	if err := second.Seal(ctx); err != nil {
		return err
	}
	if err := second.Wait(ctx, client.Committed); err != nil {
		return err
	}
	// Nor can a seal be repeated while the next save uses the memory.
	if err := second.Seal(ctx); err == nil || !strings.Contains(err.Error(), "sealed already") {
		return fmt.Errorf("the second seal: %w", err)
	}
	return load(ctx, c, "step-2", 2)
})

// A worker that copies after its save was aborted writes nowhere.
func TestLateSeal(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, sealsTooLate...)
	j.cfg.SaveTimeout = saveEnds
	j.must()
}

var namesItself = workerRole("names itself alone", func(ctx context.Context, c *client.Client) error {
	alone := func(name string) error {
		s, err := c.Save(ctx, 5, state(5, 0, 1), client.SaveOptions{Name: name, Participants: []int{c.Rank}})
		if err != nil {
			return err
		}
		return s.Wait(ctx, client.Committed)
	}
	if c.Rank == 0 {
		if err := alone("stage"); err != nil {
			return err
		}
		return meet(ctx, c)
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	if err := alone("stage"); err == nil || !strings.Contains(err.Error(), "must all name the same participants") {
		return fmt.Errorf("a save of a name that others have committed: %w", err)
	}
	return alone("stage1") // the slot is free again
})

// No rank learns that a checkpoint without its part was committed.
func TestSameNameOtherParticipants(t *testing.T) {
	t.Parallel()
	newJob(t, 2, namesItself...).must()
	wantEnded(t, []string{"stage.a1", "stage1.a1"}, nil)
}

var loadsAtOnce = workerRole("loads at once", func(ctx context.Context, c *client.Client) error {
	if err := save(ctx, c, 1); err != nil {
		return err
	}
	var all sync.WaitGroup
	errs := make(chan error, 16)
	for range cap(errs) {
		all.Go(func() { errs <- load(ctx, c, "step-1", 1) })
	}
	all.Wait()
	close(errs)
	var failed []error
	for err := range errs {
		failed = append(failed, err)
	}
	return errors.Join(failed...)
})

// Loads of one rank at the same time do not share memory.
func TestLoadsAtOnce(t *testing.T) {
	t.Parallel()
	newJob(t, 1, loadsAtOnce...).must()
}
