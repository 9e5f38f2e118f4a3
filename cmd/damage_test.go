package cmd_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestDamageIsFoundByEveryReader flips a bit in each kind of file of a checkpoint, or
// truncates it, and leaves its references intact. Every reader of the checkpoint names
// the file and returns no wrong bytes. Readers with the log do not read the receipt;
// verify --repair rewrites it.
func TestDamageIsFoundByEveryReader(t *testing.T) {
	t.Parallel()
	const fqn = "model.layer1.weight" // a part of it is in each rank's file
	dir := filepath.Join(t.TempDir(), "store")
	worker := []string{"--", "trainer", "demo-worker", "--save-every=4"}
	output(t, 0, "trainer", append([]string{"run", "-q", "--store", dir, "--name=m", "--nproc=2"}, append(worker, "--steps=4")...)...)
	files := filepath.Join(dir, "data", "m", "main", "step-4.a1")
	whole := filesIn(t, files)
	if len(whole) != 6 {
		t.Fatalf("%d files", len(whole))
	}
	saved := output(t, 0, "ckptstore", "cat", "m", fqn, "--store", dir)

	for name, text := range whole {
		path := filepath.Join(files, name)
		for how, damaged := range map[string]string{"flipped": flip(text), "cut": text[:inside(text)]} {
			put := func() {
				if err := os.WriteFile(path, []byte(damaged), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			put()
			if name == "COMMIT.json" {
				out, stderr, code := runs(t, "ckptstore", "ls", "--offline", "--store", dir)
				if code != 6 || strings.Contains(out, "step-4.a1") || !strings.Contains(stderr, name) {
					t.Errorf("%s %s, ls --offline: exit code %d\n%s%s", name, how, code, out, stderr)
				}
				if got := output(t, 0, "ckptstore", "cat", "m", fqn, "--store", dir); got != saved {
					t.Errorf("%s %s: cat gives other bytes", name, how)
				}
				if got := filesIn(t, files)[name]; got != damaged {
					t.Errorf("%s %s: cat wrote it", name, how)
				}
				output(t, 0, "ckptstore", "verify", "m", "--repair", "--store", dir)
				if got := filesIn(t, files)[name]; got != text {
					t.Errorf("%s %s: it is written again as\n%s", name, how, got)
				}
				continue
			}
			out, _, code := runs(t, "ckptstore", "verify", "m", "--store", dir)
			if code != 6 || !strings.Contains(out, "m@step-4.a1: "+name) {
				t.Errorf("%s %s, verify: exit code %d\n%s", name, how, code, out)
			}
			exported := filepath.Join(t.TempDir(), "exported")
			readers := map[string][]string{
				"cat":    {"ckptstore", "cat", "m", fqn, "--store", dir},
				"export": {"ckptstore", "export", "m", exported, "--format=safetensors", "--store", dir},
			}
			if how == "flipped" {
				readers["load"] = append([]string{"trainer", "run", "-q", "--store", dir, "--name=m", "--nproc=2", "--max-restarts=0"}, append(worker, "--steps=8")...)
			}
			for reader, command := range readers {
				out, stderr, code := runs(t, command[0], command[1:]...)
				found := code == 6
				if reader == "load" {
					// An index or a manifest is looked at before anything starts.
					found = code == 1 || code == 64
				}
				if found && strings.Contains(stderr, name) && (out == "" || reader == "load") {
					continue
				}
				t.Errorf("%s %s, %s: exit code %d, %d bytes\n%s", name, how, reader, code, len(out), stderr)
			}
			if _, err := os.Stat(exported); err == nil {
				t.Errorf("%s %s: there is an export", name, how)
			}
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	if out := output(t, 0, "ckptstore", "verify", "m", "--store", dir); !strings.Contains(out, " 0 findings") {
		t.Errorf("at the end: %s", out)
	}
}

// inside returns an offset in a file; for a data file, in its first tensor.
func inside(text string) int { return min(5000, len(text)/2) }

// flip changes one bit.
func flip(text string) string {
	at := inside(text)
	return text[:at] + string(text[at]^4) + text[at+1:]
}

// runs returns a command's output and exit code.
func runs(t *testing.T, name string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	_ = cmd.Run() // the exit code is checked instead
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}
