// Command ckptstore inspects and maintains a store of checkpoints: it lists
// contents and history, verifies, repairs, backs up and deletes.
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
