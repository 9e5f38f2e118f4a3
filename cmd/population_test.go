package cmd_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// population returns the command of a population of 6 trials on two slots.
func population(t *testing.T, dir, space string) *exec.Cmd {
	t.Helper()
	return exec.CommandContext(t.Context(), "trainer", "tune", "--store", dir, "--name=digits", "--trials=6", "--slots=2", "--scheduler=pbt", "--perturb-every=6", "--max-steps=24",
		"--search", space, "--", "trainer", "demo-worker", "--steps=24", "--save-every=4")
}

// cloned returns the decisions of the search in a store, without attempts.
func cloned(t *testing.T, dir string) (all []string, clones int) {
	t.Helper()
	for line := range strings.Lines(output(t, 0, "ckptstore", "events", "digits", "--type=search.assigned", "--json", "--store", dir)) {
		var e struct {
			Data struct {
				Trial, Replaces string
				Steps           int64
				Parent          struct{ Trial, Checkpoint string }
				Config          map[string]any
			}
		}
		decode(t, line, &e)
		d := e.Data
		text := fmt.Sprintf("%s to %d", d.Trial, d.Steps)
		if d.Replaces != "" {
			clones++
			step, _, _ := strings.Cut(d.Parent.Checkpoint, ".a")
			text += fmt.Sprintf(" for %s from %s@%s with %v", d.Replaces, d.Parent.Trial, step, d.Config)
		}
		all = append(all, text)
	}
	return all, clones
}

// TestPopulationKilled: a tuner of a population that is killed at its decisions, in forks, in
// trainings and in saves makes the decisions of a tuner that is not, and its trials have the same
// results.
func TestPopulationKilled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	space := filepath.Join(dir, "space.json")
	if err := os.WriteFile(space, []byte(`{"learning_rate": {"loguniform": [0.0005, 0.05]}, "noise": {"choice": [0.05, 0.1, 0.2]}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	whole, broken := filepath.Join(dir, "whole"), filepath.Join(dir, "broken")
	if out, err := population(t, whole, space).CombinedOutput(); err != nil {
		t.Fatalf("search without kills: %v\n%s", err, out)
	}
	killed := killedSearch(t, func() *exec.Cmd { return population(t, broken, space) },
		tunerKill{"attempt started", 300}, // in the first interval
		tunerKill{"among the last", 1},    // between the decision about a clone and its fork
		tunerKill{"among the last", 30},   // in the fork
		tunerKill{"among the last", 400},  // in the clone's training
		tunerKill{"attempt started", 600},
		tunerKill{"among the last", 1},
		tunerKill{"attempt started", 900},
	)
	want, clones := cloned(t, whole)
	if got, _ := cloned(t, broken); !slices.Equal(want, got) {
		t.Errorf("decisions after %d kills:\n%s\nwithout:\n%s", killed, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if clones != 6 { // 2 of 6 after each of 3 intervals
		t.Errorf("%d trials were cloned, want 6:\n%s", clones, strings.Join(want, "\n"))
	}
	schema(t, "trials-pbt", output(t, 0, "ckptstore", "trials", "digits", "--json", "--store", whole))
	var a, b tuned
	decode(t, output(t, 0, "ckptstore", "trials", "digits", "--json", "--store", whole), &a)
	decode(t, output(t, 0, "ckptstore", "trials", "digits", "--json", "--store", broken), &b)
	if !a.Over || len(a.Trials) != 12 || len(a.Differ) > 0 {
		t.Errorf("search without kills: %+v", a)
	}
	if !reflect.DeepEqual(a, b) {
		t.Errorf("trials after %d kills: %+v\nwithout: %+v", killed, b, a)
	}
	for _, dir := range []string{whole, broken} {
		if list := output(t, 0, "ckptstore", "ls", "digits", "--all", "--store", dir); strings.Contains(list, "pinned") {
			t.Errorf("%s: pins are left:\n%s", filepath.Base(dir), list)
		}
	}
}

// population returns the command of a population on one slot whose trials begin with x = 1, 2 and
// so on. The first is the best one.
func (w tunedWorker) population(t *testing.T, dir string, trials int) *exec.Cmd {
	t.Helper()
	text, err := json.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	values := make([]string, trials)
	for i := range values {
		values[i] = fmt.Sprint(i + 1)
	}
	space := filepath.Join(dir, "space.json")
	if err := os.WriteFile(space, fmt.Appendf(nil, `{"x": {"grid": [%s]}, "y": {"uniform": [0, 1]}}`, strings.Join(values, ", ")), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "trainer", "tune", "--store", filepath.Join(dir, "ckpts"), "--name=x", "--search", space,
		"--scheduler=pbt", "--perturb-every=2", "--max-steps=4", "--max-restarts=1", "--", os.Args[0])
	cmd.Env = append(os.Environ(), tunedEnv+"="+string(text))
	return cmd
}

// TestPopulationKilledBeforeSave: a trial whose tuner is killed between the report of an interval
// and the save repeats that interval, and no clone is made before.
func TestPopulationKilledBeforeSave(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := tunedWorker{Last: 4, HoldAt: 2, Held: filepath.Join(dir, "held"), Without: -1}
	killAt(t, w.population(t, dir, 4), w.Held)
	wantStates(t, dir, "due 0, new 0, new 0, new 0", false, "")
	out := ends(t, 0, w.population(t, dir, 4))
	wantStates(t, dir, "done 4, done 4, done 4, replaced 2, done 4", true, out)
	out = ends(t, 0, w.population(t, dir, 4))
	if strings.Contains(out, "attempt started") {
		t.Errorf("a trial that has saved its steps is started again:\n%s", out)
	}
}

// TestPopulationNeedsSaves: a trial that does not save at the end of an interval is repeated, as
// often as workers may fail, and then fails the search: nothing can be cloned from it. The same command
// continues when the workers save.
func TestPopulationNeedsSaves(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := tunedWorker{Last: 4, Never: true, Without: -1}
	out := ends(t, 1, w.population(t, dir, 2))
	if !strings.Contains(out, "trial t00: it has its steps and has not saved them: no checkpoint was committed") || strings.Count(out, "attempt started") != 3 {
		t.Errorf("the search does not name the trial, or repeats it too often:\n%s", out)
	}
	wantStates(t, dir, "due 0, paused 2", false, out)
	w.Never = false
	out = ends(t, 0, w.population(t, dir, 2))
	wantStates(t, dir, "done 4, replaced 2, done 4", true, out)
}
