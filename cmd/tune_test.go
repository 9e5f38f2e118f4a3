package cmd_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// tuned is the output of `ckptstore trials --json`.
type tuned struct {
	Over      bool
	Decisions int
	Differ    []any
	Trials    []struct {
		Trial, State string
		Rung, At     int
		Steps        int64
		AtStep       int64 `json:"at_step"`
		Value        *float64
	}
}

// search returns the command of a search on one slot, whose decisions do not depend on the
// time.
func search(t *testing.T, dir, space string, trials int) *exec.Cmd {
	t.Helper()
	return exec.CommandContext(t.Context(), "trainer", "tune", "--store", dir, "--name=digits", fmt.Sprint("--trials=", trials), "--reduction=2", "--grace-steps=8", "--max-steps=32",
		"--search", space, "--", "trainer", "demo-worker", "--steps=32", "--save-every=4")
}

// assigned returns the decisions of the search in a store.
func assigned(t *testing.T, dir string) (all []string) {
	t.Helper()
	for line := range strings.Lines(output(t, 0, "ckptstore", "events", "digits", "--type=search.assigned", "--json", "--store", dir)) {
		var e struct {
			Data struct {
				Trial string
				Rung  int
				Steps int64
			}
		}
		decode(t, line, &e)
		all = append(all, fmt.Sprintf("%s to %d", e.Data.Trial, e.Data.Steps))
	}
	return all
}

// fromEnv returns the number in a variable of the environment, or else another.
func fromEnv(t *testing.T, name string, otherwise int) int {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		return otherwise
	}
	n, err := strconv.Atoi(value)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// tunerKill is a moment at which a tuner is killed: a text appears in its output, and then a
// random time below most passes.
type tunerKill struct {
	text string
	most int // milliseconds
}

// killedSearch starts a search again after each kill, and at last lets it end. It returns the
// number of kills, which is lower if the search ends before.
func killedSearch(t *testing.T, search func() *exec.Cmd, at ...tunerKill) (killed int) {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for _, k := range at {
		cmd := search()
		out := &watched{seen: make(chan struct{}), text: k.text}
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var err error
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		select {
		case <-out.seen:
			wait := time.NewTimer(time.Duration(random.IntN(k.most)) * time.Millisecond)
			select {
			case <-wait.C:
				_ = cmd.Process.Kill() // it may have ended
				err = <-ended
			case err = <-ended:
			}
		case err = <-ended:
		}
		if diedOf(cmd) != syscall.SIGKILL {
			if err != nil || killed == 0 {
				t.Fatalf("the search ended after %d kills: %v\n%s", killed, err, out.String())
			}
			break
		}
		killed++
	}
	if out, err := search().CombinedOutput(); err != nil {
		t.Fatalf("search after %d kills: %v\n%s", killed, err, out)
	}
	t.Logf("killed %d times", killed)
	return killed
}

// TestTunerKilled: a tuner that is killed again and again makes the decisions of a tuner
// that is not, and its trials have the same results.
func TestTunerKilled(t *testing.T) {
	t.Parallel()
	trials, kills := fromEnv(t, "TUNE_TRIALS", 8), fromEnv(t, "TUNE_KILLS", 5)
	dir := t.TempDir()
	space := filepath.Join(dir, "space.json")
	if err := os.WriteFile(space, []byte(`{"learning_rate": {"loguniform": [0.0005, 0.05]}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	whole, broken := filepath.Join(dir, "whole"), filepath.Join(dir, "broken")
	if out, err := search(t, whole, space, trials).CombinedOutput(); err != nil {
		t.Fatalf("search without kills: %v\n%s", err, out)
	}
	killed := killedSearch(t, func() *exec.Cmd { return search(t, broken, space, trials) }, slices.Repeat([]tunerKill{{"attempt started", 700}}, kills)...)
	if a, b := assigned(t, whole), assigned(t, broken); !reflect.DeepEqual(a, b) {
		t.Errorf("decisions after %d kills:\n%s\nwithout:\n%s", killed, strings.Join(b, "\n"), strings.Join(a, "\n"))
	}
	schema(t, "trials", output(t, 0, "ckptstore", "trials", "digits", "--json", "--store", whole))
	var a, b tuned
	decode(t, output(t, 0, "ckptstore", "trials", "digits", "--json", "--store", whole), &a)
	decode(t, output(t, 0, "ckptstore", "trials", "digits", "--json", "--store", broken), &b)
	if !a.Over || len(a.Trials) != trials || a.Decisions < trials+trials/2 || len(a.Differ) > 0 {
		t.Errorf("search without kills: %+v", a)
	}
	if !reflect.DeepEqual(a, b) {
		t.Errorf("trials after %d kills: %+v\nwithout: %+v", killed, b, a)
	}
	for _, dir := range []string{whole, broken} {
		newest := newestSteps(t, dir, "digits")
		for _, trial := range a.Trials {
			if trial.State == "done" && newest[trial.Trial] < 32 {
				t.Errorf("%s: trial %s is done, and its newest checkpoint is of step %d", filepath.Base(dir), trial.Trial, newest[trial.Trial])
			}
		}
	}
}
