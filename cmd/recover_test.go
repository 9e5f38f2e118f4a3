package cmd_test

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
)

// TestRecoverAndTrainOn deletes the log and the views of a half-finished run, recovers the
// store in place and into another directory, and continues training. The final state must
// be bit for bit equal to that of an undisturbed run.
func TestRecoverAndTrainOn(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	train := func(dir, run, steps string) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "trainer", "run", "--store", dir, "--name", run, "--resume", "auto", "--nproc=2",
			"--", "trainer", "demo-worker", "--steps="+steps, "--save-every=10").CombinedOutput()
		if err != nil {
			t.Fatalf("%s up to step %s: %v\n%s", run, steps, err, out)
		}
	}
	train(dir, "reference", "40")
	train(dir, "cut", "20")
	for _, part := range []string{"log", "views"} {
		if err := os.RemoveAll(filepath.Join(dir, part)); err != nil {
			t.Fatal(err)
		}
	}
	// An uncommitted checkpoint, and a damaged receipt.
	reference := filepath.Join(dir, "data", "reference", "main")
	if err := os.CopyFS(filepath.Join(reference, "step-40.a9"), os.DirFS(filepath.Join(reference, "step-40.a1"))); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(reference, "step-40.a9", "COMMIT.json")); err != nil {
		t.Fatal(err)
	}
	damage(t, filepath.Join(reference, "step-10.a1", "COMMIT.json"))

	output(t, 6, "ckptstore", "ls", "--store", dir)
	other := filepath.Join(filepath.Dir(dir), "other")
	schema(t, "recover", output(t, 0, "ckptstore", "recover", "--from", dir, "--store", other, "--json"))
	said := output(t, 0, "ckptstore", "recover", "--store", dir)
	for _, part := range []string{"5 checkpoints recovered, 2 directories rejected", "rejected as uncommitted: " + filepath.Join(reference, "step-40.a9"), "rejected as damaged: " + filepath.Join(reference, "step-10.a1"), "lost with the log: metrics"} {
		if !strings.Contains(said, part) {
			t.Errorf("recover does not print %q:\n%s", part, said)
		}
	}
	output(t, 5, "ckptstore", "recover", "--store", dir)
	output(t, 10, "ckptstore", "recover", "--from", t.TempDir(), "--store", filepath.Join(dir, "none"))
	for _, dir := range []string{dir, other} {
		train(dir, "cut", "40")
		output(t, 0, "ckptstore", "verify", "--store", dir)
		s, err := store.Open(t.Context(), store.Options{Location: dir})
		if err != nil {
			t.Fatal(err)
		}
		weights := func(ref string) map[string]checkpoint.Digest {
			c, err := query.Ask(t.Context(), s.Views(), query.Resolve, query.Params{Ref: ref})
			if err != nil {
				t.Fatal(err)
			}
			if ref == "cut" && (c.Step != 40 || c.Attempt != 3) {
				t.Errorf("%s is %s", ref, c.ID)
			}
			return contents(t.Context(), t, s, c)
		}
		if end := weights("cut"); len(end) == 0 || !maps.Equal(end, weights("reference")) {
			t.Errorf("in %s, the run that was recovered ends with other weights", dir)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}
