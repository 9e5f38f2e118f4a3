package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// asProgram makes the test binary run main: it is the trainer, its guard and its workers.
const asProgram = "MYTRAINER_RUN"

// runtimeDir is where the programs create their sockets, which need a short path.
var runtimeDir string

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	dir, err := os.MkdirTemp("/tmp", "mt")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	runtimeDir = dir
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// program runs the program in a directory, and returns its output and exit code.
func program(t *testing.T, dir string, args ...string) (out string, code int) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Dir, cmd.WaitDelay = dir, 10*time.Second
	// The store is ./ckpts, whatever store the environment names.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "CKPTSTORE_") })
	cmd.Env = append(cmd.Env, asProgram+"=1", "XDG_RUNTIME_DIR="+runtimeDir, "XDG_STATE_HOME="+filepath.Join(dir, "state"))
	said, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%q printed:\n%s", args, said)
		}
	})
	return string(said), cmd.ProcessState.ExitCode()
}

// goesOn continues the run of a directory.
func goesOn(t *testing.T, dir string, flags ...string) (out string, code int) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{"run", "--name", "run", "--backend", "mesh", "--max-restarts", "0"}, flags...)
	return program(t, dir, append(args, "--", self, "worker")...)
}

// inOrder fails unless out has all lines of want, in their order.
func inOrder(t *testing.T, out string, want ...string) {
	t.Helper()
	left := strings.Split(out, "\n")
	for _, line := range want {
		i := slices.Index(left, line)
		if i < 0 {
			t.Errorf("line %q is not there, or not in its place", line)
			continue
		}
		left = left[i+1:]
	}
}

// sum returns the sum of a rank's elements after a step.
func sum(rank, world, step int) (sum int) {
	for i := elements * rank / world; i < elements*(rank+1)/world; i++ {
		sum += i * step
	}
	return sum
}

// A worker fails, and the group continues from the last checkpoint.
func TestParts(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("CKPTSTORE_STORE", filepath.Join(t.TempDir(), "of a developer"))
	out, code := program(t, dir)
	if code != 0 {
		t.Fatalf("exit code %d", code)
	}
	t.Run("backend", func(t *testing.T) {
		inOrder(t, out,
			"mesh: attempt 1 starts with 2 workers",
			"mesh: attempt 1 trains",
			"mesh: attempt 1 failed: rank 1 exited with code 1: the function failed: a failure on purpose",
			"mesh: attempt 2 starts with 2 workers",
			"mesh: attempt 2 trains",
			"mesh: attempt 2 ends",
		)
	})
	t.Run("RPC agent", func(t *testing.T) {
		for rank := range 2 {
			next := (rank + 1) % 2
			inOrder(t, out, fmt.Sprintf("[rank%d] step 6: rank %d has the sum %d", rank, next, sum(next, 2, 6)))
		}
	})
	t.Run("writer", func(t *testing.T) {
		inOrder(t, out,
			"mesh: storage: write.PrepareLocalPlan step-1",
			"mesh: storage: write.PrepareGlobalPlan step-1.a1",
			"mesh: storage: write.SetUp step-1.a1",
			"mesh: storage: write.WriteData step-1.a1",
			"mesh: storage: write.Finish step-1.a1",
		)
		for _, id := range []string{"step-1.a1", "step-2.a1", "step-3.a2", "step-6.a2"} {
			found, err := filepath.Glob(filepath.Join(dir, "ckpts", "data", "*", "main", id, "*"))
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, path := range found {
				name, _, _ := strings.Cut(filepath.Base(path), "-")
				names = append(names, name)
			}
			if want := []string{"COMMIT.json", "manifest", "rank", "rank"}; !slices.Equal(names, want) {
				t.Errorf("%s has the files %q, want %q", id, found, want)
			}
		}
	})
	t.Run("reader", func(t *testing.T) {
		inOrder(t, out,
			"mesh: attempt 2 starts with 2 workers",
			"mesh: storage: read.ReadMetadata step-2.a1",
			"mesh: storage: read.SetUp step-2.a1",
			"mesh: storage: read.PrepareLocalPlan step-2.a1",
			"mesh: storage: read.PrepareLocalPlan step-2.a1",
			"mesh: storage: read.PrepareGlobalPlan step-2.a1",
			"mesh: storage: read.ReadData step-2.a1",
		)
		for rank := range 2 {
			inOrder(t, out, fmt.Sprintf("[rank%d] loaded step-2.a1: 512 elements unchanged", rank))
		}
	})
}

// A checkpoint whose file is missing is passed over, and another number of ranks
// loads the previous one. The error for a damaged file names the file.
func TestDamage(t *testing.T) {
	dir := t.TempDir()
	if _, code := goesOn(t, dir, "--nproc", "2", "--set", "steps=3"); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	file := func(id string, rank int) string {
		return fileOf(filepath.Join(dir, "ckpts", "data", "run", "main", id), rank)
	}
	if err := os.Remove(file("step-3.a1", 1)); err != nil {
		t.Fatal(err)
	}
	out, code := goesOn(t, dir, "--nproc", "3", "--set", "steps=4")
	if code != 0 {
		t.Fatalf("exit code %d", code)
	}
	inOrder(t, out, "[rank1] loaded step-2.a1: 341 elements unchanged")

	damaged := file("step-4.a2", 2)
	data, err := os.ReadFile(damaged)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := os.WriteFile(damaged, data, 0o600); err != nil {
		t.Fatal(err)
	}
	out, code = goesOn(t, dir, "--nproc", "1", "--set", "steps=5")
	if code != 1 || !strings.Contains(out, damaged+" is damaged") {
		t.Errorf("exit code %d, and no word of %s", code, damaged)
	}
}
