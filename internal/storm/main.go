// Command storm kills, stops and continues everything of a store at random, while
// runs train and save in it, and then has package check judge what is left.
//
//	trainers, workers (Go, and through the Python package), guards, the owner,
//	agents and the workers that joined them, ckptstore serve
//	            beside
//	gc --apply, verify, ls, views verify, backup, serve
//
// It prints one JSON object of figures, and ends with 1 if anything is wrong: an
// acknowledged checkpoint that is lost, one bit of a listed one, a rank that went
// back, an exit code that nothing explains, a process that is left.
//
//	go run ./internal/storm --duration 2m --seed 7
//
// The seed repeats what is done to whom and when, as far as the machine lets it:
// processes come and go at moments of their own.
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
)

// waitForOwner is --wait of all commands: an owner may be stopped for [longestStop],
// and the next one be killed while it takes over.
const waitForOwner = "60s"

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	var err error
	if len(os.Args) > 1 && os.Args[1] == "worker" {
		cancel() // a worker dies of signals, or does what the client library does
		err = runWorker(context.Background(), os.Args[2:])
	} else {
		err = run(ctx, os.Args[1:])
	}
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "storm:", err)
		os.Exit(1)
	}
}

// options are the flags of a storm.
type options struct {
	duration time.Duration
	seed     uint64
	dir      string
	bin      string
	keep     bool
	cut      int
	python   string
	source   string
}

func run(ctx context.Context, args []string) error {
	var o options
	flags := flag.NewFlagSet("storm", flag.ContinueOnError)
	flags.DurationVar(&o.duration, "duration", 2*time.Minute, "how long the storm lasts, before all is checked")
	flags.Uint64Var(&o.seed, "seed", 0, "of what is done to whom; 0 for one from the clock")
	flags.StringVar(&o.dir, "dir", "", "where everything goes; it must not exist (default: a temporary directory)")
	flags.StringVar(&o.bin, "bin", "", "directory of ckptstore and trainer (default: they are built)")
	flags.BoolVar(&o.keep, "keep", false, "leave the directory; it is left in any case when something is wrong")
	flags.IntVar(&o.cut, "cut-events", 512, "events after which the live log is cut; 0 for as ever")
	flags.StringVar(&o.python, "python", "python3", "interpreter of the run through the Python package; empty for none")
	flags.StringVar(&o.source, "source", ".", "root of the repository")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%q: want flags alone", flags.Args())
	}
	if o.seed == 0 {
		o.seed = uint64(time.Now().UnixNano()) //nolint:gosec // any number
	}
	s, err := newStorm(o)
	if err != nil {
		return err
	}
	return s.run(ctx)
}
