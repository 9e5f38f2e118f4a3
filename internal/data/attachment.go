package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// Attach puts a whole pending file beside a committed checkpoint. It is durable
// on return; the caller says in the log that it belongs there.
func (r *Root) Attach(ctx context.Context, ref checkpoint.Ref, from *Pending, name string) (checkpoint.Digest, int64, error) {
	digest, size, err := r.attach(ctx, ref, from, name)
	if err != nil {
		err = fmt.Errorf("attach %s to checkpoint %s: %w", name, ref, err)
	}
	return digest, size, err
}

func (r *Root) attach(ctx context.Context, ref checkpoint.Ref, from *Pending, name string) (digest checkpoint.Digest, size int64, err error) {
	if err := errors.Join(ctx.Err(), ref.Validate()); err != nil {
		return digest, 0, err
	}
	of := from.File(name)
	if of == nil || !of.Whole() {
		return digest, 0, errors.New("it is not whole")
	}
	lies := path.Join(from.dir, of.name)
	if seen := of.payload(0, of.size); seen != nil {
		digest = seen.digest
	} else if digest, err = r.fileDigest(ctx, lies, of.size); err != nil {
		return digest, 0, err
	}
	return digest, of.size, r.link(ctx, ref, lies, name, digest)
}

// AttachKept puts a file of another committed checkpoint beside a committed one, as
// [Root.Attach] does. It is read once, and not compared with its checksums.
func (r *Root) AttachKept(ctx context.Context, ref checkpoint.Ref, f *VerbatimFile) (checkpoint.Digest, error) {
	err := errors.Join(ctx.Err(), ref.Validate())
	var digest checkpoint.Digest
	if err == nil {
		digest, err = r.fileDigest(ctx, f.lies, f.Size)
	}
	if err == nil {
		err = r.link(ctx, ref, f.lies, f.Name, digest)
	}
	if err != nil {
		err = fmt.Errorf("attach %s to checkpoint %s: %w", f.Name, ref, err)
	}
	return digest, err
}

// fileDigest returns the digest of a file of the backend.
func (r *Root) fileDigest(ctx context.Context, lies string, size int64) (checkpoint.Digest, error) {
	file, err := r.b.Open(ctx, lies)
	if err != nil {
		return checkpoint.Digest{}, err
	}
	digest, err := digestOf(ctx, file, 0, size)
	return digest, errors.Join(err, file.Close())
}

// link links a file into a checkpoint's directory, as an attachment of that name.
func (r *Root) link(ctx context.Context, ref checkpoint.Ref, lies, name string, digest checkpoint.Digest) error {
	if err := r.b.Link(ctx, lies, nameOf(ref, checkpoint.AttachedFile(name, digest)), object.Replace); err != nil {
		return err
	}
	return r.sync(ctx, ref)
}

// Attached is a file that was attached to a checkpoint, as the log names it: nil
// if it is none of those that [Root.Attach] puts there.
func (r *Root) Attached(ref checkpoint.Ref, name string, digest checkpoint.Digest, size int64) *VerbatimFile {
	if checkpoint.ValidatePlainName(name) != nil {
		return nil
	}
	lies := nameOf(ref, checkpoint.AttachedFile(name, digest))
	return &VerbatimFile{Name: name, Size: size, Path: r.b.Path(lies), root: r, lies: lies, digest: digest}
}

// verifyAll compares an attachment with its digest.
func (f *VerbatimFile) verifyAll(ctx context.Context, file io.ReaderAt) error {
	got, err := digestOf(ctx, file, 0, f.Size)
	if err != nil {
		return f.short(err)
	}
	if got != f.digest {
		return &CorruptError{File: f.Path, Block: -1, Problem: "digest of the file", Want: f.digest.String(), Got: got.String()}
	}
	return nil
}
