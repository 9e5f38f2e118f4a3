package store

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// ruined makes a store with three intact checkpoints of two runs, and one example of each kind of
// directory that is not a checkpoint.
func ruined(t *testing.T) (dir, id string) {
	t.Helper()
	dir = made(t)
	s := open(t, dir)
	for run, steps := range map[string][]int64{"a": {1, 2}, "run b/ü": {7}} {
		must(t, s, run, events.TrialCreated{}, events.GroupStarted{Attempt: 1, Job: "j", WorldSize: 1})
		for _, step := range steps {
			committed(t, s, run, step)
		}
	}
	damage := func(step int64, name string, change func([]byte) []byte) {
		paths, err := filepath.Glob(filepath.Join(committed(t, s, "c", step), name))
		if err != nil || len(paths) != 1 {
			t.Fatal(paths, err)
		}
		write(t, paths[0], string(change([]byte(read(t, paths[0])))))
	}
	flip := func(b []byte) []byte { b[len(b)/2] ^= 1; return b }
	must(t, s, "c", events.TrialCreated{}, events.GroupStarted{Attempt: 1, Job: "j", WorldSize: 1})
	damage(1, checkpoint.ReceiptFile, flip)
	damage(2, "manifest-*", flip)
	damage(3, "*.idx", flip)
	damage(4, "*.safetensors", func(b []byte) []byte { return b[:len(b)-1] })
	// A manifest without a commit, of an attempt that no receipt knows.
	w, m := written(t, s, "a", 3)
	if _, err := w.Finish(t.Context(), m, refuse); err == nil {
		t.Fatal("committed without the log")
	}
	data := s.Data.Dir()
	if err := os.Rename(filepath.Join(data, "a", trialName, "step-3.a1"), filepath.Join(data, "a", trialName, "step-3.a4")); err != nil {
		t.Fatal(err)
	}
	// A copy under another name, and one of another store.
	if err := os.CopyFS(filepath.Join(data, "a", trialName, "step-9.a1"), os.DirFS(filepath.Join(data, "a", trialName, "step-2.a1"))); err != nil {
		t.Fatal(err)
	}
	other := open(t, made(t))
	if err := os.CopyFS(filepath.Join(data, "a", trialName, "step-5.a1"), os.DirFS(committed(t, other, "a", 5))); err != nil {
		t.Fatal(err)
	}
	shut(t, other)
	shut(t, s)
	return dir, s.ID
}

// holdRecovered checks a recovered store against its original.
func holdRecovered(t *testing.T, r Recovered, dir, id string) {
	t.Helper()
	var have, reasons []string
	for _, c := range r.Checkpoints {
		have = append(have, c.Run+"@"+c.Checkpoint)
	}
	slices.Sort(have)
	if got := strings.Join(have, " "); got != "a@step-1.a1 a@step-2.a1 run b/ü@step-7.a1" {
		t.Errorf("recovered %s", got)
	}
	for _, x := range r.Rejected {
		reasons = append(reasons, filepath.Base(filepath.Dir(filepath.Dir(x.Path)))+"/"+filepath.Base(x.Path)+" "+x.Kind)
	}
	want := "a/step-3.a4 uncommitted, a/step-5.a1 foreign, a/step-9.a1 damaged, c/step-1.a1 damaged, c/step-2.a1 damaged, c/step-3.a1 damaged, c/step-4.a1 damaged"
	if got := strings.Join(reasons, ", "); got != want {
		t.Errorf("rejected %s\nwant %s", got, want)
	}
	if len(r.Unknown) == 0 || !slices.Equal(r.Formerly, []string{id}) || r.Store == id || r.Location != dir {
		t.Errorf("report %+v", r)
	}
	s := open(t, dir)
	defer shut(t, s)
	if s.ID != r.Store {
		t.Errorf("the store is %s, the report has %s", s.ID, r.Store)
	}
	created, info, err := s.Log.Open(t.Context())
	if err != nil || created.Store != r.Store || !slices.Equal(created.Formerly, []string{id}) || info.Last != r.Sequence {
		t.Errorf("the log begins with %+v and ends at %d, want %d (%v)", created, info.Last, r.Sequence, err)
	}
	for ref, step := range map[string]int64{"a": 2, "a@step-1": 1, "run b/ü@latest": 7} {
		c := ask(t, s, query.Resolve, query.Params{Ref: ref})
		if c.Step != step || c.State != projections.Committed || c.Superseded {
			t.Errorf("%s is %+v", ref, c)
		}
		sum, err := checkpoint.ParseDigest(c.Manifest)
		if err != nil {
			t.Fatal(err)
		}
		if report, err := s.Data.Verify(t.Context(), RefOf(c), sum, nil); err != nil || !report.Clean() {
			t.Errorf("%s: %v %v", ref, report.Findings, err)
		}
	}
	for _, j := range ask(t, s, query.Launches, query.Params{Run: "a"})[0].Jobs {
		if command := strings.Join(j.Command, " "); command != "" && command != "recover --api-key=[redacted]" {
			t.Errorf("the log has the command %s", command)
		}
	}
	// The attempt is above that of every directory.
	if trial := ask(t, s, query.Trial, query.Params{Run: "a", Trial: trialName}); trial.Attempt != 5 || trial.Head != "step-2.a1" {
		t.Errorf("trial %+v", trial)
	}
	// A recovered checkpoint may be deleted, and its run continued.
	committed(t, s, "a", 11)
	must(t, s, "a", events.CheckpointDeleted{Checkpoint: "step-1.a1"})
	if err := s.Data.RemoveCommitted(t.Context(), refOf("a", "step-1.a1")); err != nil {
		t.Error(err)
	}
}

// TestRecover recovers in place and into another directory, with the log missing, damaged and
// foreign, and with store.json missing.
func TestRecover(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		ruin  func(t *testing.T, dir string)
		aside bool // there was a log
		of    bool // the identity must be named
	}{
		{"no log", func(t *testing.T, dir string) { remove(t, dir, "log", "views") }, false, false},
		{"data alone", func(t *testing.T, dir string) { remove(t, dir, "log", "views", "store.json", "blobs", "LOCK") }, false, true},
		{"empty log", func(t *testing.T, dir string) {
			remove(t, dir, "log", "views")
			write(t, filepath.Join(dir, "log", "x"), "")
		}, true, false},
		{"a server that cannot read it", func(t *testing.T, dir string) {
			write(t, filepath.Join(filepath.Dir(filepath.Dir(blocksOf(t, dir)[0])), "meta.inf"), "garbage")
		}, true, false},
		{"another store's", func(t *testing.T, dir string) {
			remove(t, dir, "log")
			if err := os.CopyFS(filepath.Join(dir, "log"), os.DirFS(filepath.Join(made(t), "log"))); err != nil {
				t.Fatal(err)
			}
		}, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir, id := ruined(t)
			c.ruin(t, dir)
			before := snapshot(t, filepath.Join(dir, "data"))
			o := RecoverOptions{Location: filepath.Join(filepath.Dir(dir), "new"), From: dir, Command: []string{"recover", "--api-key=SECRET"}}
			if c.of {
				_, err := Recover(t.Context(), o)
				wrong(t, err, ErrDamaged, "store.json is gone", "--of", id)
				o.Of = []string{id}
			}
			whole := snapshot(t, dir)
			r, err := Recover(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			if !maps.Equal(whole, snapshot(t, dir)) {
				t.Error("what it was made from was changed")
			}
			holdRecovered(t, r, o.Location, id)
			o.Location, o.From = dir, ""
			if r, err = Recover(t.Context(), o); err != nil {
				t.Fatal(err)
			}
			if !maps.Equal(before, snapshot(t, filepath.Join(dir, "data"))) {
				t.Error("the data was changed")
			}
			if c.aside != (r.Aside != "") || c.aside && !exists(r.Aside) {
				t.Errorf("the old log is in %q", r.Aside)
			}
			holdRecovered(t, r, dir, id)
			_, err = Recover(t.Context(), o)
			wrong(t, err, ErrExists, "its log opens", "verify --log")
		})
	}
}

// TestRecoverRefuses: refused recoveries change nothing.
func TestRecoverRefuses(t *testing.T) {
	t.Parallel()
	dir, _ := ruined(t)
	_, err := Recover(t.Context(), RecoverOptions{Location: dir})
	wrong(t, err, ErrExists)
	_, err = Recover(t.Context(), RecoverOptions{Location: dir, From: dir})
	wrong(t, err, ErrLocation, "in place")
	_, err = Recover(t.Context(), RecoverOptions{Location: "nats://127.0.0.1:1"})
	wrong(t, err, ErrLocation)
	_, err = Recover(t.Context(), RecoverOptions{Location: made(t), From: dir})
	wrong(t, err, ErrExists)
	nowhere := filepath.Join(t.TempDir(), "x")
	_, err = Recover(t.Context(), RecoverOptions{Location: nowhere})
	wrong(t, err, ErrNoStore)
	if exists(nowhere) {
		t.Error("a directory was made")
	}
	owner := open(t, dir)
	_, err = Recover(t.Context(), RecoverOptions{Location: dir})
	wrong(t, err, ErrExists)
	shut(t, owner)
	remove(t, dir, "log")
	lock, err := tryLock(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Recover(t.Context(), RecoverOptions{Location: dir})
	wrong(t, err, ErrLocked)
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	remove(t, dir, "data/a", "data/run%20b%2F%C3%BC", "data/c/main/step-1.a1") // whose receipt was repaired
	before := snapshot(t, dir)
	r, err := Recover(t.Context(), RecoverOptions{Location: dir})
	wrong(t, err, ErrNothing, "of 3 directories")
	if len(r.Rejected) != 3 || !maps.Equal(before, snapshot(t, dir)) {
		t.Errorf("rejected %+v, or something was changed", r.Rejected)
	}
}

const dieEnv = "CKPTSTORE_TEST_DIE"

// recoverAndDie runs as another process, which is killed at its n-th step.
func recoverAndDie(ctx context.Context) error {
	n, err := strconv.Atoi(os.Getenv(dieEnv))
	if err != nil {
		return err
	}
	r, err := Recover(ctx, RecoverOptions{Location: os.Getenv("CKPTSTORE_TEST_DIR"), From: os.Getenv("CKPTSTORE_TEST_FROM"), step: func(string) error {
		if n--; n == 0 {
			return syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		return nil
	}})
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// TestRecoverKilled kills a recovery at each of its steps, and the next one early; the one after
// that reaches the same end, whatever was done before.
func TestRecoverKilled(t *testing.T) {
	t.Parallel()
	old, id := ruined(t)
	block, err := filepath.Rel(filepath.Join(old, "log"), blocksOf(t, old)[0])
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(old, "log", filepath.Dir(filepath.Dir(block)), "meta.inf"), "garbage")
	kept := read(t, filepath.Join(old, "log", block))
	for _, beside := range []bool{false, true} {
		t.Run(fmt.Sprint("elsewhere ", beside), func(t *testing.T) {
			t.Parallel()
			killed := 0
			for n, more := 1, true; more; n++ {
				dir, from := filepath.Join(t.TempDir(), "store"), old
				if !beside {
					from = ""
					if err := os.CopyFS(dir, os.DirFS(old)); err != nil {
						t.Fatal(err)
					}
				}
				for _, at := range []int{n, 2, 0} {
					r, done := recoverKilled(t, dir, from, at)
					if !done {
						killed++
						if _, begun, err := readJournal(dir); err != nil {
							t.Fatal(err)
						} else if begun {
							refused(t, Options{Location: dir}, ErrDamaged, "an unfinished recovery", "run the same")
						}
						continue
					}
					more = at == 0
					holdRecovered(t, r, dir, id)
					if !beside && read(t, filepath.Join(r.Aside, block)) != kept {
						t.Error("the old log was not kept")
					}
					left, err := os.ReadDir(dir)
					if err != nil || strings.Contains(strings.Join(names(left), " "), "recover") {
						t.Errorf("left: %v, %v", names(left), err)
					}
					break
				}
			}
			if killed < 24 {
				t.Errorf("killed %d times", killed)
			}
		})
	}
}

// recoverKilled runs a recovery that is killed at its n-th step. It reports whether the recovery
// finished.
func recoverKilled(t *testing.T, dir, from string, n int) (r Recovered, done bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"=recover", "CKPTSTORE_TEST_DIR="+dir, "CKPTSTORE_TEST_FROM="+from, dieEnv+"="+strconv.Itoa(n))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() && status.Signal() == syscall.SIGKILL {
		return r, false
	}
	if err == nil {
		err = json.Unmarshal(out, &r)
	}
	if err != nil {
		t.Fatalf("step %d: %v", n, err)
	}
	return r, true
}

// TestRecoveredLogRolledBack: a rollback of a recovered log is detected.
func TestRecoveredLogRolledBack(t *testing.T) {
	t.Parallel()
	dir, _ := ruined(t)
	remove(t, dir, "log")
	r, err := Recover(t.Context(), RecoverOptions{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	remove(t, dir, "log", "views")
	if err := createLog(t.Context(), filepath.Join(dir, "log"), identity{Store: r.Store}); err != nil {
		t.Fatal(err)
	}
	refused(t, Options{Location: dir}, ErrDamaged, "rolled back", "when the store was recovered", "ckptstore recover")
	if again, err := Recover(t.Context(), RecoverOptions{Location: dir}); err != nil || len(again.Checkpoints) != 3 || len(again.Formerly) != 2 {
		t.Errorf("recovered again: %+v, %v", again, err)
	}
}
