package cmd_test

import (
	"os/exec"
	"path/filepath"
	"testing"
)

// TestBackupJSON compares the reports of backup and restore with their schemas.
func TestBackupJSON(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	from, to, again := filepath.Join(dir, "s"), filepath.Join(dir, "b"), filepath.Join(dir, "r")
	if out, err := exec.CommandContext(t.Context(), "trainer", "run", "--store", from, "--name", "a", "--nproc=1",
		"--", "trainer", "demo-worker", "--steps=10", "--save-every=5").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	torch, err := filepath.Abs(filepath.Join("..", "internal", "format", "dcp", "testdata", "torch-2.14", "single_nested"))
	if err != nil {
		t.Fatal(err)
	}
	output(t, 0, "ckptstore", "import", torch, "--run", "bert", "--step", "7", "--in-place", "--store", from)
	damage(t, filepath.Join(from, "data/a/main/step-5.a1/r00000.idx"))
	schema(t, "backup", output(t, 6, "ckptstore", "backup", to, "--json", "--store", from))
	schema(t, "restore", output(t, 6, "ckptstore", "restore", to, "--json", "--store", again))
}
