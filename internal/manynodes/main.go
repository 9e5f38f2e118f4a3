// Command manynodes runs jobs over several nodes of a testbed, breaks nodes and links, and
// judges what the ranks did.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/testbed"
)

// workerVerb is the first argument of this program as a worker.
const workerVerb = "worker"

func main() {
	testbed.Main()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	var err error
	if len(os.Args) > 1 && os.Args[1] == workerVerb {
		cancel() // a worker handles signals as the client library does
		err = runWorker(context.Background(), os.Args[2:])
	} else {
		err = errors.New("not yet")
		_ = ctx
	}
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "manynodes:", err)
		os.Exit(1)
	}
}
