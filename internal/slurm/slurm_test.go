package slurm

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
	for _, line := range []string{"#SBATCH --nodes=4", "srun --ntasks-per-node=1 --kill-on-bad-exit=0 trainer run --name bert --nproc 8 ", "#SBATCH --partition=gpu", "exit $code # RequeueExit=75"} {
		if !strings.Contains(got, line) {
			t.Errorf("the script of 4 nodes has no %q:\n%s", line, got)
		}
	}
	for _, line := range []string{"scontrol", "--no-kill", "--nnodes"} {
		if strings.Contains(got, line) {
			t.Errorf("the script has %s:\n%s", line, got)
		}
	}
	s.MinNodes = 3
	got = s.String()
	for _, line := range []string{"#SBATCH --no-kill", "srun --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill trainer run --name bert --nnodes 3:4 --nproc 8 "} {
		if !strings.Contains(got, line) {
			t.Errorf("the script of 3 to 4 nodes has no %q:\n%s", line, got)
		}
	}
}

// A shell that runs the script passes every value on as it is. It executes none.
func TestHostileScript(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("bash"); err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "srun"), []byte("#!/bin/sh\nprintf '%s\\0' \"$@\"\nexit 3\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	check := func(t fatal, s Script) {
		t.Helper()
		cmd := exec.Command("bash", "-c", s.String())
		cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
		out, err := cmd.Output()
		got := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
		want := append([]string{"--ntasks-per-node=1", "trainer", "run", "--name", s.Name, "--nproc", s.NProc, "--walltime", "auto", "--preempt-grace", "570s", "--"}, s.Command...)
		if e := new(exec.ExitError); !errors.As(err, &e) || e.ExitCode() != 3 || !slices.Equal(got, want) {
			t.Fatalf("%v; srun has %q, want %q, of\n%s", err, got, want, s)
		}
	}
	for _, text := range []string{"x$(id)", "x`id`", "x;id", "x&id", "x|id", "x>y", "$HOME", "*", "{a,b}", "!x", "~"} {
		s := valid()
		s.Name, s.NProc = text, text
		if err := s.Validate(); err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		check(t, s)
	}
	rapid.Check(t, func(t *rapid.T) {
		s := valid()
		s.Name, s.NProc = rapid.StringMatching(`[!-~]{1,12}`).Draw(t, "name"), rapid.StringMatching(`[!-~]{1,12}`).Draw(t, "nproc")
		if s.Validate() == nil {
			check(t, s)
		}
	})
}

// fatal is a test, or a case of a property.
type fatal interface {
	Helper()
	Fatalf(format string, args ...any)
}

func TestValidate(t *testing.T) {
	t.Parallel()
	if err := valid().Validate(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*Script){
		"no name":                func(s *Script) { s.Name = "" },
		"a name that is a flag":  func(s *Script) { s.Name = "-x" },
		"a path as a name":       func(s *Script) { s.Name = "a/b" },
		"a pattern as a name":    func(s *Script) { s.Name = "a%u" },
		"a name of no run":       func(s *Script) { s.Name = strings.Repeat("a", 81) },
		"more nodes than all":    func(s *Script) { s.MinNodes = 2 },
		"fewer nodes than none":  func(s *Script) { s.MinNodes = -1 },
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
