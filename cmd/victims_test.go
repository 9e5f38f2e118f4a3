//go:build outlive

package cmd_test

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// victim is one worker's process: a rank of an attempt of a run.
type victim struct {
	run           string
	attempt, rank int
}

// victims distinguishes workers that got SIGKILL from workers that died of it: a process
// may end by itself before the signal arrives.
type victims struct {
	trainers int
	signals  int             // that workers were sent
	sent     map[victim]bool // workers; true: the log has its end by SIGKILL
}

func (v *victims) workers() (n int) {
	for _, died := range v.sent {
		if died {
			n++
		}
	}
	return n
}

// enough reports whether enough processes have died for the test to be meaningful. With
// hope, workers that were sent the signal count as dead.
func (v *victims) enough(hope bool) bool {
	workers := v.workers()
	if hope {
		workers = len(v.sent)
	}
	return v.trainers >= killsOfKind && workers >= killsOfKind && v.trainers+workers >= kills
}

// killWorker sends SIGKILL to one of a run's workers, if there is one.
func (v *victims) killWorker(t *testing.T, random *rand.Rand, run string) {
	t.Helper()
	pid := pick(random, marked(t, run, "RANK="))
	if pid == 0 {
		return
	}
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return // gone
	}
	who := victim{run: run}
	for entry := range bytes.SplitSeq(env, []byte{0}) {
		name, value, _ := bytes.Cut(entry, []byte("="))
		number, _ := strconv.Atoi(string(value)) // of what is a number
		switch string(name) {
		case "RANK":
			who.rank = number
		case "CKPTSTORE_ATTEMPT":
			who.attempt = number
		}
	}
	if syscall.Kill(pid, syscall.SIGKILL) == nil && !v.sent[who] {
		v.signals++
		v.sent[who] = false
	}
}

// count finds the workers that died of the signal in the log, once their job has ended.
// The others ended by themselves, or with a trainer that could no longer log it.
func (v *victims) count(t *testing.T, dir string) {
	t.Helper()
	s, err := store.Open(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	last, err := s.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for r, err := range s.Log.Read(t.Context(), 1, last) {
		if err != nil {
			t.Fatal(err)
		}
		body, err := r.Body()
		if err != nil {
			t.Fatal(err)
		}
		e, ok := body.(*events.WorkerExited)
		if !ok || e.Signal != "SIGKILL" {
			continue
		}
		who := victim{r.Scope.Run, e.Attempt, e.Rank}
		if _, ok := v.sent[who]; ok {
			v.sent[who] = true
		}
	}
	maps.DeleteFunc(v.sent, func(_ victim, died bool) bool { return !died })
}

// plant puts a checkpoint of another store where a run's first save would go, and returns
// its directory and contents.
func plant(t *testing.T, dir, run string) (path string, files map[string]string) {
	t.Helper()
	other := filepath.Join(t.TempDir(), "other")
	cmd := exec.CommandContext(t.Context(), "trainer", "run", "-q", "--store", other, "--name", run, fmt.Sprint("--nproc=", killWorld),
		"--", "trainer", "demo-worker", fmt.Sprint("--steps=", killEvery), fmt.Sprint("--save-every=", killEvery))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	ref := checkpoint.RefOf(run, projections.DefaultTrial, fmt.Sprintf("step-%d.a1", killEvery)).String()
	path = filepath.Join(dir, "data", ref)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(path, os.DirFS(filepath.Join(other, "data", ref))); err != nil {
		t.Fatal(err)
	}
	return path, filesIn(t, path)
}

// checkPlanted checks that the planted checkpoint is unchanged.
func checkPlanted(t *testing.T, path string, want map[string]string) {
	t.Helper()
	if got := filesIn(t, path); len(want) == 0 || !maps.Equal(got, want) {
		t.Errorf("%s, which another store has committed, has %d of %d files, or others", path, len(got), len(want))
	}
}
