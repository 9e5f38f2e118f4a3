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
	"github.com/ckptstore/ckptstore/internal/object/local"
	"golang.org/x/sync/errgroup"
)

// Examined describes a checkpoint's directory from its files, without a log.
type Examined struct {
	Ref      checkpoint.Ref
	Receipt  checkpoint.Receipt  // as it was read; zero without one
	Manifest checkpoint.Manifest // when Err is nil
	// Err is the reason why its files do not prove a checkpoint: [ErrNotCommitted] without a
	// receipt, a [*CorruptError] with a damaged file.
	Err error
}

// Examine calls visit for each directory of a checkpoint, sorted by run, trial and
// checkpoint, until visit returns an error. A directory without Err is proved by its files as
// far as possible without reading tensors: the receipt is whole and belongs to this
// directory, the manifest and every index match their digests, and every data file has the
// size in its index. A symbolic link in place of a directory is an error, since its target is
// not examined. Nothing is written.
func (r *Root) Examine(ctx context.Context, visit func(Examined) error) error {
	var refs []checkpoint.Ref
	var link error
	err := r.walk(ctx, func(ref checkpoint.Ref) { refs = append(refs, ref) }, func(d Damaged) { link = d.Err })
	if err := errors.Join(err, link); err != nil {
		return fmt.Errorf("examine the checkpoints in %s: %w", r.Dir(), err)
	}
	for batch := range slices.Chunk(refs, r.Width()) {
		examined := make([]Examined, len(batch))
		var g errgroup.Group
		for i, ref := range batch {
			g.Go(func() error {
				examined[i].Ref = ref
				examined[i].Err = r.examine(ctx, &examined[i])
				return nil
			})
		}
		_ = g.Wait() // never fails
		for _, x := range examined {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("examine the checkpoints in %s: %w", r.Dir(), err)
			}
			if err := visit(x); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *Root) examine(ctx context.Context, x *Examined) (err error) {
	if x.Receipt, err = r.readReceipt(ctx, x.Ref); err != nil {
		return err
	}
	if of := checkpoint.RefOf(x.Receipt.Run, x.Receipt.Trial, x.Receipt.Checkpoint); of != x.Ref {
		return fmt.Errorf("%s is the receipt of %s, copied here from elsewhere", r.path(x.Ref, checkpoint.ReceiptFile), of)
	}
	x.Manifest, err = r.readManifest(ctx, x.Ref, x.Receipt.Manifest)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the manifest in its receipt does not exist: %w", err)
	}
	if err != nil {
		return err
	}
	if err := x.Receipt.Matches(x.Manifest); err != nil {
		return err
	}
	entries, err := r.b.List(ctx, nameOf(x.Ref))
	if err != nil {
		return fmt.Errorf("list %s: %w", r.path(x.Ref), err)
	}
	return r.Writer(x.Ref).checkWritten(ctx, x.Manifest, sizesOf(entries))
}

// LinkTo links the files of a checkpoint into the same place below another root on the same
// filesystem, durably. It copies no bytes, and neither root changes the files of the other:
// every file here is replaced, never written to. It may be repeated; a name that holds
// another file is an error.
func (r *Root) LinkTo(ctx context.Context, ref checkpoint.Ref, to *Root) error {
	err := errors.Join(ctx.Err(), ref.Validate())
	if err == nil {
		err = r.linkTo(ctx, ref, to)
	}
	if err != nil {
		return fmt.Errorf("link checkpoint %s into %s: %w", ref, to.Dir(), err)
	}
	return nil
}

func (r *Root) linkTo(ctx context.Context, ref checkpoint.Ref, to *Root) error {
	here, ok := r.b.(*local.Dir)
	there, same := to.b.(*local.Dir)
	if !ok || !same {
		return fmt.Errorf("one of them is not a directory: %w", errors.ErrUnsupported)
	}
	names, err := r.names(ctx, nameOf(ref))
	if err != nil {
		return err
	}
	if err := to.b.MakeDir(ctx, nameOf(ref)); err != nil {
		return err
	}
	slices.Sort(names)
	for _, file := range names {
		if strings.HasSuffix(file, object.Partial) {
			continue // of an interrupted write
		}
		at := nameOf(ref, file)
		err := there.LinkFrom(ctx, here, at, at, object.Exclusive)
		if errors.Is(err, fs.ErrExist) {
			err = sameFile(ctx, r.b, at, to.b, at)
		}
		if err != nil {
			return err
		}
	}
	return to.sync(ctx, ref)
}

// sameFile returns an error unless two names are links to the same file.
func sameFile(ctx context.Context, a object.Backend, from string, b object.Backend, to string) error {
	x, err := a.Stat(ctx, from)
	if err != nil {
		return err
	}
	y, err := b.Stat(ctx, to)
	if err != nil {
		return err
	}
	if x.ID != y.ID || x.Size != y.Size || !x.Modified.Equal(y.Modified) {
		return fmt.Errorf("%s and %s are different files; remove the first, then run the command again", b.Path(to), a.Path(from))
	}
	return nil
}
