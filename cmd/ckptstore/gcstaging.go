package main

import (
	"errors"
	"fmt"
	"text/tabwriter"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/worker/shm"
	"github.com/ckptstore/ckptstore/worker/staging"
)

// freed is `gc --staging --json`.
type freed struct {
	Directories []string `json:"directories"`
	Bytes       int64    `json:"bytes"`
}

func (a *app) freeStaging() error {
	dir, _ := shm.Dir()
	dirs, bytes, err := staging.Free(dir)
	out := freed{Directories: append([]string{}, dirs...), Bytes: bytes}
	printed := emit(a, out, []freed{out}, func(w *tabwriter.Writer, _ bool) {
		for _, dir := range out.Directories {
			fmt.Fprintln(w, dir)
		}
		fmt.Fprintf(w, "%d directories of dead trainers, %s freed\n", len(out.Directories), bytesize.Text(out.Bytes))
	})
	return errors.Join(err, printed)
}
