// Command mytrainer is a trainer with its own parts, in a module of its own:
//
//	mesh.go      a backend: hooks around the life of a worker group
//	httpcall.go  an RPC backend, registered under a name
//	packed.go    a storage: the five steps of a Writer and of a Reader
//	worker.go    the training function, which uses all three
//
// Without arguments it trains two workers. One fails, and the group resumes from the last
// checkpoint:
//
//	go run .
//	go run . run --backend mesh --nproc 4 -- ./mytrainer worker
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/client/function"
	"github.com/ckptstore/ckptstore/trainer"
)

func main() {
	ctx := context.Background()
	if len(os.Args) == 2 && os.Args[1] == "worker" {
		os.Exit(function.Main(ctx, train, client.WithEncoding(mesh{}.EncodeData)))
	}
	if len(os.Args) == 1 {
		self, err := os.Executable()
		if err != nil {
			fmt.Fprintln(os.Stderr, "mytrainer:", err)
			os.Exit(1)
		}
		os.Args = append(os.Args, "run", "--backend", "mesh", "--nproc", "2", "--set", "fail_at=3", "--", self, "worker")
	}
	os.Exit(trainer.Main(ctx,
		trainer.WithBackend("mesh", mesh{}),
		trainer.WithStorage(packed{}),
	))
}
