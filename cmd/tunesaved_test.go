package cmd_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/tensor"
)

// tunedEnv has the JSON of a tunedWorker: the process is then a rank of a trial.
const tunedEnv = "CKPTSTORE_TEST_TUNED"

// tunedWorker is a worker of a search over x: it reports x divided by the step as its loss. Its
// faults are those of the trial with x = 1 alone.
type tunedWorker struct {
	Last    int64  // step after which it ends by itself
	By      int64  // steps from one report to the next
	Early   bool   // it saves at its first report, too
	End     bool   // it saves when it ends, not only when it is asked to
	HoldAt  int64  // step after whose report it makes the file Held, if there is none, and hangs
	Held    string // name of that file
	DieAt   int64  // step after whose report it fails, in the first attempt
	Damaged string // directory that it removes before it fails
	Without int    // rank that takes no part in the last save; -1: none
	Never   bool   // no rank saves
	Stay    bool   // the other trials report step 1 until they are asked to end
}

func (w tunedWorker) train(ctx context.Context) error {
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	x, ok := c.Config["x"].(float64)
	if !ok {
		return fmt.Errorf("x is %v", c.Config["x"])
	}
	faulty := x == 1
	box := tensor.Box{Offsets: []int64{int64(c.Rank)}, Sizes: []int64{1}}
	state := client.State{Tensors: []client.Tensor{{Data: []byte{0}, Shard: tensor.Shard{FQN: "step", DType: tensor.Uint8, Global: tensor.Shape{int64(c.WorldSize)}, Box: box}}}}
	if c.Resume != "" {
		if _, err := c.Load(ctx, &state, client.LoadOptions{Ref: c.Resume, Strict: true}); err != nil {
			return err
		}
	}
	var last *client.Save
	save := func(step int64) error {
		if faulty && w.Never {
			return nil
		}
		last, err = c.Save(ctx, step, state, client.SaveOptions{})
		return err
	}
	step, asked := int64(state.Tensors[0].Data[0]), ""
	for asked == "" && step < w.Last {
		if step += max(1, w.By); w.Stay && !faulty {
			step = 1
		}
		state.Tensors[0].Data[0] = byte(step)
		if err := c.Report(ctx, step, map[string]any{"loss": x / float64(step)}); err != nil {
			return err
		}
		asked = c.StopRequested()
		if step == 1 && w.Early {
			if err := save(step); err != nil {
				return err
			}
			if err := last.Wait(ctx, client.Committed); err != nil {
				return err
			}
		}
		if faulty && step == w.HoldAt {
			file, err := os.OpenFile(w.Held, os.O_CREATE|os.O_EXCL, 0o600)
			if err == nil {
				_ = file.Close()
				<-make(chan struct{}) // until it is killed
			}
		}
		if faulty && step == w.DieAt && c.Attempt == 1 {
			return errors.Join(errors.New("it fails once"), os.RemoveAll(w.Damaged))
		}
	}
	if w.End || asked == client.Preempt {
		if faulty && w.Without == c.Rank {
			return nil
		}
		if err := save(step); err != nil {
			return err
		}
		if last != nil && w.Without < 0 {
			return last.Wait(ctx, client.Committed)
		}
	}
	return nil
}

// command returns the command of a search on one slot whose trials have x = 1, 2 and so on.
func (w tunedWorker) command(t *testing.T, dir string, trials int, flags ...string) *exec.Cmd {
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
	if err := os.WriteFile(space, fmt.Appendf(nil, `{"x": {"grid": [%s]}}`, strings.Join(values, ", ")), 0o600); err != nil {
		t.Fatal(err)
	}
	args := append([]string{"tune", "--store", filepath.Join(dir, "ckpts"), "--name=x", "--search", space, fmt.Sprint("--trials=", trials), "--reduction=2", "--max-steps=4"}, flags...)
	cmd := exec.CommandContext(t.Context(), "trainer", append(args, "--", os.Args[0])...)
	cmd.Env = append(os.Environ(), tunedEnv+"="+string(text))
	return cmd
}

// ends runs a search to its end and returns its output.
func ends(t *testing.T, code int, cmd *exec.Cmd) string {
	t.Helper()
	out, err := cmd.CombinedOutput()
	if got := cmd.ProcessState.ExitCode(); got != code {
		t.Fatalf("exit code %d, want %d: %v\n%s", got, code, err, out)
	}
	return string(out)
}

// killAt kills a tuner when a file exists.
func killAt(t *testing.T, cmd *exec.Cmd, file string) {
	t.Helper()
	out := &watched{seen: make(chan struct{}), text: "\x00"}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	tick, late := time.NewTicker(20*time.Millisecond), time.NewTimer(2*time.Minute)
	defer tick.Stop()
	defer late.Stop()
	for {
		_, err := os.Stat(file)
		if err == nil {
			break
		}
		select {
		case <-tick.C:
		case err := <-ended:
			t.Fatalf("the search ended before %s exists: %v\n%s", file, err, out.String())
		case <-late.C:
			_ = cmd.Process.Kill()
			t.Fatalf("%s does not exist\n%s", file, out.String())
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil {
		t.Error("the search ended without an error")
	}
}

// states returns the states of the trials, with the step of the newest checkpoint of each, and
// whether the search is over.
func states(t *testing.T, dir, run string) (text string, over bool) {
	t.Helper()
	var b tuned
	decode(t, output(t, 0, "ckptstore", "trials", run, "--json", "--store", dir), &b)
	newest := newestSteps(t, dir, run)
	var all []string
	for _, trial := range b.Trials {
		all = append(all, fmt.Sprintf("%s %d", trial.State, newest[trial.Trial]))
	}
	return strings.Join(all, ", "), b.Over
}

// newestSteps returns the step of the newest committed checkpoint of each trial.
func newestSteps(t *testing.T, dir, run string) map[string]int64 {
	t.Helper()
	var list struct {
		Checkpoints []struct {
			Trial, State string
			Step         int64
		}
	}
	decode(t, output(t, 0, "ckptstore", "ls", run, "--json", "--store", dir), &list)
	newest := map[string]int64{}
	for _, c := range list.Checkpoints {
		if c.State == "committed" {
			newest[c.Trial] = max(newest[c.Trial], c.Step)
		}
	}
	return newest
}

func wantStates(t *testing.T, dir, want string, over bool, out string) {
	t.Helper()
	if got, is := states(t, filepath.Join(dir, "ckpts"), "x"); got != want || is != over {
		t.Errorf("trials: %s (over: %v), want %s (over: %v)\n%s", got, is, want, over, out)
	}
}

// TestTunerKilledBeforeSave: a tuner that is killed between the report of the most steps and
// the save starts that trial again.
func TestTunerKilledBeforeSave(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := tunedWorker{Last: 4, HoldAt: 4, Held: filepath.Join(dir, "held"), Without: -1}
	flags := []string{"--grace-steps=4"}
	killAt(t, w.command(t, dir, 1, flags...), w.Held)
	wantStates(t, dir, "due 0", false, "")
	out := ends(t, 0, w.command(t, dir, 1, flags...))
	wantStates(t, dir, "done 4", true, out)
	out = ends(t, 0, w.command(t, dir, 1, flags...))
	if strings.Contains(out, "attempt started") {
		t.Errorf("a trial that has saved its steps is started again:\n%s", out)
	}
}

// TestTunerKilledLeavesNoMemory: a trial that is not started again has no shared memory after
// the search.
func TestTunerKilledLeavesNoMemory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	store := filepath.Join(dir, "ckpts")
	// The last trial is the best of the first rung.
	w := tunedWorker{Last: 4, Early: true, HoldAt: 2, Held: filepath.Join(dir, "held"), Without: -1}
	flags := []string{"--grace-steps=2", "--mode=max"}
	killAt(t, w.command(t, dir, 2, flags...), w.Held)
	out := ends(t, 0, w.command(t, dir, 2, flags...))
	wantStates(t, dir, "paused 1, done 4", true, out)
	if left := output(t, 0, "ckptstore", "gc", "--staging", "--store", store); !strings.HasPrefix(left, "0 directories") {
		t.Errorf("shared memory after the search:\n%s", left)
	}
}

// TestSearchLosesSaves: a trial whose last save is aborted fails the search, and stops no other
// trial. The same command repeats it.
func TestSearchLosesSaves(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		last        int64
		lost, saved string
	}{
		{4, "due 0, done 4, done 4", "done 4, done 4, done 4"},
		{2, "due 0, completed 2, completed 2", "completed 2, completed 2, completed 2"},
	} {
		t.Run(fmt.Sprint("end after ", c.last), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			w := tunedWorker{Last: c.last, End: true, Without: 1}
			flags := []string{"--grace-steps=4", "--nproc=2"}
			out := ends(t, 1, w.command(t, dir, 3, flags...))
			if !strings.Contains(out, "trial t00: the workers ended well, but their last save") {
				t.Errorf("the search does not name the trial:\n%s", out)
			}
			wantStates(t, dir, c.lost, false, out)
			w.Without = -1
			out = ends(t, 0, w.command(t, dir, 3, flags...))
			wantStates(t, dir, c.saved, true, out)
		})
	}
}

// TestSearchRepeatsDeadAttempt: an attempt that fails after the report of the most steps is
// repeated to them, and saved.
func TestSearchRepeatsDeadAttempt(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := tunedWorker{Last: 100, DieAt: 4, Without: -1}
	out := ends(t, 0, w.command(t, dir, 1, "--grace-steps=4"))
	if n := strings.Count(out, "attempt started"); n != 2 {
		t.Errorf("%d attempts", n)
	}
	wantStates(t, dir, "done 4", true, out)
}

// TestSearchGoesAroundDamage: a trial whose checkpoints are damaged when it has to restart stops no
// other trial. The search fails, and names it.
func TestSearchGoesAroundDamage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := tunedWorker{Last: 4, Early: true, DieAt: 2, Damaged: filepath.Join(dir, "ckpts", "data", "x", "t00"), Without: -1}
	out := ends(t, 1, w.command(t, dir, 2, "--grace-steps=4"))
	if !strings.Contains(out, "trial t00: ") || !strings.Contains(out, "the checkpoint is not whole") {
		t.Errorf("the search does not name the trial:\n%s", out)
	}
	wantStates(t, dir, "due 1, done 4", false, out)
}

// TestKilledSearchWithDamagedTrial: a trial that was alive when the tuner was killed, and whose
// checkpoints are damaged since, keeps no other trial from being trained.
func TestKilledSearchWithDamagedTrial(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := tunedWorker{Last: 4, Early: true, HoldAt: 2, Held: filepath.Join(dir, "held"), Without: -1}
	killAt(t, w.command(t, dir, 2, "--grace-steps=4"), w.Held)
	damaged := filepath.Join(dir, "ckpts", "data", "x", "t00")
	if _, err := os.Stat(damaged); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(damaged); err != nil {
		t.Fatal(err)
	}
	out := ends(t, 64, w.command(t, dir, 2, "--grace-steps=4"))
	if !strings.Contains(out, "trial t00: the checkpoint is not whole") {
		t.Errorf("the search does not name the trial:\n%s", out)
	}
	wantStates(t, dir, "due 1, done 4", false, out)
}

// TestMostStepsEndTraining: workers that save only when they are asked to keep their last steps,
// and are trained to the first report of the most steps, or beyond, and no further.
func TestMostStepsEndTraining(t *testing.T) {
	t.Parallel()
	for _, w := range []tunedWorker{{Last: 4, Without: -1}, {Last: 200, By: 3, Without: -1}} {
		t.Run(fmt.Sprint("end after ", w.Last), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			out := ends(t, 0, w.command(t, dir, 1, "--grace-steps=4"))
			last := int64(4)
			if w.By == 3 {
				last = 6
			}
			wantStates(t, dir, fmt.Sprint("done ", last), true, out)
			var b tuned
			decode(t, output(t, 0, "ckptstore", "trials", "x", "--json", "--store", filepath.Join(dir, "ckpts")), &b)
			if got := b.Trials[0]; got.Steps != last || got.AtStep != last {
				t.Errorf("trained to %d, with the value of step %d, want %d", got.Steps, got.AtStep, last)
			}
		})
	}
}

// TestPreemptedSearchNamesUnsaved: a search that is preempted is not saved if a trial that waits
// has not saved.
func TestPreemptedSearchNamesUnsaved(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := tunedWorker{Last: 100, Never: true, Stay: true, Without: -1}
	cmd := w.command(t, dir, 2, "--grace-steps=2")
	out := &watched{seen: make(chan struct{}), text: "trial=t01 rung=0"}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case <-out.seen:
	case err := <-ended:
		t.Fatalf("the search has ended: %v\n%s", err, out.String())
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil {
		t.Error("the search ended without an error")
	}
	if code := cmd.ProcessState.ExitCode(); code != 143 || !strings.Contains(out.String(), "trial t00: no checkpoint was committed") {
		t.Errorf("exit code %d\n%s", code, out.String())
	}
}
