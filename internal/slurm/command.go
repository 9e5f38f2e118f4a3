package slurm

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/console"
)

const templateHelp = `Print a job script for sbatch. It starts one trainer on each node by one srun. Before
the end of the job's time, and when a job of higher priority needs the nodes, Slurm
signals the trainer: the ranks save, and the trainer exits with 75. The script then has
Slurm requeue the job, and the next start continues from that checkpoint.

Slurm sends its signals to every process of the job. Workers of the Python package and
of the Go library hold them back; other workers must save in a handler of their own.

With --requeue-exit, the script leaves requeuing to a cluster whose slurm.conf has
RequeueExit=75. Use it where jobs have no scontrol, as in containers.`

// Command returns the command slurm of the program ckptstore.
func Command(c *console.Console) *cobra.Command {
	top := &cobra.Command{
		Use: "slurm", Short: "Write job scripts for Slurm", Args: console.Args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	s := Script{} // the flags fill it

	t := &cobra.Command{
		Use: "template [flags] -- COMMAND...", Short: "Print a job script for sbatch", Args: console.Args(cobra.ArbitraryArgs), Long: templateHelp,
		Example: `  ckptstore slurm template --name bert --nproc 8 --time 24:00:00 --store /mnt/shared/ckpts -- python3 train.py >bert.sbatch
  sbatch bert.sbatch`,
		RunE: func(_ *cobra.Command, command []string) error {
			s.Command = command
			if err := s.Validate(); err != nil {
				return console.Usagef("slurm template: %w", err)
			}
			_, err := fmt.Fprint(c.Out, s.String())
			return err
		},
	}
	f := t.Flags()
	f.StringVar(&s.Name, "name", "", "name of the job and of its run")
	f.IntVar(&s.Nodes, "nodes", 1, "number of nodes; for more than 1, all must share the store")
	f.IntVar(&s.MinNodes, "min-nodes", 0, "nodes with which the job continues when others fail (default: --nodes; Slurm then requeues the job when one fails)")
	f.StringVar(&s.NProc, "nproc", "gpu", "ranks per node: a number, or gpu for one a GPU")
	f.StringVar(&s.Time, "time", "", "limit of the job's time, as sbatch takes it (default: the partition's)")
	f.DurationVar(&s.Warning, "warning", 10*time.Minute, "how long before that limit the ranks save and exit")
	f.StringVar(&s.Partition, "partition", "", "partition (default: the cluster's)")
	f.BoolVar(&s.Exits, "requeue-exit", false, "the cluster has RequeueExit=75: exit with 75 without scontrol requeue")
	top.AddCommand(t)
	// --store is an option of every command; here it is a line of the script.
	t.PreRun = func(cmd *cobra.Command, _ []string) {
		if flag := cmd.Flag("store"); flag != nil && flag.Changed {
			s.Store = flag.Value.String()
		}
	}
	return top
}
