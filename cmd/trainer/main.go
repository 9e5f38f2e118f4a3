// Command trainer runs training jobs and keeps their checkpoints.
//
//	trainer run -- python3 train.py   runs a job
//	trainer demo                      shows everything on a small real model
package main

import (
	"context"
	"os"

	"github.com/ckptstore/ckptstore/trainer"
)

func main() { os.Exit(trainer.Main(context.Background())) }
