package launch_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/store"
)

var savesAndStages = workerRole("saves once and stages once", func(ctx context.Context, c *client.Client) error {
	if c.Attempt > 1 {
		emit("resumes %s", c.Resume)
		if c.Resume == "" {
			return nil
		}
		return load(ctx, c, "", 1)
	}
	if strings.Contains(c.Run, "after-another") {
		if err := save(ctx, c, 1); err != nil {
			return err
		}
	}
	s, err := c.Save(ctx, 2, state(2, c.Rank, 2), client.SaveOptions{})
	if err != nil {
		return err
	}
	if err := s.Wait(ctx, client.Staged); err != nil {
		return err
	}
	emit("staged")
	<-ctx.Done()
	return ctx.Err()
})

// stagingTrainer is a trainer in a process of its own that never writes the
// files of step 2: STORE MEMORY RUN.
var stagingTrainer = role("trainer that only stages", func(ctx context.Context, args []string) error {
	st, err := store.Open(ctx, store.Options{Location: args[0]})
	if err != nil {
		return err
	}
	defer func() { _ = st.Close() }()
	s := storeOf(st, args[1])
	if s.Data, err = data.Open(newGate("step-2.a1/r00001.safetensors"), st.Data.Dir()); err != nil {
		return err
	}
	s.Data.OfStore(st.ID)
	return launch.Run(ctx, config(args[2], 2, savesAndStages, os.Stdout, os.Stderr), s)
})

// Data that only memory held is no checkpoint. If the trainer was killed and the
// memory is gone, the run continues from the last committed checkpoint; or from
// scratch if there is none and the user did not require one. The memory that the
// dead trainer has left is freed on request, not before.
func TestStagedAndLost(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		resumes string
	}{{"after-another", "step-1.a1"}, {"alone", ""}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			shared := ownMemory(t)
			killStaging(t, shared)
			if freed, bytes, err := staging.Free(shared, home.ID); err != nil || len(freed) != 1 || bytes == 0 {
				t.Errorf("freed %q, %d bytes: %v", freed, bytes, err)
			}
			if left, err := filepath.Glob(filepath.Join(shared, "*", "*")); err != nil || len(left) > 0 {
				t.Fatalf("left in shared memory: %q, %v", left, err)
			}

			required := newJob(t, 2, savesAndStages...)
			required.store.Shared, required.cfg.Resume = shared, "require"
			err := required.run()
			if refused := errors.Is(err, launch.ErrConfig) && strings.Contains(err.Error(), "has no committed checkpoint"); refused != (c.resumes == "") || !refused && err != nil {
				t.Errorf("with --resume require: %v", err)
			}
			j := newJob(t, 2, savesAndStages...)
			j.store.Shared = shared
			j.must()
			for _, rank := range []string{"[rank0] ", "[rank1] "} {
				if got := j.out.lines(rank + "resumes "); !slices.Equal(got, []string{c.resumes}) {
					t.Errorf("%sresumed from %q, want %q", rank, got, c.resumes)
				}
			}
			if c.resumes == "" {
				wantText(t, j.log, `resume="nothing: a fresh start"`)
			}
			committed, aborted := ended(t, runOf(t))
			if !slices.Equal(aborted, []string{"step-2.a1"}) || slices.Contains(committed, "step-2.a1") {
				t.Errorf("committed %q, aborted %q", committed, aborted)
			}
		})
	}
}

// killStaging runs the trainer until both ranks have staged step 2, and kills it.
// While it is alive, its memory is not freed.
func killStaging(t *testing.T, shared string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, stagingTrainer[0], append(stagingTrainer[1:], home.Location, shared, runOf(t))...)
	out, log := newTranscript(), &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = out, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		if t.Failed() {
			t.Logf("workers:\n%strainer:\n%s", out, log)
		}
	}()
	out.await(t, 1, "[rank0] staged")
	out.await(t, 1, "[rank1] staged")
	if freed, _, err := staging.Free(shared, home.ID); err != nil || len(freed) > 0 {
		t.Errorf("freed %q of a trainer that is alive: %v", freed, err)
	}
}

// ownMemory is a directory for staging slots that no other test uses.
func ownMemory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(memory, "own") //nolint:usetesting // it has to be in shared memory
	if err != nil {
		t.Fatal(err)
	}
	return dir
}
