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
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/object/faultproxy"
)

// large is more bytes than a small file has.
const large = 1 << 20

// faults are by name what happens to requests of data files, and to none of metadata.
var faults = map[string]faultproxy.Fault{
	"flip-put":      {Match: sends, Times: 1, Do: faultproxy.FlipSent(large / 2)},
	"flip-puts":     {Match: sends, Do: faultproxy.FlipSent(large / 2)},
	"cut-put":       {Match: sends, Times: 1, Do: faultproxy.CutSent(large / 2)},
	"flip-get":      {Match: reads, Times: 1, Do: faultproxy.FlipReceived(large / 2)},
	"flip-gets":     {Match: reads, Do: faultproxy.FlipReceived(large / 2)},
	"cut-get":       {Match: reads, Times: 1, Do: faultproxy.CutReceived(large / 2)},
	"dead-put":      {Match: sends, Skip: 3, Times: 1, Do: faultproxy.Hang()},
	"stuck-put":     {Match: sends, Skip: 5, Times: 1, Do: faultproxy.StallSent(large / 2)},
	"drop-complete": {Match: faultproxy.Of(faultproxy.Complete), Times: 1, Do: faultproxy.DropAnswer()},
}

// sends reports whether a request has a large body.
func sends(r faultproxy.Request) bool { return r.Size > large }

// reads reports whether a request reads a data file of ckptstore or of PyTorch.
func reads(r faultproxy.Request) bool {
	return r.Class == faultproxy.Get && (strings.HasSuffix(r.Key, ".safetensors") || strings.HasSuffix(r.Key, ".distcp"))
}

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
	fault := flags.String("fault", "", "what happens to data files, with commas between: "+strings.Join(slices.Sorted(maps.Keys(faults)), ", "))
	every := flags.Duration("every", 10*time.Second, "interval of the counters")
	flags.DurationVar(&shape.FirstByte, "first-byte", 0, "time added before the first byte of each answer")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *every <= 0 || *refused < 0 || *refused > 1 || flags.NArg() > 0 {
		return errors.New("usage: the interval must be positive, the share at most 1, and there are no arguments")
	}
	var chosen []faultproxy.Fault
	for name := range strings.SplitSeq(*fault, ",") {
		f, known := faults[name]
		if known {
			chosen = append(chosen, f)
		} else if name != "" {
			return fmt.Errorf("usage: no fault %q", name)
		}
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
	for _, f := range chosen {
		p.Inject(f)
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
