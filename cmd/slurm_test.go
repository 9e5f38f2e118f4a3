package cmd_test

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// srunOfTwo starts a command once for each of two nodes, with the variables of Slurm, and exits with the
// highest code. Both nodes are this machine.
const srunOfTwo = `#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=localhost
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait $first; a=$?
wait $second; b=$?
exit $((a > b ? a : b))
`

// The printed script of two nodes needs nothing more: the trainers find each other by what srun sets.
func TestSlurmTemplateOfTwoNodes(t *testing.T) {
	t.Parallel()
	for _, flags := range [][]string{nil, {"--min-nodes", "1"}} {
		dir := t.TempDir()
		args := append([]string{"slurm", "template", "--name", "two", "--nodes", "2", "--nproc", "1", "--store", filepath.Join(dir, "ckpts")}, flags...)
		job, err := exec.CommandContext(t.Context(), "ckptstore", append(args, "--", "trainer", "demo-worker", "--steps", "40", "--save-every", "20")...).Output()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "srun"), []byte(srunOfTwo), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
		run := exec.CommandContext(t.Context(), "bash", "-c", string(job))
		run.Dir = dir
		run.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), fmt.Sprint("SLURM_JOB_ID=", freeJob(t)), fmt.Sprint("SLURM_JOB_END_TIME=", time.Now().Add(time.Hour).Unix()))
		if out, err := run.CombinedOutput(); err != nil || !strings.Contains(string(out), "least="+map[bool]string{true: "2", false: "1"}[flags == nil]+" most=2") {
			t.Errorf("%v: %v\n%s\n%s", flags, err, job, out)
		}
		out, err := exec.CommandContext(t.Context(), "ckptstore", "--store", filepath.Join(dir, "ckpts"), "ls", "two").CombinedOutput()
		if err != nil || !strings.Contains(string(out), "step-40.a1") {
			t.Errorf("%v: %v\n%s", flags, err, out)
		}
	}
}

// freeJob returns the ID of a job of Slurm whose port is free.
func freeJob(t *testing.T) int {
	t.Helper()
	for range 100 {
		job := 1 + rand.IntN(9999)
		if l, err := net.Listen("tcp", fmt.Sprint("localhost:", 20000+job)); err == nil {
			_ = l.Close() // the trainer listens there
			return job
		}
	}
	t.Fatal("no port is free")
	return 0
}
