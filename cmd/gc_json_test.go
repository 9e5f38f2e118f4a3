package cmd_test

import (
	"os"
	"path/filepath"
	"testing"
)

// TestCollectJSON records what gc, pin, tag and ls print with --json.
func TestCollectJSON(t *testing.T) {
	dir := t.TempDir()
	saved := filepath.Join(dir, "saved")
	if err := os.CopyFS(saved, os.DirFS(filepath.Join("..", "internal", "format", "dcp", "testdata", "torch-2.14", "single_nested"))); err != nil {
		t.Fatal(err)
	}
	store := "--store=" + filepath.Join(dir, "store")
	output(t, 0, "ckptstore", "init", store)
	for _, step := range []string{"1", "2", "3"} {
		output(t, 0, "ckptstore", "import", saved, "--run", "r", "--step", step, store)
	}
	schema(t, "pin", output(t, 0, "ckptstore", "pin", "r@step-1", "--reason", "paper", "--json", store))
	schema(t, "tag", output(t, 0, "ckptstore", "tag", "r@step-1", "gold", "--json", store))
	schema(t, "ls-marked", output(t, 0, "ckptstore", "ls", "--json", store))
	shown := output(t, 0, "ckptstore", "gc", "--policy", "last=1", "--json", store)
	schema(t, "gc", shown)
	done := output(t, 0, "ckptstore", "gc", "--policy", "last=1", "--json", "--apply", store)
	schema(t, "gc", done)
	var before, after struct {
		Applied     bool
		Freed       int64
		Checkpoints []struct{ ID, Action string }
	}
	decode(t, shown, &before)
	decode(t, done, &after)
	if before.Applied || !after.Applied || before.Freed != after.Freed || before.Freed == 0 || len(after.Checkpoints) != 3 || after.Checkpoints[2].Action != before.Checkpoints[2].Action {
		t.Errorf("shown\n%s\ndone\n%s", shown, done)
	}
}
