// Command manynodes runs jobs over several nodes of a testbed, disturbs the nodes and the
// links between them, and judges what the ranks did.
//
//	go run ./internal/manynodes --faults 100 --seed 7
//
// The nodes, their network and their disk are those of internal/testbed, the programs are
// the real trainer and workers of the client library. A fault is a cut of a node's links in
// one direction or both, a pause of its trainer alone, a freeze of the whole node, or the
// death of a worker. The verdict rests on /proc of all nodes and on the ranks' own records,
// not on what the trainers print:
//
//   - no rank of an attempt runs after a rank of a later attempt has started
//   - ranks keep their nodes, and all nodes of an attempt agree on its environment
//   - every loss equals that of an unbroken run, bit by bit
//   - no acknowledged checkpoint is lost, and the store verifies
//   - no trainer ends before the job does
//
// It prints one JSON object and exits with 1 if anything else happened. The seed repeats
// the faults, not the timing of the processes.
//
// manynodes torch trains with PyTorch's FSDP2, once for each fault, and judges that in the
// same way. manynodes compare measures restarts under the trainer and under torchrun. manynodes
// replicas measures the restore from a partner's memory against TCP between the same nodes, and
// what copies in the memory of other nodes cost a training.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/testbed"
)

// workerVerb is the first argument of this program as a worker.
const workerVerb = "worker"

func main() {
	testbed.Main()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	var err error
	if run := ranks(os.Args); run != nil {
		cancel() // a worker handles signals as the client library does
		err = run(context.Background(), os.Args[2:])
	} else {
		err = command(ctx, os.Args[1:])
	}
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "manynodes:", err)
		os.Exit(1)
	}
}

// ranks returns what this program does as a rank of a job, or nil.
func ranks(args []string) func(context.Context, []string) error {
	if len(args) > 1 {
		switch args[1] {
		case workerVerb:
			return runWorker
		case bulkVerb:
			return runBulk
		}
	}
	return nil
}

// command parses the command line and runs what it asks for.
func command(ctx context.Context, args []string) error {
	o := options{out: os.Stdout}
	flags := flag.NewFlagSet("manynodes", flag.ContinueOnError)
	flags.IntVar(&o.faults, "faults", 100, "number of faults")
	flags.DurationVar(&o.duration, "duration", 0, "time after which no fault begins; 0 for any")
	flags.Uint64Var(&o.seed, "seed", 0, "seed of the faults; 0 for one from the clock")
	flags.DurationVar(&o.timeout, "node-timeout", 2*time.Second, "--node-timeout of the trainers")
	flags.IntVar(&o.skew, "skew", 10, "percent by which a node's clock runs slow or fast; 0 for right clocks")
	flags.StringVar(&o.bin, "bin", "", "directory of ckptstore and trainer, built with the tag testbed (default: build them)")
	flags.StringVar(&o.source, "source", ".", "root of the repository")
	flags.BoolVar(&o.keep, "keep", false, "keep the directory; it is always kept when something is wrong")
	flags.StringVar(&o.python, "python", "python3", "interpreter that has PyTorch")
	flags.BoolVar(&o.adapts, "offload", true, "of replicas: the nodes' network adapters segment and compute checksums, as those of clusters do")
	flags.Int64Var(&o.link, "link", 0, "of replicas: bytes per second of the cables between nodes; 0: as fast as this machine")
	flags.IntVar(&o.rounds, "rounds", 5, "of compare and replicas: measurements of each kind")
	flags.StringVar(&o.only, "only", "", "of torch and compare: the fault of this name alone; of replicas: restore or cost")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if o.seed == 0 {
		o.seed = uint64(time.Now().UnixNano()) //nolint:gosec // any number
	}
	switch what := flags.Args(); {
	case len(what) == 0:
		return o.run(ctx)
	case len(what) == 1 && what[0] == "torch":
		return o.torch(ctx)
	case len(what) == 1 && what[0] == "compare":
		return o.compare(ctx)
	case len(what) == 1 && what[0] == "replicas":
		return o.replicas(ctx)
	default:
		return fmt.Errorf("%q: want torch, compare, replicas or nothing after the flags", what)
	}
}
