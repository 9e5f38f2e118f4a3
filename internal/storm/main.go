// Command storm kills, stops and continues all processes of a store at random, while
// runs train and save in it. Package check then judges the store.
//
//	trainers, workers (Go, and through the Python package), guards, the owner,
//	agents and the workers that joined them, ckptstore serve
//	            in parallel with
//	gc --apply, verify, ls, views verify, backup, serve
//
// It prints one JSON object of figures, and exits with 1 if anything is wrong: a lost
// acknowledged checkpoint, a wrong bit in a listed one, a rank that went back, an
// unexplained exit code, a leftover process.
//
//	go run ./internal/storm --duration 2m --seed 7
//
// The seed repeats the storm's actions, their targets and times, as far as possible:
// the timing of the processes themselves varies.
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
// and the next owner may be killed while it takes over.
const waitForOwner = "60s"

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	var err error
	if len(os.Args) > 1 && os.Args[1] == "worker" {
		cancel() // a worker dies of signals, or handles them as the client library does
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
	flags.DurationVar(&o.duration, "duration", 2*time.Minute, "duration of the storm, before the checks")
	flags.Uint64Var(&o.seed, "seed", 0, "seed of the storm's actions; 0 for one from the clock")
	flags.StringVar(&o.dir, "dir", "", "directory for everything; it must not exist (default: a temporary directory)")
	flags.StringVar(&o.bin, "bin", "", "directory of ckptstore and trainer (default: build them)")
	flags.BoolVar(&o.keep, "keep", false, "keep the directory; it is always kept when something is wrong")
	flags.IntVar(&o.cut, "cut-events", 512, "events after which the live log is cut; 0 for the default")
	flags.StringVar(&o.python, "python", "python3", "interpreter of the run through the Python package; empty for none")
	flags.StringVar(&o.source, "source", ".", "root of the repository")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%q: want only flags", flags.Args())
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
