package slurm

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func valid() Script {
	return Script{Name: "bert", Nodes: 1, NProc: "8", Time: "24:00:00", Warning: 10 * time.Minute, Store: "/mnt/shared/ckpts", Command: []string{"python3", "train.py"}}
}

func TestScript(t *testing.T) {
	t.Parallel()
	want := `#!/bin/bash
#SBATCH --job-name=bert
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x.%j.out

# Add what the job needs: --gpus-per-node, --account, modules.
export CKPTSTORE_STORE=/mnt/shared/ckpts
srun --ntasks-per-node=1 trainer run --name bert --nproc 8 --walltime auto --preempt-grace 570s -- python3 train.py
code=$?
# 75: told to stop, and all work is in a checkpoint.
[ $code -eq 75 ] && scontrol requeue $SLURM_JOB_ID
exit $code
`
	if got := valid().String(); got != want {
		t.Errorf("the script is\n%s\nwant\n%s", got, want)
	}
	s := valid()
	s.Nodes, s.Exits, s.Partition = 4, true, "gpu"
	got := s.String()
	for _, line := range []string{"#SBATCH --no-kill", "srun --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill trainer run ", "#SBATCH --partition=gpu", "exit $code # RequeueExit=75"} {
		if !strings.Contains(got, line) {
			t.Errorf("the script of 4 nodes has no %q:\n%s", line, got)
		}
	}
	if strings.Contains(got, "scontrol") {
		t.Errorf("the script needs scontrol:\n%s", got)
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	if err := valid().Validate(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*Script){
		"no name":                func(s *Script) { s.Name = "" },
		"a name that is a flag":  func(s *Script) { s.Name = "-x" },
		"a line in the name":     func(s *Script) { s.Name = "a\nrm" },
		"a comment in the time":  func(s *Script) { s.Time = "1#" },
		"no nodes":               func(s *Script) { s.Nodes = 0 },
		"no ranks":               func(s *Script) { s.NProc = "" },
		"a warning of a second":  func(s *Script) { s.Warning = time.Second },
		"no command":             func(s *Script) { s.Command = nil },
		"a space in a partition": func(s *Script) { s.Partition = "a b" },
	} {
		s := valid()
		change(&s)
		if s.Validate() == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

// A shell reads back the words of a command as they were given.
func TestQuote(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		words := rapid.SliceOfN(rapid.StringMatching(`[ -~\n]{0,12}`), 1, 6).Draw(t, "words")
		line := "printf '%s\\0'"
		for _, word := range words {
			line += " " + quote(word)
		}
		out, err := exec.Command("sh", "-c", line).Output()
		if want := strings.Join(words, "\x00") + "\x00"; err != nil || string(out) != want {
			t.Fatalf("%s: %q, %v; want %q", line, out, err, want)
		}
	})
}

func TestJob(t *testing.T) {
	for _, c := range []struct {
		id, count string
		restarts  int
	}{{"", "3", 0}, {"4711", "", 0}, {"4711", "2", 2}, {"4711", "many", 0}} {
		t.Setenv("SLURM_JOB_ID", c.id)
		t.Setenv("SLURM_RESTART_COUNT", c.count)
		if id, restarts := Job(); id != c.id || restarts != c.restarts {
			t.Errorf("%v: job %q, restarted %d times", c, id, restarts)
		}
	}
}
