// Package slurm writes job scripts for Slurm that start the trainer, and reads which job
// of Slurm a process belongs to.
//
// A script has one srun, with one trainer on each node. Slurm warns the trainer before
// the end of the job's time, the ranks save, the trainer exits with 75, and the script
// has Slurm requeue the job. The next start continues the run, which has the job's name.
package slurm

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/ckptstore/ckptstore/internal/store"
)

// spare is the part of the warning in which ranks can no longer save: the trainer's
// --grace, and time to end.
const spare = 30 * time.Second

// A Script is what a job script depends on. Its zero values leave out their lines,
// except where a field has a default.
type Script struct {
	Name      string        // of the job and of its run
	Nodes     int           // at least 1
	MinNodes  int           // with how many of them the job continues when nodes fail; 0 for all
	NProc     string        // ranks per node, as --nproc of the trainer
	Time      string        // limit of the job's time, as --time of sbatch
	Warning   time.Duration // how long before that limit the ranks save; whole seconds
	Partition string
	Store     string // a directory that all nodes have, or a URL
	Command   []string
	// Exits is for clusters with RequeueExit=75: the script leaves requeuing to Slurm. A
	// job that runs in a container without scontrol needs it.
	Exits bool
}

// Validate returns an error that names the first field that the script cannot have.
func (s Script) Validate() error {
	for _, f := range []struct{ name, value string }{{"--name", s.Name}, {"--time", s.Time}, {"--partition", s.Partition}, {"--nproc", s.NProc}} {
		if strings.ContainsFunc(f.value, func(r rune) bool {
			return unicode.IsSpace(r) || unicode.IsControl(r) || strings.ContainsRune(`'"\#`, r)
		}) {
			return fmt.Errorf("%s %q: a line of #SBATCH has no space, quote, # or backslash in a value", f.name, f.value)
		}
	}
	if err := store.ValidRun(s.Name); err != nil {
		return fmt.Errorf("--name %q: %w: name the run, such as bert", s.Name, err)
	}
	switch {
	case s.Name[0] == '-':
		return fmt.Errorf("--name %q: name the run, such as bert", s.Name)
	case strings.ContainsAny(s.Name, "/%"):
		return fmt.Errorf("--name %q: it is a part of the name of the job's output file, so it has no / and no %%", s.Name)
	case s.Nodes < 1:
		return fmt.Errorf("--nodes %d: want 1 or more", s.Nodes)
	case s.MinNodes < 0 || s.MinNodes > s.Nodes:
		return fmt.Errorf("--min-nodes %d: want 1 to %d, the number of --nodes", s.MinNodes, s.Nodes)
	case s.NProc == "":
		return fmt.Errorf("--nproc: want the ranks of a node, such as 8 or gpu")
	case s.Warning < time.Minute || s.Warning > 18*time.Hour:
		return fmt.Errorf("--warning %s: Slurm takes 1m to 18h, and may send the warning a minute early", s.Warning)
	case len(s.Command) == 0:
		return fmt.Errorf("no command: give it after --, such as -- python3 train.py")
	}
	return nil
}

// String returns the script, for a valid Script.
func (s Script) String() string {
	var b strings.Builder
	option := func(format string, values ...any) { fmt.Fprintf(&b, "#SBATCH "+format+"\n", values...) }
	b.WriteString("#!/bin/bash\n")
	option("--job-name=%s", s.Name)
	option("--nodes=%d", s.Nodes)
	option("--ntasks-per-node=1")
	if s.Partition != "" {
		option("--partition=%s", s.Partition)
	}
	if s.Time != "" {
		option("--time=%s", s.Time)
	}
	option("--signal=USR1@%d", int(s.Warning.Seconds()))
	option("--requeue")
	option("--open-mode=append")
	option("--output=%%x.%%j.out")
	srun, nodes := "srun --ntasks-per-node=1", ""
	if s.Nodes > 1 {
		srun += " --kill-on-bad-exit=0"
	}
	if s.MinNodes > 0 && s.MinNodes < s.Nodes {
		// Otherwise Slurm ends and requeues a job that has lost a node: its trainers would wait for
		// a node that cannot come.
		option("--no-kill")
		srun += " --no-kill"
		nodes = fmt.Sprintf(" --nnodes %d:%d", s.MinNodes, s.Nodes)
	}
	b.WriteString("\n# Add what the job needs: --gpus-per-node, --account, modules.\n")
	if s.Store != "" {
		fmt.Fprintf(&b, "export CKPTSTORE_STORE=%s\n", quote(s.Store))
	}
	fmt.Fprintf(&b, "%s trainer run --name %s%s --nproc %s --walltime auto --preempt-grace %ds --", srun, quote(s.Name), nodes, quote(s.NProc), int((s.Warning - spare).Seconds()))
	for _, word := range s.Command {
		b.WriteString(" " + quote(word))
	}
	b.WriteString("\ncode=$?\n# 75: told to stop, and all work is in a checkpoint.\n")
	if s.Exits {
		b.WriteString("exit $code # RequeueExit=75 requeues the job\n")
	} else {
		b.WriteString("[ $code -eq 75 ] && scontrol requeue $SLURM_JOB_ID\nexit $code\n")
	}
	return b.String()
}

// quote returns a word as a shell reads it.
func quote(word string) string {
	plain := func(r rune) bool {
		return r < unicode.MaxASCII && (unicode.IsLetter(r) || unicode.IsDigit(r)) || strings.ContainsRune("-_=./:,@%+", r)
	}
	if word != "" && strings.IndexFunc(word, func(r rune) bool { return !plain(r) }) < 0 {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// Job returns the ID of the job of Slurm that this process belongs to, and how often
// Slurm requeued it. The ID is empty outside of Slurm.
func Job() (id string, restarts int) {
	id = os.Getenv("SLURM_JOB_ID")
	if id == "" {
		return "", 0
	}
	restarts, _ = strconv.Atoi(os.Getenv("SLURM_RESTART_COUNT")) // unset at the first start
	return id, max(restarts, 0)
}
