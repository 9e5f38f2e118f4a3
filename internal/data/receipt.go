package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// readReceipt returns the receipt of ref. Without one, the error has [ErrNotCommitted] in its
// chain; a damaged one gives a [*CorruptError].
func (r *Root) readReceipt(ctx context.Context, ref checkpoint.Ref) (checkpoint.Receipt, error) {
	path := r.path(ref, checkpoint.ReceiptFile)
	data, err := r.readFile(ctx, ref, checkpoint.ReceiptFile)
	if errors.Is(err, fs.ErrNotExist) {
		return checkpoint.Receipt{}, fmt.Errorf("%s: %w", path, ErrNotCommitted)
	}
	if err != nil {
		return checkpoint.Receipt{}, err
	}
	receipt, err := checkpoint.DecodeReceipt(data)
	if err != nil {
		return checkpoint.Receipt{}, &CorruptError{File: path, Block: -1, Problem: err.Error()}
	}
	receipt.Ref = ref
	return receipt, nil
}

// WriteReceipt rewrites a missing or damaged receipt from the log's record of the commit. It
// checks that the manifest exists and matches the receipt. An existing equal receipt is
// success, a different one is an error. The receipt is durable on return.
func (r *Root) WriteReceipt(ctx context.Context, ref checkpoint.Ref, receipt checkpoint.Receipt) error {
	err := errors.Join(ctx.Err(), ref.Validate())
	if err == nil {
		err = r.repairReceipt(ctx, ref, receipt)
	}
	if err != nil {
		return fmt.Errorf("write the receipt of checkpoint %s: %w", ref, err)
	}
	return nil
}

func (r *Root) repairReceipt(ctx context.Context, ref checkpoint.Ref, receipt checkpoint.Receipt) error {
	m, err := r.readManifest(ctx, ref, receipt.Manifest)
	if err != nil {
		return err
	}
	if err := receipt.Matches(m); err != nil {
		return err
	}
	return r.writeReceipt(ctx, ref, receipt)
}

func (r *Root) writeReceipt(ctx context.Context, ref checkpoint.Ref, receipt checkpoint.Receipt) error {
	data, err := checkpoint.EncodeReceipt(receipt)
	if err != nil {
		return err
	}
	if r.far() { // a new receipt needs no question
		if err := r.writeFile(ctx, ref, checkpoint.ReceiptFile, data, object.Exclusive); !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	there, err := r.readReceipt(ctx, ref)
	var damaged *CorruptError
	switch {
	case err == nil && !there.Same(receipt):
		return fmt.Errorf("%s already records event %s at sequence %d of store %s; if that store is gone, remove the file",
			r.path(ref, checkpoint.ReceiptFile), there.Event, there.Sequence, there.Store)
	case err != nil && !errors.Is(err, ErrNotCommitted) && !errors.As(err, &damaged):
		return err
	}
	if err == nil && r.far() {
		return nil
	}
	// Rewrite an existing receipt: it may not be durable.
	if err := r.writeFile(ctx, ref, checkpoint.ReceiptFile, data, object.Replace); err != nil {
		return err
	}
	r.tidy(ctx, ref)
	return r.sync(ctx, ref)
}

// tidy removes the leftovers of interrupted writes in the directory of a committed
// checkpoint, in which no process writes any more. Leftovers that cannot be removed only cost
// space, and a verification lists them.
func (r *Root) tidy(ctx context.Context, ref checkpoint.Ref) {
	names, _ := r.contents(ctx, ref)
	for _, file := range names {
		if strings.HasSuffix(file, object.Partial) {
			_ = r.b.Remove(ctx, nameOf(ref, file))
		}
	}
}

// TakenError reports that a directory holds another checkpoint than the one to be written or
// removed, for instance because a user copied it there. Nothing in the directory was changed.
type TakenError struct {
	Ref  checkpoint.Ref
	File string // path of the other checkpoint's manifest or receipt
	What string // description of File
	Err  error  // a [*CorruptError] when it is damaged
}

// Error describes the file and the next step.
func (e *TakenError) Error() string {
	return fmt.Sprintf("%s is %s, which is left as it is; move its directory away, and use it in its own store or import an export of it", e.File, e.What)
}

// Unwrap returns the damage, if there is any.
func (e *TakenError) Unwrap() error { return e.Err }

// OfStore sets the ID of the store whose checkpoints lie here, and the IDs under which it
// committed older ones. Without it, no manifest or receipt counts as this store's own, and
// none is overwritten or removed. It is called before anything is written.
func (r *Root) OfStore(id string, formerly ...string) {
	r.stores = append([]string{id}, formerly...)
}

// contents returns the names in the directory of ref; none if it does not exist.
func (r *Root) contents(ctx context.Context, ref checkpoint.Ref) ([]string, error) {
	names, err := r.names(ctx, nameOf(ref))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return names, err
}

// own checks every manifest and receipt among the names in the directory of ref. If one is
// not certainly of this checkpoint in this store, it returns a [*TakenError]. A damaged one
// counts as such too, because its owner is unknown. own reports whether there is a receipt,
// and whether a manifest.
func (r *Root) own(ctx context.Context, ref checkpoint.Ref, names []string) (receipt, manifest bool, err error) {
	damaged := func(file, what string, err error) (bool, bool, error) {
		return false, false, &TakenError{Ref: ref, File: r.path(ref, file), What: "a damaged " + what, Err: err}
	}
	slices.Sort(names) // the receipt identifies the checkpoint best and comes first
	for _, file := range names {
		var what, of string
		var at checkpoint.Ref
		switch {
		case file == checkpoint.ReceiptFile:
			x, err := r.readReceipt(ctx, ref)
			switch corrupt := (*CorruptError)(nil); {
			case errors.Is(err, ErrNotCommitted):
				continue // it was removed meanwhile
			case errors.As(err, &corrupt):
				return damaged(file, "receipt", err)
			case err != nil:
				return false, false, err
			}
			receipt, what, of, at = true, "receipt", x.Store, checkpoint.RefOf(x.Run, x.Trial, x.Checkpoint)
		case checkpoint.IsManifest(file):
			data, err := r.readFile(ctx, ref, file)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return false, false, err
			}
			m, err := checkpoint.DecodeManifest(data)
			if err != nil {
				return damaged(file, "manifest", &CorruptError{File: r.path(ref, file), Block: -1, Problem: err.Error()})
			}
			manifest, what, of, at = true, "manifest", m.Store, checkpoint.RefOf(m.Run, m.Trial, m.Checkpoint)
		default:
			continue
		}
		if !slices.Contains(r.stores, of) || at != ref {
			return false, false, &TakenError{Ref: ref, File: r.path(ref, file), What: fmt.Sprintf("the %s of checkpoint %s of store %s", what, at, of)}
		}
	}
	return receipt, manifest, nil
}

// free checks that the directory of ref does not hold another checkpoint. Of the files in it,
// it returns those sizes that the listing has, by name.
func (r *Root) free(ctx context.Context, ref checkpoint.Ref) (map[string]int64, error) {
	entries, err := r.b.List(ctx, nameOf(ref))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		_, _, err = r.own(ctx, ref, object.Names(entries))
	}
	if err != nil {
		return nil, err
	}
	return sizesOf(entries), nil
}

// sizesOf returns the sizes of files that a listing has, by name.
func sizesOf(entries []object.Entry) map[string]int64 {
	sizes := make(map[string]int64, len(entries))
	for _, e := range entries {
		if e.Info != nil {
			sizes[e.Name] = e.Info.Size
		}
	}
	return sizes
}
