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

// readReceipt is the receipt of ref. Without one, the error has
// [ErrNotCommitted] in its chain; a damaged one gives a [*CorruptError].
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

// WriteReceipt makes a missing or damaged receipt anew, from what the log says
// was committed. It checks that the manifest is there and is the one that
// receipt is about. A receipt that says the same is success, one that says
// something else is an error. It is durable on return.
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
	there, err := r.readReceipt(ctx, ref)
	var damaged *CorruptError
	switch {
	case err == nil && !there.Same(receipt):
		return fmt.Errorf("%s already records event %s at sequence %d of store %s; if that store is gone, remove the file",
			r.path(ref, checkpoint.ReceiptFile), there.Event, there.Sequence, there.Store)
	case err != nil && !errors.Is(err, ErrNotCommitted) && !errors.As(err, &damaged):
		return err
	}
	// One that is in place is written again: it may not be durable.
	data, err := checkpoint.EncodeReceipt(receipt)
	if err != nil {
		return err
	}
	if err := r.writeFile(ctx, ref, checkpoint.ReceiptFile, data, object.Replace); err != nil {
		return err
	}
	r.tidy(ctx, ref)
	return r.sync(ctx, ref)
}

// tidy removes what cut writes have left in the directory of a checkpoint that
// is committed: nobody writes there any more. What cannot be removed costs room,
// and is listed by a verification.
func (r *Root) tidy(ctx context.Context, ref checkpoint.Ref) {
	names, _ := r.contents(ctx, ref)
	for _, file := range names {
		if strings.HasSuffix(file, object.Partial) {
			_ = r.b.Remove(ctx, nameOf(ref, file))
		}
	}
}

// TakenError says that a directory holds a checkpoint which is not the one
// that was to be written or removed, as when somebody has copied it there.
// Nothing in the directory was changed.
type TakenError struct {
	Ref  checkpoint.Ref
	File string // path of the manifest or receipt that says so
	What string // what it is
	Err  error  // a [*CorruptError] when it is damaged
}

// Error says what is there and the next step.
func (e *TakenError) Error() string {
	return fmt.Sprintf("%s is %s, which is left as it is; move its directory away, and use it in its own store or import an export of it", e.File, e.What)
}

// Unwrap is the damage, if there is any.
func (e *TakenError) Unwrap() error { return e.Err }

// OfStore names the store whose checkpoints lie here, and what it was called
// when it committed the older ones. Without it, no manifest and no receipt is
// taken for this store's own, so that none is written beside or removed. It is
// called before anything is written.
func (r *Root) OfStore(id string, formerly ...string) {
	r.stores = append([]string{id}, formerly...)
}

// contents are the names in the directory of ref. One that is not there has
// none.
func (r *Root) contents(ctx context.Context, ref checkpoint.Ref) ([]string, error) {
	names, err := r.b.List(ctx, nameOf(ref))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return names, err
}

// own looks at every manifest and receipt among the names in the directory of
// ref. One that is not certainly of this checkpoint in this store is a
// [*TakenError]: a damaged one too, because nobody can tell whose it is. It
// reports whether there is a receipt, and whether a manifest.
func (r *Root) own(ctx context.Context, ref checkpoint.Ref, names []string) (receipt, manifest bool, err error) {
	damaged := func(file, what string, err error) (bool, bool, error) {
		return false, false, &TakenError{Ref: ref, File: r.path(ref, file), What: "a damaged " + what, Err: err}
	}
	slices.Sort(names) // the receipt says most and comes first
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

// free checks that the directory of ref, if there is one, has nothing of
// another checkpoint.
func (r *Root) free(ctx context.Context, ref checkpoint.Ref) error {
	names, err := r.contents(ctx, ref)
	if err == nil {
		_, _, err = r.own(ctx, ref, names)
	}
	return err
}
