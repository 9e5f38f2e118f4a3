package main

import (
	"context"
	"errors"
	"fmt"
	"text/tabwriter"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/store"
)

// freed is `gc --staging --json`.
type freed struct {
	Directories []string `json:"directories"`
	Bytes       int64    `json:"bytes"`
}

// freeStaging frees the shared memory of this store's dead trainers, or that of
// every store's.
func (a *app) freeStaging(ctx context.Context, all bool) error {
	shared, _ := shm.Dir()
	var out freed
	var err error
	if all {
		out.Directories, out.Bytes, err = staging.FreeAll(shared)
	} else {
		id, ierr := store.Identity(ctx, a.options())
		if ierr != nil {
			return fmt.Errorf("gc --staging: which store: %w", ierr)
		}
		out.Directories, out.Bytes, err = staging.Free(shared, id)
	}
	out.Directories = append([]string{}, out.Directories...)
	printed := console.Emit(a.Console, out, []freed{out}, func(w *tabwriter.Writer, _ bool) {
		for _, dir := range out.Directories {
			fmt.Fprintln(w, dir)
		}
		fmt.Fprintf(w, "%d directories of dead trainers, %s freed\n", len(out.Directories), bytesize.Text(out.Bytes))
	})
	return errors.Join(err, printed)
}
