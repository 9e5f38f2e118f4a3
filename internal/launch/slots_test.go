package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

var fillsSlots = role("fills its slots", func(ctx context.Context, args []string) error {
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	// The plan is in the log, and all slots are in use.
	var saves []*client.Save
	for step := range int64(2) {
		s, err := c.Save(ctx, step, state(step, c.Rank, 2), client.SaveOptions{})
		if err != nil {
			return err
		}
		saves = append(saves, s)
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	if c.Rank == 0 { // the test lets it continue
		emit("full")
		pipe, err := os.Open(args[0])
		if err != nil {
			return err
		}
		if err := pipe.Close(); err != nil {
			return err
		}
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	for step := int64(2); step < 4; step++ {
		_, err := c.Save(ctx, step, state(step, c.Rank, 2), client.SaveOptions{})
		emit("save %d: skipped %t, busy %t", step, errors.Is(err, client.ErrSkipped), errors.Is(err, client.ErrBusy))
		if err := meet(ctx, c); err != nil { // the other rank has its answer too
			return err
		}
	}
	if c.Rank == 0 {
		emit("told")
	}
	for _, s := range saves { // then their slots are free
		if err := s.Wait(ctx, client.Committed); err != nil {
			return err
		}
	}
	return errors.Join(save(ctx, c, 9), load(ctx, c, "step-0", 0), load(ctx, c, "step-1", 1), load(ctx, c, "step-9", 9))
})

// A save that finds no slot is skipped or fails on all ranks. It leaves no
// checkpoint, is in the log, and does not affect staged saves.
func TestWhenBusy(t *testing.T) {
	t.Parallel()
	for _, busy := range []staging.WhenBusy{staging.BusySkip, staging.BusyFail} {
		t.Run(string(busy), func(t *testing.T) {
			t.Parallel()
			pipe := filepath.Join(t.TempDir(), "pipe")
			if err := unix.Mkfifo(pipe, 0o600); err != nil {
				t.Fatal(err)
			}
			j := newJob(t, 2, append(slices.Clone(fillsSlots), pipe)...)
			j.cfg.WhenBusy = busy
			g := j.gated("r00001.safetensors")
			j.start()
			g.await(t)
			j.out.await(t, 1, "[rank0] full")
			// Rank 0 has a free slot then, and rank 1 has none.
			awaitWritten(t, 0, "step-0.a1")
			if f, err := os.OpenFile(pipe, os.O_WRONLY, 0); err != nil || f.Close() != nil {
				t.Fatal(err)
			}
			j.out.await(t, 1, "[rank0] told")
			close(g.open)
			if err := j.wait(); err != nil {
				t.Fatal(err)
			}
			skip := busy == staging.BusySkip
			want := fmt.Sprintf("skipped %t, busy %t", skip, !skip)
			for rank := range 2 {
				for step := 2; step < 4; step++ {
					if got := j.out.lines(fmt.Sprintf("[rank%d] save %d: ", rank, step)); !slices.Equal(got, []string{want}) {
						t.Errorf("rank %d at step %d: %q, want %q", rank, step, got, want)
					}
				}
			}
			committed, aborted := ended(t, runOf(t))
			slices.Sort(committed)
			if len(committed) != 3 || committed[0] != "step-0.a1" || committed[1] != "step-1.a1" || len(aborted) > 0 {
				t.Errorf("committed %q, aborted %q", committed, aborted)
			}
			told := map[string]int{}
			for _, f := range bodiesOf[events.WriteFailed](t, runOf(t)) {
				if strings.Contains(f.Error, "all staging slots are in use") && strings.HasPrefix(f.Error, "skipped: ") == skip {
					told[f.Checkpoint]++
				}
			}
			if told["step-2.a1"] != 2 || told["step-3.a1"] != 2 {
				t.Errorf("write.failed of skipped saves: %v", told)
			}
		})
	}
}

// awaitWritten waits until the log has a rank's files of a checkpoint.
func awaitWritten(t *testing.T, rank int, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for r, err := range home.Log.Read(ctx, 1, 0) {
		if err != nil {
			t.Fatalf("the files of rank %d of %s are not written: %v", rank, id, err)
		}
		if r.Scope.Run != runOf(t) {
			continue
		}
		body, err := r.Body()
		if err != nil {
			t.Fatal(err)
		}
		if w, ok := body.(*events.WriteCompleted); ok && w.Rank == rank && w.Checkpoint == id {
			return
		}
	}
}

var twoAtOnce = workerRole("has two saves on their way", func(ctx context.Context, c *client.Client) error {
	var saves []*client.Save
	for step := range int64(2) {
		s, err := c.Save(ctx, step, state(step, 0, 1), client.SaveOptions{})
		if err != nil {
			return err
		}
		saves = append(saves, s)
	}
	emit("saved")
	for step, s := range saves {
		if err := s.Wait(ctx, client.Committed); err != nil {
			return err
		}
		if err := load(ctx, c, s.Checkpoint, int64(step)); err != nil {
			return err
		}
	}
	return nil
})

// While one save is being written, the next is copied in parallel.
func TestSaveBesideWrite(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, twoAtOnce...)
	g := j.gated("r00000.safetensors")
	j.start()
	g.await(t)
	j.out.await(t, 1, "saved")
	close(g.open)
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
	wantCommitted(t, "step-0.a1", "step-1.a1")
}

var saysSize = workerRole("saves what it can", func(ctx context.Context, c *client.Client) error {
	err := save(ctx, c, 1)
	emit("no space %t", errors.Is(err, client.ErrNoSpace))
	if err != nil {
		emit("%v", err)
	}
	return nil
})

// Less memory means one slot, which is logged once. If it is less than the user's
// setting allows, the error names the flag.
func TestStagingMemory(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		memory staging.Memory
		says   string
	}{
		{staging.Memory{Bytes: 3 * 8192}, "no space false"},
		{staging.Memory{Bytes: 4096}, "is more than the 4096 bytes of --staging-memory: raise it"},
	} {
		t.Run(c.says[:8], func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, saysSize...)
			j.cfg.StagingMemory = c.memory
			j.must()
			wantText(t, j.out, "[rank0] ", "[rank1] ", c.says)
			fewer := strings.Count(j.log.String(), "memory for fewer staging slots than configured")
			if want := map[bool]int{true: 1}[c.memory.Bytes > 4096]; fewer != want {
				t.Errorf("logged %d times, want %d:\n%s", fewer, want, j.log)
			}
		})
	}
}

// Memory, descriptors and maps of a worker, and the files in shared memory, do
// not grow with the number of saves.
func TestSavesKeepTheirMemory(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, append(slices.Clone(blocks), "50", "500000", "12")...).start()
	lines := j.out.await(t, 12, "used ")
	if files := slots(t, j); len(files) > 2 {
		t.Errorf("files in shared memory: %q", files)
	}
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
	var kib, fds, maps, laterKiB, laterFDs, laterMaps int
	if _, err := fmt.Sscan(lines[3], &kib, &fds, &maps); err != nil {
		t.Fatal(lines[3], err)
	}
	if _, err := fmt.Sscan(lines[11], &laterKiB, &laterFDs, &laterMaps); err != nil {
		t.Fatal(lines[11], err)
	}
	if laterFDs > fds || laterMaps > maps || maps > 2 || laterKiB > kib+8<<10 {
		t.Errorf("after 4 saves: %d KiB, %d descriptors, %d maps; after 12: %d, %d, %d", kib, fds, maps, laterKiB, laterFDs, laterMaps)
	}
}
