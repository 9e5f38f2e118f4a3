// Command slow puts a slow and unreliable network in front of an S3 server, for measurements
// and trials by hand. It prints its address, and its counters at intervals and at its end.
//
//	go run ./internal/object/faultproxy/slow --target http://127.0.0.1:7070 --first-byte 30ms --rate 80000000
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/object/faultproxy"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "slow:", err)
		os.Exit(1)
	}
}

// run serves until ctx ends.
func run(ctx context.Context, args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("slow", flag.ContinueOnError)
	var shape faultproxy.Shape
	target := flags.String("target", "", "URL of the server, http://host:port")
	rate := flags.Int64("rate", 0, "bytes a second of each connection, in each direction; 0: no limit")
	refused := flags.Float64("refused", 0, "share of requests that are answered with 503 SlowDown")
	every := flags.Duration("every", 10*time.Second, "interval of the counters")
	flags.DurationVar(&shape.FirstByte, "first-byte", 0, "time added before the first byte of each answer")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *every <= 0 || *refused < 0 || *refused > 1 || flags.NArg() > 0 {
		return errors.New("usage: the interval must be positive, the share at most 1, and there are no arguments")
	}
	p, err := faultproxy.Start(faultproxy.Options{Target: *target})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	shape.Sent, shape.Received = *rate, *rate
	p.SetShape(shape)
	if *refused > 0 {
		p.Inject(faultproxy.Fault{Share: *refused, Seed: uint64(time.Now().UnixNano()), Do: faultproxy.SlowDown()})
	}
	fmt.Fprintln(out, p.URL())
	tick := time.NewTicker(*every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			fmt.Fprintln(out, "all:", p.Counts())
			return nil
		case <-tick.C:
			fmt.Fprintln(out, p.Counts())
		}
	}
}
