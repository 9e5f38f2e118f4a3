package launch_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/launch"
)

// loadsResume loads the checkpoint to resume from, and prints its name.
var loadsResume = workerRole("loads what it resumes from", func(ctx context.Context, c *client.Client) error {
	if c.Resume == "" {
		emit("starts afresh")
		return nil
	}
	got := state(0, c.Rank, c.WorldSize)
	loaded, err := c.Load(ctx, &got, client.LoadOptions{Ref: c.Resume})
	if err != nil {
		return err
	}
	emit("resumes %s with %v", loaded.Checkpoint, got.Tensors[1].Data[0])
	return nil
})

// filesOf is the directory of a checkpoint of the test's run.
func filesOf(t *testing.T, id string) string {
	return filepath.Join(home.Data.Dir(), events.EncodeName(runOf(t)), "main", id)
}

// damages damage the files of a checkpoint in one way.
var damages = map[string]struct {
	do   func(t *testing.T, dir string)
	says string
}{
	"directory":           {func(t *testing.T, dir string) { okay(t, os.RemoveAll(dir)) }, "none of its files exists"},
	"manifest":            {func(t *testing.T, dir string) { okay(t, os.Remove(matching(t, dir, "manifest-*"))) }, "manifest-"},
	"bit of the manifest": {func(t *testing.T, dir string) { flipBit(t, matching(t, dir, "manifest-*")) }, "manifest-"},
	"index":               {func(t *testing.T, dir string) { okay(t, os.Remove(filepath.Join(dir, "r00001.idx"))) }, "r00001.idx: missing"},
	"bit of the index":    {func(t *testing.T, dir string) { flipBit(t, filepath.Join(dir, "r00000.idx")) }, "r00000.idx: corrupt"},
	"data":                {func(t *testing.T, dir string) { okay(t, os.Remove(filepath.Join(dir, "r00000.safetensors"))) }, "r00000.safetensors: missing"},
	"short data": {func(t *testing.T, dir string) {
		path := filepath.Join(dir, "r00001.safetensors")
		info, err := os.Stat(path)
		okay(t, err)
		okay(t, os.Truncate(path, info.Size()-1))
	}, "r00001.safetensors"},
}

func okay(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func matching(t *testing.T, dir, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(found) != 1 {
		t.Fatalf("%s: %q, %v", pattern, found, err)
	}
	return found[0]
}

func flipBit(t *testing.T, path string) {
	t.Helper()
	data, err := os.ReadFile(path)
	okay(t, err)
	data[len(data)/2] ^= 1
	okay(t, os.Chmod(path, 0o600))
	okay(t, os.WriteFile(path, data, 0o600))
}

// TestResumeFallsBack: a job whose newest checkpoint has lost files resumes from
// the newest whole one of its line, and reports the passed-over checkpoints with
// the reasons; --resume require and a reference to that checkpoint refuse.
func TestResumeFallsBack(t *testing.T) {
	t.Parallel()
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newJob(t, 2, savesThree...).must()
			damage.do(t, filesOf(t, "step-3.a1"))

			for _, resume := range []string{"require", "step-3", runOf(t) + "@step-3.a1"} {
				j := newJob(t, 2, loadsResume...)
				j.cfg.Resume = resume
				err := j.run()
				if !errors.Is(err, launch.ErrNotWhole) {
					t.Fatalf("--resume %s: %v", resume, err)
				}
				for _, part := range []string{"--resume " + resume, "step-3.a1", damage.says, "ckptstore verify", "backup"} {
					if !strings.Contains(err.Error(), part) {
						t.Errorf("--resume %s: %q is not in %v", resume, part, err)
					}
				}
				if n := len(j.out.lines("[rank")); n > 0 {
					t.Errorf("--resume %s: %d lines of workers", resume, n)
				}
			}

			j := newJob(t, 2, loadsResume...).must()
			for _, rank := range []string{"[rank0] ", "[rank1] "} {
				if got := j.out.lines(rank + "resumes "); !slices.Equal(got, []string{"step-2.a1 with 2"}) {
					t.Errorf("%sresumes %q", rank, got)
				}
			}
			wantText(t, j.log, "checkpoint passed over", "checkpoint=step-3.a1", damage.says, "resuming from an older checkpoint", "checkpoint=step-2.a1")
			all := bodiesOf[events.GroupStarted](t, runOf(t))
			last := all[len(all)-1]
			if last.Resume != "step-2.a1" || len(last.PassedOver) != 1 || last.PassedOver[0].Checkpoint != "step-3.a1" || !strings.Contains(last.PassedOver[0].Reason, damage.says) || last.MorePassedOver != 0 {
				t.Errorf("group.started is %+v", last)
			}
			if first := all[0]; len(first.PassedOver) > 0 {
				t.Errorf("the first attempt passed over %+v", first.PassedOver)
			}

			// The line continues from there: nothing needs to be passed over any
			// more.
			j = newJob(t, 2, loadsResume...).must()
			if strings.Contains(j.log.String(), "passed over") {
				t.Errorf("passed over again:\n%s", j.log)
			}
		})
	}
}

// TestResumeWithoutReceipt: a missing or torn receipt, as after a crash after the
// commit, costs no checkpoint: the log vouches for its manifest.
func TestResumeWithoutReceipt(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(path string) error{
		"missing": os.Remove,
		"torn":    func(path string) error { return os.WriteFile(path, []byte("{"), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newJob(t, 2, savesThree...).must()
			okay(t, damage(filepath.Join(filesOf(t, "step-3.a1"), "COMMIT.json")))
			for _, resume := range []string{"require", "auto"} {
				j := newJob(t, 2, loadsResume...)
				j.cfg.Resume = resume
				j.must()
				if got := j.out.lines("[rank0] resumes "); !slices.Equal(got, []string{"step-3.a1 with 3"}) {
					t.Errorf("--resume %s: resumes %q", resume, got)
				}
			}
		})
	}
}

// TestResumeFindsNothingWhole: if no checkpoint of the line is whole, nothing
// starts, not even from scratch.
func TestResumeFindsNothingWhole(t *testing.T) {
	t.Parallel()
	newJob(t, 2, savesThree...).must()
	for _, id := range []string{"step-1.a1", "step-2.a1", "step-3.a1"} {
		okay(t, os.RemoveAll(filesOf(t, id)))
	}
	j := newJob(t, 2, loadsResume...)
	err := j.run()
	if !errors.Is(err, launch.ErrNotWhole) {
		t.Fatalf("the job: %v", err)
	}
	for _, part := range []string{"step-3.a1: none of its files exists", "3 checked", "--resume none", "ckptstore verify"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in %v", part, err)
		}
	}
	if n := len(bodiesOf[events.GroupStarted](t, runOf(t))); n != 1 {
		t.Errorf("%d attempts were started", n)
	}
	j = newJob(t, 2, loadsResume...)
	j.cfg.Resume = "none"
	j.must()
	if got := j.out.lines("[rank0] starts "); !slices.Equal(got, []string{"afresh"}) {
		t.Errorf("with --resume none: %q", got)
	}
}

// TestForkOfDamagedCheckpoint: a trial that was forked from another one of its run does not fall
// back to the checkpoints before its origin.
func TestForkOfDamagedCheckpoint(t *testing.T) {
	t.Parallel()
	first := newJob(t, 2, savesThree...)
	first.cfg.Trial = "t1"
	first.must()
	created, err := events.NewDecision((&ghost{t: t}).stamp(), events.Aggregate{Run: runOf(t), Trial: "t1-1"}, &events.TrialCreated{
		Parent: &events.TrialParent{Run: runOf(t), Trial: "t1", Checkpoint: "step-3.a1"},
	})
	okay(t, err)
	_, err = home.Log.Decide(t.Context(), created, 0)
	okay(t, err)
	fork := func() *job {
		j := newJob(t, 2, loadsResume...)
		j.cfg.Trial = "t1-1"
		return j
	}
	origin := runOf(t) + "/t1@step-3.a1"
	okay(t, os.RemoveAll(home.Data.Path(checkpoint.RefOf(runOf(t), "t1", "step-3.a1"))))
	if err := fork().run(); !errors.Is(err, launch.ErrNotWhole) || !strings.Contains(err.Error(), origin+": none of its files exists") {
		t.Errorf("the job: %v", err)
	}
}

// losesNewest saves steps 4 and 5, removes the given directory, and dies; a later
// attempt prints what it resumes from.
var losesNewest = role("saves two steps and loses the second", func(ctx context.Context, args []string) error {
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if c.Attempt > 2 {
		emit("resumes %s", c.Resume)
		return nil
	}
	for _, step := range []int64{4, 5} {
		if err := saveStep(ctx, c, step); err != nil {
			return err
		}
	}
	return errors.Join(os.RemoveAll(args[0]), errors.New("dies"))
})

// TestRestartFallsBack: the next attempt of a job falls back too; with --resume
// require the job ends instead.
func TestRestartFallsBack(t *testing.T) {
	t.Parallel()
	for _, resume := range []string{"auto", "require"} {
		t.Run(resume, func(t *testing.T) {
			t.Parallel()
			newJob(t, 1, savesThree...).must()
			j := newJob(t, 1, append(slices.Clone(losesNewest), filesOf(t, "step-5.a2"))...)
			j.cfg.Resume, j.cfg.MaxRestarts = resume, 3
			err := j.run()
			if resume == "require" {
				if !errors.Is(err, launch.ErrNotWhole) || !strings.Contains(err.Error(), "step-5.a2: none of its files exists") || !errors.As(err, new(*launch.FailedError)) {
					t.Errorf("the job: %v", err)
				}
				if got := j.out.lines("resumes "); len(got) > 0 {
					t.Errorf("resumes %q", got)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := j.out.lines("resumes "); !slices.Equal(got, []string{"step-4.a2"}) {
				t.Errorf("resumes %q", got)
			}
			wantText(t, j.log, "checkpoint passed over", "step-5.a2", "none of its files exists")
		})
	}
}
