package cmd_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestKilledNowJSON checks that show and ls print what it would cost to kill a live run, with the
// members that testdata/schema records, and that an ended run has its goodput only.
func TestKilledNowJSON(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	store, started := "--store="+filepath.Join(dir, "ckpts"), filepath.Join(dir, "started")
	cmd := exec.CommandContext(t.Context(), "trainer", "run", store, "--name=a", "-q", "--", "sh", "-c",
		`trainer demo-worker --steps=5 --save-every=2 && touch "$0" && exec sleep 1000`, started)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
	}()
	await(t, func() bool { _, err := os.Stat(started); return err == nil })
	type killed struct {
		Resume string
		Step   int64
		Steps  int64 `json:"steps_lost"`
		Text   string
	}
	var show struct {
		Run struct {
			Run, State string
			Goodput    float64
			Usage      struct {
				Wall float64 `json:"wall_s"`
				Kept float64 `json:"kept_s"`
			}
			KilledNow []killed `json:"killed_now"`
		}
	}
	text := output(t, 0, "ckptstore", "show", "a", "--json", store)
	schema(t, "show-run", text)
	decode(t, text, &show)
	if r := show.Run; r.State != "running" || r.Goodput <= 0 || r.Goodput > 1 || r.Usage.Kept > r.Usage.Wall || len(r.KilledNow) != 1 {
		t.Fatalf("show prints %+v", r)
	}
	const verdict = "the next attempt resumes from step-5.a1 and repeats 0 steps and "
	if k := show.Run.KilledNow[0]; k.Resume != "step-5.a1" || k.Step != 5 || k.Steps != 0 || !strings.HasPrefix(k.Text, "killed now: "+verdict) {
		t.Errorf("show prints %+v", k)
	}
	if table := output(t, 0, "ckptstore", "show", "a", store); !strings.Contains(table, "\nkilled now  "+verdict) || !strings.Contains(table, "\ngoodput     ") {
		t.Errorf("show prints\n%s", table)
	}
	text = output(t, 0, "ckptstore", "ls", "a", "--json", store)
	schema(t, "ls-live", text)
	var ls struct {
		KilledNow []killed `json:"killed_now"`
	}
	if decode(t, text, &ls); len(ls.KilledNow) != 1 || ls.KilledNow[0] != show.Run.KilledNow[0] {
		t.Errorf("ls prints %+v, show %+v", ls.KilledNow, show.Run.KilledNow)
	}
	for _, args := range [][]string{{"show", "a@step-4"}, {"ls"}, {"show", "a", "--as-of=5000"}} {
		said, _ := exec.CommandContext(t.Context(), "ckptstore", append(args, store)...).CombinedOutput()
		if strings.Contains(string(said), "killed now") {
			t.Errorf("%q prints\n%s", args, said)
		}
	}
	output(t, 0, "ckptstore", "stop", "a", store)
	_ = cmd.Wait() // it was stopped
	ended := output(t, 0, "ckptstore", "show", "a", store)
	if strings.Contains(ended, "killed now") || !strings.Contains(ended, "\ngoodput ") {
		t.Errorf("an ended run: show prints\n%s", ended)
	}
}
