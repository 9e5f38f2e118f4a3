package session

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
)

// writer is own or, if the job has a storage, that storage's in its place.
func (s *Store) writer(own *data.FileWriter) data.Writer {
	if s.Storage == nil {
		return own
	}
	return heldWriter{s.Storage.Writer(own.Location()), own.Location(), s}
}

// Reader is own or, if the job has a storage, that storage's in its place.
func (s *Store) Reader(own *data.FileReader) data.Reader {
	if s.Storage == nil {
		return own
	}
	return s.Storage.Reader(own.Location())
}

// heldWriter is the writer of a job's storage, held to what [data.Writer] says.
type heldWriter struct {
	data.Writer
	at    data.Location
	store *Store
}

// PrepareLocalPlan implements data.Writer. It refuses a plan that is not the one that
// was given: the worker copies its items in the order in which it has sent them.
func (w heldWriter) PrepareLocalPlan(ctx context.Context, local checkpoint.Local) (checkpoint.Local, error) {
	given := checkpoint.EncodeLocal(local)
	got, err := w.Writer.PrepareLocalPlan(ctx, checkpoint.Local{Rank: local.Rank, Items: slices.Clone(local.Items)})
	if err != nil {
		return checkpoint.Local{}, err
	}
	sameSize := func(a, b checkpoint.Item) bool { return a.Bytes == b.Bytes }
	if slices.EqualFunc(got.Items, local.Items, sameSize) && bytes.Equal(checkpoint.EncodeLocal(got), given) {
		return got, nil
	}
	return checkpoint.Local{}, fmt.Errorf("the storage changed the plan of rank %d for %s: its PrepareLocalPlan must return the plan as it was given, with the same items in the same order",
		local.Rank, w.at.Ref)
}

// PrepareGlobalPlan implements data.Writer. It refuses a layout that is not the one
// that was given: that is what all ranks save.
func (w heldWriter) PrepareGlobalPlan(ctx context.Context, layout checkpoint.Layout) (checkpoint.Layout, error) {
	given := checkpoint.EncodeLayout(layout)
	got, err := w.Writer.PrepareGlobalPlan(ctx, layout)
	if err != nil {
		return checkpoint.Layout{}, err
	}
	if !bytes.Equal(checkpoint.EncodeLayout(got), given) {
		return checkpoint.Layout{}, fmt.Errorf("the storage changed the plan of all ranks for %s: its PrepareGlobalPlan must return the layout as it was given", w.at.Ref)
	}
	return got, nil
}
