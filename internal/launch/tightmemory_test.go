package launch_test

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
)

// A restore from slots that hold the wanted layout needs no other memory.
func TestRestoreInTightMemory(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, restoresWide...)
	j.cfg.MaxRestarts, j.cfg.StagingSlots = 1, 1
	j.store = launch.Bounded(j.store, wideBytes*4/3) // the slots of both ranks, and less than one more
	j.start()
	j.out.await(t, 1, "[rank0] pid ")
	pid, err := strconv.Atoi(j.out.await(t, 1, "[rank1] pid ")[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
	if got := one[events.RestoreCompleted](t, runOf(t)); got.Tier != "slots" || got.Slots != wideBytes {
		t.Errorf("restore.completed: %+v", got)
	}
	if strings.Contains(j.log.String(), "shared memory") {
		t.Error("there was a want of memory")
	}
}

var restoresWhole = workerRole("restores a whole tensor on one rank when another was killed", func(ctx context.Context, c *client.Client) error {
	if c.Attempt == 1 {
		if err := saveAll(ctx, c, 1, wide(1, c.Rank, c.WorldSize, false), client.SaveOptions{}); err != nil {
			return err
		}
		emit("pid %d", os.Getpid())
		return untilTerm(ctx)
	}
	got, want := wide(0, c.Rank, c.WorldSize, c.Rank == 0), wide(1, c.Rank, c.WorldSize, c.Rank == 0)
	if _, err := c.Load(ctx, &got, client.LoadOptions{Strict: true}); err != nil {
		return err
	}
	return sameWide(got, want)
})

// Slots that can be shared only in part are released like others if the rest
// does not fit in addition to them.
func TestLentSlotsGiveWay(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, restoresWhole...)
	j.cfg.MaxRestarts, j.cfg.StagingSlots = 1, 1
	j.store = launch.Bounded(j.store, wideBytes*7/4) // the slots, and less than the whole tensor
	j.start()
	j.out.await(t, 1, "[rank0] pid ")
	pid, err := strconv.Atoi(j.out.await(t, 1, "[rank1] pid ")[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
	readsFiles(t, j)
}

// readsFiles expects the one restore of a job to have read the files for lack of
// memory, and to have logged it.
func readsFiles(t *testing.T, j *job) {
	t.Helper()
	if got := one[events.RestoreCompleted](t, runOf(t)); got.Tier != "files" || got.Slots != 0 {
		t.Errorf("restore.completed: %+v", got)
	}
	if failed := bodiesOf[events.RestoreFailed](t, runOf(t)); len(failed) > 0 {
		t.Errorf("restore.failed: %+v", *failed[0])
	}
	wantText(t, j.log, "shared memory has no room for a load and the staging slots", "no space left on device")
}

var loadsBesideSlot = workerRole("loads next to its own slot", func(ctx context.Context, c *client.Client) error {
	want := wide(1, c.Rank, c.WorldSize, false)
	if err := saveAll(ctx, c, 1, want, client.SaveOptions{}); err != nil {
		return err
	}
	got := wide(0, c.Rank, c.WorldSize, false)
	if _, err := c.Load(ctx, &got, client.LoadOptions{Ref: "step-1", Strict: true}); err != nil {
		return err
	}
	return errors.Join(sameWide(got, want), saveAll(ctx, c, 2, wide(2, c.Rank, c.WorldSize, false), client.SaveOptions{}))
})

// A load by workers that have saved themselves does not fit in addition to their
// slots: it takes the memory of these, and reads the files. The next save finds
// memory again.
func TestLoadInTightMemory(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, loadsBesideSlot...)
	j.cfg.StagingSlots = 1
	j.store = launch.Bounded(j.store, wideBytes*3/2)
	j.must()
	readsFiles(t, j)
	wantEnded(t, []string{"step-1.a1", "step-2.a1"}, nil)
}

// If even this leaves too little memory for a load, the error includes the next
// step.
func TestLoadWithoutMemory(t *testing.T) {
	t.Parallel()
	save := newJob(t, 2, savesWide[0], savesWide[1], savesWide[2], "false").must()
	j := newJob(t, 1, save.cfg.Command...)
	j.store = launch.Bounded(j.store, wideBytes/2)
	if err := j.fails(); !strings.Contains(err.Error(), "exited with code 1") {
		t.Errorf("error %v", err)
	}
	if got := one[events.RestoreFailed](t, runOf(t)); !strings.Contains(got.Error, "make room in shared memory") {
		t.Errorf("restore.failed: %+v", *got)
	}
}
