// Command ckptstore looks after a store of checkpoints: what is in it, what
// happened to it, and whether it is whole.
package main

import (
	"context"
	"os"

	"github.com/ckptstore/ckptstore/internal/data"
)

func main() {
	data.Threads()
	os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}
