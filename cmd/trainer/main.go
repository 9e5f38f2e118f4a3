// Command trainer runs training jobs and keeps their checkpoints.
//
//	trainer run -- python3 train.py   runs a job
//	trainer demo                      shows everything on a small real model
package main

import (
	"context"
	"os"

	"github.com/ckptstore/ckptstore/internal/data"
)

func main() {
	data.Threads()
	os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
