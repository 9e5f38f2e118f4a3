//go:build outlive

package cmd_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

const (
	kills       = 40 // deaths by SIGKILL at least, of trainers and workers
	killsOfKind = 10 // of each at least
	killEvery   = 4  // steps between saves
	killWorld   = 2
	killLimit   = 4 * time.Minute // for all of them, on a slow machine
)

// TestKillAtRandomMoments kills the trainer or a worker at random moments. Every committed
// checkpoint must be intact and bit for bit equal to that of a run that was never killed.
func TestKillAtRandomMoments(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("KILL_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("repeat with KILL_SEED=%d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	dir := filepath.Join(t.TempDir(), "store")
	if out, err := job(t, dir, "reference").CombinedOutput(); err != nil {
		t.Fatalf("reference run: %v\n%s", err, out)
	}

	planted, files := plant(t, dir, "killed-1")
	v, runs, lives, began := victims{sent: map[victim]bool{}}, 1, 0, time.Now()
	for !v.enough(false) {
		if time.Since(began) > killLimit {
			t.Fatalf("%d trainers and %d workers were killed within %v: too few", v.trainers, v.workers(), killLimit)
		}
		run := fmt.Sprint("killed-", runs)
		cmd := job(t, dir, run)
		out := &watched{seen: make(chan struct{}), text: "checkpoint committed"}
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		var err error
		lives++
		spared := lives%2 == 0 // until it has saved, however slow the machine is
		for alive := true; alive; {
			var next <-chan time.Time
			var saved <-chan struct{}
			switch {
			case v.enough(true): // the run may end
			case spared:
				saved = out.seen
			default:
				next = time.After(time.Duration(random.IntN(600)) * time.Millisecond)
			}
			select {
			case <-saved:
				spared = false
			case err = <-ended:
				alive = false
			case <-next:
				if random.IntN(2) == 0 {
					_ = cmd.Process.Kill() // it may have ended by itself
					err, alive = <-ended, false
				} else {
					v.killWorker(t, random, run)
				}
			}
		}
		switch {
		case err == nil:
			runs++ // it completed; the next victim is a new run
		case diedOf(cmd) == syscall.SIGKILL:
			v.trainers++
			waitGone(t, run)
		default:
			t.Fatalf("run %s: %v\n%s", run, err, out.String())
		}
		v.count(t, dir)
	}
	last := fmt.Sprint("killed-", runs)
	if out, err := job(t, dir, last).CombinedOutput(); err != nil {
		t.Fatalf("last run: %v\n%s", err, out)
	}
	waitGone(t, last)
	t.Logf("died of SIGKILL: %d trainers, %d workers of %d signals, in %d runs", v.trainers, v.workers(), v.signals, runs)
	checkAgainstReference(t, dir, planted)
	checkPlanted(t, planted, files)
}

func job(t *testing.T, dir, run string) *exec.Cmd {
	t.Helper()
	return exec.CommandContext(t.Context(), "trainer", "run", "--store", dir, "--name", run, "--max-restarts=-1", "--grace=1s",
		fmt.Sprint("--nproc=", killWorld), "--", "trainer", "demo-worker", fmt.Sprint("--steps=", killSteps), fmt.Sprint("--save-every=", killEvery))
}

func pick(random *rand.Rand, pids []int) int {
	if len(pids) == 0 {
		return 0
	}
	return pids[random.IntN(len(pids))]
}

// checkAgainstReference verifies every committed checkpoint and compares its contents
// with the reference checkpoint of the same step. Aborted checkpoints must have left no
// files, except the planted ones.
func checkAgainstReference(t *testing.T, dir, planted string) {
	ctx := t.Context()
	s, err := store.Open(ctx, store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	noneNamed(t, checkResumes(t, s))
	if left, err := filepath.Glob("/dev/shm/ckptstore-memory-*/ckptstore-" + s.ID[len(s.ID)-12:] + "-*"); err != nil || len(left) > 0 {
		t.Errorf("left in shared memory: %v %v", left, err)
	}
	runs, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{})
	if err != nil {
		t.Fatal(err)
	}
	runs = slices.DeleteFunc(runs, func(r projections.Run) bool { return r.Name == "reference" })
	want := map[int64]map[string]checkpoint.Digest{}
	missing, aborts := map[int64]bool{}, map[int64]bool{}
	var left []string
	committed, aborted := 0, 0
	for _, r := range append([]projections.Run{{Name: "reference"}}, runs...) {
		list, err := query.Ask(ctx, s.Views(), query.Checkpoints, query.Params{Run: r.Name, All: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range list {
			switch c.State {
			case projections.Committed:
			case projections.Aborted:
				aborted++
				aborts[c.Step] = true
				left = append(left, fmt.Sprintf("%s@%s: %s", c.Run, c.ID, c.Reason))
				path := filepath.Join(s.Data.Dir(), store.RefOf(c).String())
				if _, err := os.Stat(path); err == nil && path != planted {
					t.Errorf("%s@%s was aborted and its files are still there", c.Run, c.ID)
				}
				continue
			default:
				t.Errorf("%s@%s is %s after its run has ended", c.Run, c.ID, c.State)
				continue
			}
			got := contents(ctx, t, s, c)
			if r.Name == "reference" {
				want[c.Step], missing[c.Step] = got, true
				continue
			}
			committed++
			delete(missing, c.Step)
			if !maps.Equal(want[c.Step], got) {
				t.Errorf("%s@%s is not equal to the reference at step %d", c.Run, c.ID, c.Step)
			}
		}
	}
	t.Logf("checkpoints of killed runs: %d committed, all equal to the reference; %d aborted", committed, aborted)
	// One save of the first run is refused: its name is that of the planted checkpoint.
	// Saves overlap: a trainer may die when only the later of two is committed. Its
	// successor then resumes from that and aborts the earlier one.
	maps.DeleteFunc(missing, func(step int64, _ bool) bool { return aborts[step] })
	if len(want) != killSteps/killEvery || len(missing) > 0 || committed < len(want)/2 {
		t.Errorf("%d checkpoints of the reference were compared to %d of the killed runs: none of these is of step %v; aborted are\n%s",
			len(want), committed, slices.Sorted(maps.Keys(missing)), strings.Join(left, "\n"))
	}
}
