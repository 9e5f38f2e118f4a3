package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/planner/plan"
)

// Examined is what the files in one directory say, without a log.
type Examined struct {
	Ref      Ref
	Receipt  Receipt       // as it was read; zero without one
	Manifest plan.Manifest // when Err is nil
	// Err is why this is not a checkpoint that its files prove: without a
	// receipt it is [ErrNotCommitted], with a damaged file a [*CorruptError].
	Err error
}

// Examine calls visit for each directory of a checkpoint, sorted by run, trial
// and checkpoint, until visit returns an error. What has no Err is proved by
// its files as far as that goes without reading tensors: the receipt is whole
// and that of this directory, the manifest is the one that it names, every
// index is the one that the manifest names, and every file of data has the
// size that its index says. Nothing is written.
func (r *Root) Examine(ctx context.Context, visit func(Examined) error) error {
	var refs []Ref
	if err := r.walk(ctx, func(ref Ref) { refs = append(refs, ref) }); err != nil {
		return fmt.Errorf("examine the checkpoints in %s: %w", r.dir, err)
	}
	for _, ref := range refs {
		x := Examined{Ref: ref}
		x.Err = r.examine(ctx, &x)
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("examine the checkpoints in %s: %w", r.dir, err)
		}
		if err := visit(x); err != nil {
			return err
		}
	}
	return nil
}

func (r *Root) examine(ctx context.Context, x *Examined) (err error) {
	if x.Receipt, err = r.readReceipt(x.Ref); err != nil {
		return err
	}
	if of := RefOf(x.Receipt.Run, x.Receipt.Trial, x.Receipt.Checkpoint); of != x.Ref {
		return fmt.Errorf("%s is that of %s: somebody has put it here", r.path(x.Ref, ReceiptFile), of)
	}
	x.Manifest, err = r.readManifest(x.Ref, x.Receipt.Manifest)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the manifest that its receipt names is not there: %w", err)
	}
	if err != nil {
		return err
	}
	if err := x.Receipt.matches(x.Manifest); err != nil {
		return err
	}
	return r.Writer(x.Ref).checkWritten(ctx, x.Manifest)
}

// LinkTo links the files of a checkpoint into the same place below another
// root on the same filesystem, durably. No byte is copied, and neither root
// changes the files of the other: every file here is replaced, never written
// to. It may be repeated; a name that holds another file is an error.
func (r *Root) LinkTo(ctx context.Context, ref Ref, to *Root) error {
	err := errors.Join(ctx.Err(), ref.Validate())
	if err == nil {
		err = r.linkTo(ctx, ref, to)
	}
	if err != nil {
		return fmt.Errorf("link checkpoint %s into %s: %w", ref, to.dir, err)
	}
	return nil
}

func (r *Root) linkTo(ctx context.Context, ref Ref, to *Root) error {
	names, err := r.fs.List(r.path(ref))
	if err != nil {
		return err
	}
	if err := to.makeDirs(ref); err != nil {
		return err
	}
	slices.Sort(names)
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return err
		}
		if strings.HasSuffix(name, tempSuffix) {
			continue // of a write that was cut
		}
		from, dest := r.path(ref, name), to.path(ref, name)
		err := r.fs.Link(from, dest)
		if errors.Is(err, fs.ErrExist) {
			err = r.sameFile(from, dest)
		}
		if err != nil {
			return err
		}
	}
	return to.syncDir(to.path(ref))
}

// sameFile holds two names to be those of one file.
func (r *Root) sameFile(a, b string) error {
	x, err := r.fs.Stat(a)
	if err != nil {
		return err
	}
	y, err := r.fs.Stat(b)
	if err != nil {
		return err
	}
	if x.DeviceID() != y.DeviceID() || x.Size() != y.Size() || !x.ModTime().Equal(y.ModTime()) {
		return fmt.Errorf("%s is another file than %s: remove it, then run the command again", b, a)
	}
	return nil
}
