package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/store"
)

const (
	manyTensors = 3500
	manySaves   = 24
	lastOfMany  = 2  // the last save of so many tensors
	fewFiles    = 64 // descriptors that a trainer or a worker may have
)

// large is a state of 4 MB: in the first saves of many tensors, in the others
// of fewer, which takes less time.
func large(step int64) client.State {
	tensors := manyTensors
	if step > lastOfMany {
		tensors /= 50
	}
	s := model(tensors, 4_200_000)
	for i := range s.Tensors {
		s.Tensors[i].Data[0] = byte(step)
	}
	return s
}

var savesLarge = workerRole("saves many tensors", func(ctx context.Context, c *client.Client) error {
	for step := range int64(manySaves) {
		if err := saveAll(ctx, c, step, large(step), client.SaveOptions{}); err != nil {
			return err
		}
		emit("saved %d", step)
	}
	got := large(lastOfMany)
	overwrite(got)
	if _, err := c.Load(ctx, &got, client.LoadOptions{Ref: fmt.Sprint("step-", lastOfMany), Strict: true}); err != nil {
		return err
	}
	return same(got, large(lastOfMany))
})

// limited is a command with fewer descriptors.
func limited(files int, command ...string) []string {
	self, err := os.Executable()
	if err != nil {
		self = err.Error()
	}
	return append([]string{"/bin/sh", "-c", fmt.Sprintf(`ulimit -n %d; exec "$0" "$@"`, files), self}, command[1:]...)
}

// largeTrainer is a trainer of one worker in a process of its own: STORE MEMORY RUN.
var largeTrainer = role("trainer of many tensors", func(ctx context.Context, args []string) error {
	st, err := store.Open(ctx, store.Options{Location: args[0]})
	if err != nil {
		return err
	}
	defer func() { _ = st.Close() }()
	return launch.Run(ctx, config(args[2], 1, limited(fewFiles, savesLarge...), os.Stdout, os.Stderr), storeOf(st, args[1]))
})

// growth is how much more memory, in KiB, a trainer may have after the last saves
// than after the first: garbage not collected yet. With the race detector, pools
// drop what they are given, and memory has a shadow.
var growth = 32 << 10 * raceFactor

// usedBy is what a process has of this machine.
type usedBy struct{ kib, files, maps int }

func usedOf(t *testing.T, pid int) (u usedBy) {
	t.Helper()
	proc := fmt.Sprintf("/proc/%d/", pid)
	status, err := os.ReadFile(proc + "status")
	files, ferr := os.ReadDir(proc + "fd")
	maps, merr := os.ReadFile(proc + "maps")
	if err := errors.Join(err, ferr, merr); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if text, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			if u.kib, err = strconv.Atoi(strings.Fields(text)[0]); err != nil {
				t.Fatal(err)
			}
		}
	}
	u.files, u.maps = len(files), strings.Count(string(maps), "/ckptstore-memory-")
	return u
}

// The memory, descriptors and maps of a trainer do not grow with the number of
// saves, and neither it nor its worker needs descriptors for tensors.
func TestManySavesOfManyTensors(t *testing.T) {
	t.Parallel()
	shared := ownMemory(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	dir := filepath.Join(t.TempDir(), "store")
	if _, err := store.Init(ctx, dir, ""); err != nil {
		t.Fatal(err)
	}
	command := limited(fewFiles, append(slices.Clone(largeTrainer), dir, shared, runOf(t))...)
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	out, log := newTranscript(), newTranscript()
	cmd.Stdout, cmd.Stderr = out, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var early usedBy
	for step := range manySaves {
		out.await(t, step+1, "saved ")
		switch step {
		case manySaves / 3:
			early = usedOf(t, cmd.Process.Pid)
		case manySaves - 1:
			late := usedOf(t, cmd.Process.Pid)
			if late.kib > early.kib+growth || late.files > early.files+5 || late.maps > 4 {
				t.Errorf("the trainer has %+v after %d saves, and %+v after %d", early, manySaves/3+1, late, manySaves)
			}
		}
	}
	if files, err := filepath.Glob(filepath.Join(shared, "*", "*", "r*")); err != nil || len(files) > 3 { // two slots, and one to load
		t.Errorf("in shared memory: %q, %v", files, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\nworkers:\n%strainer:\n%s", err, out, log)
	}
}
