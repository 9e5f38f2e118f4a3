package cmd_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestReadme runs the shell blocks of the README in order in one directory. Only the
// build is replaced: bin/ holds the commands that the tests built.
func TestReadme(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join("..", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	var script strings.Builder
	blocks := 0
	for _, part := range strings.Split(string(text), "```sh\n")[1:] {
		block, _, ok := strings.Cut(part, "```")
		if !ok {
			t.Fatal("a shell block of the README does not end")
		}
		blocks++
		for line := range strings.Lines(block) {
			if strings.HasPrefix(line, "go build ") {
				continue
			}
			script.WriteString("echo '$ " + strings.TrimSpace(line) + "'\n" + line)
		}
	}
	if blocks < 2 {
		t.Fatalf("the README has %d shell blocks: where are the others?", blocks)
	}
	dir := t.TempDir()
	internal, err := filepath.Abs(filepath.Join("..", "internal"))
	if err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{"bin": bin, "internal": internal} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", script.String())
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"step-60.a1", "step-80.a2", "0 findings", "model.layer1.weight", "adopted in place", "learned the digests", "932 B in 2 files of", "checkpoints recovered, 0 directories rejected", "step-100.a", "from step 1: ", "in 3 chunks", "1.0150602 -3.3132646 -0.2503057", "as data/llama/main/step-100.a1"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the README's commands do not print %q:\n%s", want, out)
		}
	}
}
