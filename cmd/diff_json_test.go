package cmd_test

import (
	"path/filepath"
	"testing"
)

// TestDiffJSON compares diff --json with its schema, for trials and for checkpoints.
func TestDiffJSON(t *testing.T) {
	t.Parallel()
	store := "--store=" + filepath.Join(t.TempDir(), "store")
	output(t, 0, "ckptstore", "init", store)
	train := func(name, config string, ranks string) {
		output(t, 0, "trainer", "run", store, "--name", name, "--nproc", ranks, "-q", "--set", config,
			"--", "trainer", "demo-worker", "--steps", "4", "--save-every", "2")
	}
	train("a", "lr=1", "1")
	train("b", "lr=2", "2")
	trials := output(t, 6, "ckptstore", "diff", "a", "b", "--json", "--exit-code", store)
	schema(t, "diff-trials", trials)
	checkpoints := output(t, 6, "ckptstore", "diff", "b@step-2", "b@latest", "--json", "--exit-code", store)
	schema(t, "diff-checkpoints", checkpoints)
	type result struct {
		Of          string
		Equal       bool
		Common      string `json:"common_ancestor"`
		Differences []struct {
			Kind, Name string
			Changes    []string
		}
		Same struct{ Tensors, Values int }
	}
	var of result
	if decode(t, trials, &of); of.Of != "trials" || of.Equal || len(of.Differences) < 2 || of.Differences[0].Name != "lr" {
		t.Errorf("trials: %+v", of)
	}
	of = result{}
	if decode(t, checkpoints, &of); of.Of != "checkpoints" || of.Common != "b/main@step-2.a1" || of.Same.Tensors+of.Same.Values+len(of.Differences) != 15 {
		t.Errorf("checkpoints: %+v", of)
	}
	of = result{}
	if decode(t, output(t, 0, "ckptstore", "diff", "a", "a", "--json", "--exit-code", store), &of); !of.Equal {
		t.Errorf("itself: %+v", of)
	}
}
