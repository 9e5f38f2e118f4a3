package cmd_test

import (
	"os"
	"path/filepath"
	"testing"
)

// TestImportJSON records what import, export, cat and the commands that take
// paths print with --json.
func TestImportJSON(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	saved := filepath.Join(dir, "saved")
	if err := os.CopyFS(saved, os.DirFS(filepath.Join("..", "internal", "format", "dcp", "testdata", "torch-2.14", "single_nested"))); err != nil {
		t.Fatal(err)
	}
	store := "--store=" + filepath.Join(dir, "store")
	output(t, 0, "ckptstore", "init", store)
	schema(t, "import", output(t, 0, "ckptstore", "import", saved, "--run", "r", "--step", "3", "--in-place", "--json", store))
	schema(t, "verify-learned", output(t, 0, "ckptstore", "verify", "r", "--learn", "--json", store))
	schema(t, "export", output(t, 0, "ckptstore", "export", "r", filepath.Join(dir, "out"), "--format", "hf", "--json", store))
	schema(t, "export-self-contained", output(t, 0, "ckptstore", "export", "r", filepath.Join(dir, "own"), "--self-contained", "--json", store))
	schema(t, "verify-offline", output(t, 0, "ckptstore", "verify", "r", "--offline", "--json", store))
	schema(t, "cat", output(t, 0, "ckptstore", "cat", "r", "--json", store))
	schema(t, "show-path", output(t, 0, "ckptstore", "show", saved, "--json"))
	schema(t, "verify-path", output(t, 0, "ckptstore", "verify", saved, "--json"))
	value := output(t, 0, "ckptstore", "cat", saved, "model.scalar")
	if len(value) != 4 {
		t.Errorf("a float32 has %d bytes", len(value))
	}
}
