// Package contract holds the storage of a job to its contract: see [data.Writer] and [data.Reader].
package contract

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/retry"
)

// panicked turns a panic in a storage's step into an error: the save or load
// fails, and the job continues.
func panicked(step string, ref checkpoint.Ref, err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("%s of the storage panicked for %s: %v\n%s", step, ref, p, debug.Stack())
	}
}

// Reader wraps the reader of a job's storage and turns its panics into
// errors.
type Reader struct {
	data.Reader
	Ref checkpoint.Ref
}

// ReadMetadata implements data.Reader.
func (r Reader) ReadMetadata(ctx context.Context) (m checkpoint.Manifest, err error) {
	defer panicked("ReadMetadata", r.Ref, &err)
	return r.Reader.ReadMetadata(ctx)
}

// SetUp implements data.Reader.
func (r Reader) SetUp(ctx context.Context, m checkpoint.Manifest, isCoordinator bool) (err error) {
	defer panicked("SetUp", r.Ref, &err)
	return r.Reader.SetUp(ctx, m, isCoordinator)
}

// PrepareLocalPlan implements data.Reader.
func (r Reader) PrepareLocalPlan(ctx context.Context, reads []checkpoint.Read) (out []checkpoint.Read, err error) {
	defer panicked("PrepareLocalPlan", r.Ref, &err)
	return r.Reader.PrepareLocalPlan(ctx, reads)
}

// PrepareGlobalPlan implements data.Reader.
func (r Reader) PrepareGlobalPlan(ctx context.Context, reads [][]checkpoint.Read) (out [][]checkpoint.Read, err error) {
	defer panicked("PrepareGlobalPlan", r.Ref, &err)
	return r.Reader.PrepareGlobalPlan(ctx, reads)
}

// ReadData implements data.Reader.
func (r Reader) ReadData(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst data.Destination) (n int64, err error) {
	defer panicked("ReadData", r.Ref, &err)
	return r.Reader.ReadData(ctx, wants, reads, dst)
}

// Writer wraps the writer of a job's storage and enforces the contract of
// [data.Writer].
type Writer struct {
	data.Writer
	At    data.Location
	Data  *data.Root
	Calls *retry.Calls  // of the log; the limit leaves out the time in which it does not answer
	Limit time.Duration // of a step that all saves of the job wait for
}

// SetUp implements data.Writer.
func (w Writer) SetUp(ctx context.Context, isCoordinator bool) (err error) {
	defer panicked("SetUp", w.At.Ref, &err)
	return w.Writer.SetUp(ctx, isCoordinator)
}

// PrepareLocalPlan implements data.Writer. It refuses a plan that differs from
// the given one: the worker copies its items in the order in which it sent them.
func (w Writer) PrepareLocalPlan(ctx context.Context, local checkpoint.Local) (got checkpoint.Local, err error) {
	defer panicked("PrepareLocalPlan", w.At.Ref, &err)
	given := checkpoint.EncodeLocal(local)
	got, err = w.Writer.PrepareLocalPlan(ctx, checkpoint.Local{Rank: local.Rank, Items: slices.Clone(local.Items)})
	if err != nil {
		return checkpoint.Local{}, err
	}
	sameSize := func(a, b checkpoint.Item) bool { return a.Bytes == b.Bytes }
	if slices.EqualFunc(got.Items, local.Items, sameSize) && bytes.Equal(checkpoint.EncodeLocal(got), given) {
		return got, nil
	}
	return checkpoint.Local{}, fmt.Errorf("the storage changed the plan of rank %d for %s: its PrepareLocalPlan must return the plan as it was given, with the same items in the same order",
		local.Rank, w.At.Ref)
}

// PrepareGlobalPlan implements data.Writer. It refuses a layout that differs from
// the given one, which all ranks save by.
func (w Writer) PrepareGlobalPlan(ctx context.Context, layout checkpoint.Layout) (got checkpoint.Layout, err error) {
	defer panicked("PrepareGlobalPlan", w.At.Ref, &err)
	ctx, cancel := w.Calls.Timeout(ctx, w.Limit)
	defer cancel()
	given := checkpoint.EncodeLayout(layout)
	got, err = w.Writer.PrepareGlobalPlan(ctx, layout)
	if err != nil {
		return checkpoint.Layout{}, w.late(ctx, "PrepareGlobalPlan", err)
	}
	if !bytes.Equal(checkpoint.EncodeLayout(got), given) {
		return checkpoint.Layout{}, fmt.Errorf("the storage changed the plan of all ranks for %s: its PrepareGlobalPlan must return the layout as it was given", w.At.Ref)
	}
	return got, nil
}

// WriteData implements data.Writer. It refuses a result without a digest.
func (w Writer) WriteData(ctx context.Context, rank int, items []checkpoint.Item, src data.Source) (written data.Written, err error) {
	defer panicked("WriteData", w.At.Ref, &err)
	written, err = w.Writer.WriteData(ctx, rank, items, src)
	if err == nil && written.Index == (checkpoint.Digest{}) {
		err = fmt.Errorf("the storage gave no digest of what it wrote of rank %d for %s: its WriteData must return in Written.Index the digest that vouches for the files", rank, w.At.Ref)
	}
	return written, err
}

// Finish implements data.Writer. It allows only the given manifest to be
// committed, in place, and refuses an end without a commit.
func (w Writer) Finish(ctx context.Context, m checkpoint.Manifest, commit data.Commit) (receipt checkpoint.Receipt, err error) {
	defer panicked("Finish", w.At.Ref, &err)
	want := checkpoint.Sum(checkpoint.EncodeManifest(m))
	const next = "its Finish must call Location.Commit with the manifest that it was given"
	limited, cancel := w.Calls.Timeout(ctx, w.Limit)
	defer cancel()
	called := false
	var refused error
	receipt, err = w.Writer.Finish(limited, m, func(_ context.Context, got checkpoint.Digest) (d checkpoint.Decision, err error) {
		called = true
		defer func() { refused = err }()
		if got != want {
			return d, fmt.Errorf("the storage commits the manifest %s for %s, which has %s: %s", got, w.At.Ref, want, next)
		}
		if _, err := w.Data.Reader(w.At.Ref).WithManifest(want).ReadMetadata(ctx); err != nil {
			return d, fmt.Errorf("the storage commits %s without its manifest: %w: %s", w.At.Ref, err, next)
		}
		return commit(ctx, want)
	})
	switch {
	case err != nil:
		return receipt, w.late(limited, "Finish", err)
	case !called:
		return receipt, fmt.Errorf("the storage ended %s without a commit: %s", w.At.Ref, next)
	}
	return receipt, refused
}

// late adds to a step's error that the step ran out of time.
func (w Writer) late(ctx context.Context, step string, err error) error {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%s of the storage did not end %s within %s, the time for a save: %w", step, w.At.Ref, w.Limit, err)
}
