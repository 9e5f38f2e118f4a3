package cmd_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// hold takes a lock, as another process would.
func hold(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lock.Close() })
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Fatal(err)
	}
}

// refusal runs a command that must fail and returns its output.
func refusal(t *testing.T, code int, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	out, _ := cmd.CombinedOutput()
	if got := cmd.ProcessState.ExitCode(); got != code {
		t.Errorf("%s %v: exit code %d, want %d\n%s", name, args, got, code, out)
	}
	return string(out)
}

// TestTrainerStoppedPastItsLease: a stopped trainer has lost the run's lease but is still alive.
func TestTrainerStoppedPastItsLease(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ckpts")
	var made struct{ Store string }
	decode(t, output(t, 0, "ckptstore", "init", "--json", "--store", dir), &made)
	arena := fmt.Sprintf("/dev/shm/ckptstore-memory-%d/ckptstore-%s-a-n0", os.Geteuid(), made.Store[len(made.Store)-12:])
	t.Cleanup(func() { _ = os.RemoveAll(arena) })
	hold(t, filepath.Join(arena, "lock"))
	if said := refusal(t, 5, "trainer", "run", "--store", dir, "--name", "a", "--", "true"); !strings.Contains(said, "another trainer of this run is alive on this machine") {
		t.Error(said)
	}
}

// formerDemo puts an earlier demo into dir, and a foreign file, which the next demo must
// keep. While another process uses the earlier demo, the next one changes nothing.
func formerDemo(t *testing.T, dir string) (kept string) {
	t.Helper()
	kept = filepath.Join(dir, "notes")
	for _, file := range []string{filepath.Join(dir, "this-is-a-demo"), kept} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	output(t, 0, "ckptstore", "init", "--store", filepath.Join(dir, "store"))
	t.Run("its store is in use", func(t *testing.T) {
		hold(t, filepath.Join(dir, "store", "LOCK"))
		if said := refusal(t, 11, "trainer", "demo", "--dir", dir); !strings.Contains(said, "another process holds") {
			t.Error(said)
		}
	})
	t.Run("another demo runs", func(t *testing.T) {
		hold(t, filepath.Join(dir, "this-is-a-demo"))
		if said := refusal(t, 11, "trainer", "demo", "--dir", dir); !strings.Contains(said, "another demo runs in "+dir) {
			t.Error(said)
		}
	})
	for _, file := range []string{kept, filepath.Join(dir, "store", "store.json")} {
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
	}
	return kept
}

// TestViewsDeletedInUse: a training continues when its views are deleted.
func TestViewsDeletedInUse(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "ckpts")
	job := []string{"run", "--store", dir, "--name", "a", "--", "trainer", "demo-worker", "--steps=40", "--save-every=1"}
	output(t, 0, "ckptstore", "init", "--store", dir)
	worker := "rm -r " + filepath.Join(dir, "views") + " && exec trainer demo-worker --steps=40 --save-every=1"
	job = append(job[:6], "sh", "-c", worker)
	output(t, 0, "trainer", job...)
	var list struct{ Checkpoints []json.RawMessage }
	decode(t, output(t, 0, "ckptstore", "ls", "a", "--all", "--json", "--store", dir), &list)
	if len(list.Checkpoints) != 40 {
		t.Errorf("%d checkpoints, want 40", len(list.Checkpoints))
	}
}

// TestVerifyFindsDamagedLog damages an event that is not read when the store opens.
func TestVerifyFindsDamagedLog(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "ckpts")
	output(t, 0, "trainer", "run", "-q", "--store", dir, "--name", "a", "--", "trainer", "demo-worker", "--steps=8", "--save-every=4")
	blocks, err := filepath.Glob(filepath.Join(dir, "log", "jetstream", "*", "streams", "CKPT", "msgs", "*.blk"))
	if err != nil || len(blocks) == 0 {
		t.Fatalf("%v %v", blocks, err)
	}
	data, err := os.ReadFile(blocks[0])
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(data, []byte(".report.metrics"))
	if at < 0 {
		t.Fatal("no report is in the first block")
	}
	data[at] ^= 1
	if err := os.WriteFile(blocks[0], data, 0o600); err != nil {
		t.Fatal(err)
	}
	var found struct {
		Log      struct{ Events, First, Last int }
		Findings []struct{ Kind, File, Problem string }
	}
	text := output(t, 6, "ckptstore", "verify", "--json", "--store", dir)
	decode(t, text, &found)
	if len(found.Findings) != 1 || found.Findings[0].Kind != "log" || found.Log.Events == 0 || found.Log.Events >= found.Log.Last {
		t.Error(text)
	}
}
