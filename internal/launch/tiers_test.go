package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

var restoresWide = workerRole("restores a wide state when a rank was killed", func(ctx context.Context, c *client.Client) error {
	want := wide(1, c.Rank, c.WorldSize, false)
	if c.Attempt > 1 {
		got := wide(0, c.Rank, c.WorldSize, false)
		if _, err := c.Load(ctx, &got, client.LoadOptions{Strict: true}); err != nil {
			return err
		}
		return sameWide(got, want)
	}
	if err := saveAll(ctx, c, 1, want, client.SaveOptions{}); err != nil {
		return err
	}
	emit("pid %d", os.Getpid())
	return untilTerm(ctx)
})

// flip changes a byte of a file.
func flip(t *testing.T, path string, at int64) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if _, err := f.WriteAt([]byte{data[at] ^ 1}, at); err != nil {
		t.Fatal(err)
	}
}

// slotsOf are the non-empty staging files of a rank.
func slotsOf(t *testing.T, j *job, rank int) []string {
	t.Helper()
	return slices.DeleteFunc(slots(t, j), func(path string) bool {
		data, err := os.ReadFile(path)
		return err != nil || !strings.HasPrefix(filepath.Base(path), fmt.Sprintf("r%05d.save.", rank)) || !strings.HasPrefix(string(data), "CKPTSLOT")
	})
}

// The attempt after a rank was killed restores committed data that is left in
// shared memory from there, and the rest from the files.
func TestRestoreTiers(t *testing.T) {
	t.Parallel()
	const share = rows / 2 * 150_000
	for _, c := range []struct {
		name   string
		change func(t *testing.T, j *job)
		tier   string
		slots  int64
		warns  bool
	}{
		{"whole", func(*testing.T, *job) {}, "slots", wideBytes, false},
		{"a byte of a slot is another", func(t *testing.T, j *job) {
			path := slotsOf(t, j, 1)[0]
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			flip(t, path, info.Size()-share) // of the one tensor that rank 1 has written
		}, "slots+files", -1, true},
		{"files are damaged", func(t *testing.T, _ *job) {
			for rank := range 2 {
				if err := os.Truncate(filepath.Join(dirOf(t, "step-1.a1"), fmt.Sprintf("r%05d.safetensors", rank)), 4096); err != nil {
					t.Fatal(err)
				}
			}
		}, "slots", wideBytes, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, restoresWide...)
			j.cfg.MaxRestarts = 1
			j.start()
			j.out.await(t, 1, "[rank0] pid ")
			pid, err := strconv.Atoi(j.out.await(t, 1, "[rank1] pid ")[0])
			if err != nil {
				t.Fatal(err)
			}
			c.change(t, j)
			if err := unix.Kill(pid, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if err := j.wait(); err != nil {
				t.Fatal(err)
			}
			got := one[events.RestoreCompleted](t, runOf(t))
			if got.Tier != c.tier || c.slots >= 0 && got.Slots != c.slots || c.slots < 0 && (got.Slots == 0 || got.Slots == got.Bytes) {
				t.Errorf("restore.completed: %+v, want tier %q with %d bytes of slots", got, c.tier, c.slots)
			}
			if warned := strings.Contains(j.log.String(), "shared memory differs from the committed checkpoint"); warned != c.warns {
				t.Errorf("warned %t", warned)
			}
		})
	}
}

var loadsAfterTrainer = workerRole("loads what a dead trainer had saved", func(ctx context.Context, c *client.Client) error {
	return load(ctx, c, "", 2)
})

// After a trainer was killed, the next restores from its slots: those of a
// committed checkpoint, and those of a checkpoint that it finished itself, whose
// digests are not known yet. Damaged slots, and slots with the digests of another
// use, are ignored.
func TestRestoreAfterTrainer(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, gate string
		change     func(t *testing.T, path string)
		tier       string
	}{
		{"committed", checkpoint.ReceiptFile, nil, "slots"},
		{"finished by the next trainer", "r00001.safetensors", nil, "slots"},
		{"committed, a byte of a slot is another", checkpoint.ReceiptFile, func(t *testing.T, path string) { flip(t, path, 4096) }, "slots+files"},
		{"committed, a digest is another", checkpoint.ReceiptFile, func(t *testing.T, path string) { flip(t, path, 4095) }, "slots"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			killTrainer(t, c.gate)
			j := newJob(t, 2, loadsAfterTrainer...)
			if c.change != nil {
				c.change(t, slotsOf(t, j, 1)[0])
			}
			j.must()
			wantEnded(t, []string{"step-2.a1"}, nil)
			if got := one[events.RestoreCompleted](t, runOf(t)); got.Tier != c.tier || got.Slots == 0 {
				t.Errorf("restore.completed: %+v, want tier %q", got, c.tier)
			}
			if _, err := os.Stat(arenasOf(j)); !os.IsNotExist(err) {
				t.Errorf("memory is not freed: %v", err)
			}
		})
	}
}

var loadsAllSaves = workerRole("loads all that it has saved", func(ctx context.Context, c *client.Client) error {
	for step := range int64(5) {
		if err := save(ctx, c, step); err != nil {
			return err
		}
	}
	for step := range int64(5) {
		if err := load(ctx, c, fmt.Sprintf("step-%d", step), step); err != nil {
			return err
		}
	}
	return nil
})

// The newest checkpoints stay in memory, as many as there are slots.
func TestNewestStaysInMemory(t *testing.T) {
	t.Parallel()
	newJob(t, 1, loadsAllSaves...).must()
	var tiers []string
	for _, r := range bodiesOf[events.RestoreCompleted](t, runOf(t)) {
		tiers = append(tiers, r.Tier)
	}
	if want := []string{"files", "files", "files", "slots", "slots"}; !slices.Equal(tiers, want) {
		t.Errorf("tiers %q, want %q", tiers, want)
	}
}

var loadsAndSaves = workerRole("loads, saves and waits", func(ctx context.Context, c *client.Client) error {
	got, want := state(0, c.Rank, c.WorldSize), state(2, c.Rank, c.WorldSize)
	got.Values[1].Optional = true
	if _, err := c.Load(ctx, &got, client.LoadOptions{Strict: true}); err != nil {
		return err
	}
	if c.Rank > 1 {
		want.Values[1].Data = got.Values[1].Data // it was saved by two ranks
	}
	if err := errors.Join(same(got, want), save(ctx, c, 3)); err != nil {
		return err
	}
	emit("saved")
	return untilTerm(ctx)
})

// A larger group restores from the slots of a smaller one too, and a smaller
// one frees what ranks that it has not had left.
func TestRestoreAfterTrainerOnOthers(t *testing.T) {
	t.Parallel()
	for _, ranks := range []int{1, 3} {
		t.Run(fmt.Sprint(ranks, " ranks"), func(t *testing.T) {
			t.Parallel()
			killTrainer(t, checkpoint.ReceiptFile)
			j := newJob(t, ranks, loadsAndSaves...)
			j.start()
			for n := range ranks {
				prefix := fmt.Sprintf("[rank%d] ", n)
				if ranks == 1 {
					prefix = ""
				}
				j.out.await(t, 1, prefix+"saved")
			}
			if ranks == 1 && len(slotsOf(t, j, 1)) > 0 {
				t.Error("the slot of a rank that does not exist any more is not freed by a save")
			}
			j.cancel(nil)
			if err := j.wait(); !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			if got := one[events.RestoreCompleted](t, runOf(t)); got.Tier != "slots" {
				t.Errorf("restore.completed: %+v", got)
			}
		})
	}
}
