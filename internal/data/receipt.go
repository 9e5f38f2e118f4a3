package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
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
