package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"path"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/object"
)

// Verbatim is a committed checkpoint as the files in which it arrived. It is safe for
// concurrent use.
type Verbatim struct {
	root  *Root
	ref   checkpoint.Ref
	names []string
	files map[string]*VerbatimFile
}

// VerbatimFile is one file of a [Verbatim].
type VerbatimFile struct {
	Name string
	Size int64  // in bytes
	Path string // of the file

	root    *Root
	lies    string // in the backend
	extents []checkpoint.Extent
	digest  checkpoint.Digest // of an attachment, which has no extents
}

// ErrNotVerbatim reports that a checkpoint was saved in this store's own format.
var ErrNotVerbatim = errors.New("the checkpoint was not saved as files of another format")

// Verbatim opens the files of the checkpoint at ref, whose manifest is recorded in the log.
// It reads indexes and no data. Where the checkpoint has no such files, the error is
// [ErrNotVerbatim].
func (r *Root) Verbatim(ctx context.Context, ref checkpoint.Ref, manifest checkpoint.Digest) (*Verbatim, error) {
	v, err := r.openVerbatim(ctx, ref, manifest)
	if err != nil {
		return nil, fmt.Errorf("open the files of checkpoint %s: %w", ref, err)
	}
	return v, nil
}

func (r *Root) openVerbatim(ctx context.Context, ref checkpoint.Ref, manifest checkpoint.Digest) (*Verbatim, error) {
	if err := errors.Join(ctx.Err(), ref.Validate()); err != nil {
		return nil, err
	}
	m, err := r.readManifest(ctx, ref, manifest)
	if err != nil {
		return nil, err
	}
	v := &Verbatim{root: r, ref: ref, files: map[string]*VerbatimFile{}}
	for _, rank := range m.Ranks {
		x, err := r.readIndex(ctx, ref, rank)
		if err != nil {
			return nil, err
		}
		if !x.Verbatim() {
			return nil, ErrNotVerbatim
		}
		for n, f := range x.Files {
			v.files[f.Name] = &VerbatimFile{Name: f.Name, Size: f.Size, Path: r.path(ref, f.Name), root: r, lies: nameOf(ref, f.Name), extents: x.Extents(n)}
			v.names = append(v.names, f.Name)
		}
	}
	slices.Sort(v.names)
	return v, nil
}

// Names returns the sorted names of the files.
func (v *Verbatim) Names() []string { return v.names }

// File returns the file of a name; [fs.ErrNotExist] if there is none.
func (v *Verbatim) File(name string) (*VerbatimFile, error) {
	f := v.files[name]
	if f == nil {
		return nil, fmt.Errorf("%s: %w", path.Join(v.ref.String(), name), fs.ErrNotExist)
	}
	return f, nil
}

// Open opens the file for reading and for Verify.
func (f *VerbatimFile) Open(ctx context.Context) (object.Object, error) {
	return f.root.b.Open(ctx, f.lies)
}

// Sums yields the blocks that hold the bytes of the file from one offset to another, in order
// and without gaps, so that a reader can verify these bytes. It yields nothing for an
// attachment, which has a digest of all its bytes instead.
func (f *VerbatimFile) Sums(from, to int64) iter.Seq[checkpoint.Extent] {
	from, to = max(from, 0), min(to, f.Size)
	return func(yield func(checkpoint.Extent) bool) {
		for i := f.extentAt(from); i < len(f.extents) && f.extents[i].Offset < to; i++ {
			e := f.extents[i]
			first := max(from-e.Offset, 0) / checkpoint.BlockSize
			last := checkpoint.Blocks(min(to-e.Offset, e.Size))
			out := checkpoint.Extent{Offset: e.Offset + first*checkpoint.BlockSize, Sums: e.Sums[first:last]}
			out.Size = e.Offset + min(last*checkpoint.BlockSize, e.Size) - out.Offset
			if !yield(out) {
				return
			}
		}
	}
}

// extentAt returns the index of the extent that holds the byte at an offset.
func (f *VerbatimFile) extentAt(offset int64) int {
	i, _ := slices.BinarySearchFunc(f.extents, offset, func(e checkpoint.Extent, at int64) int {
		if e.Offset+e.Size <= at {
			return -1
		}
		return 1
	})
	return i
}

// Verify reads the blocks that hold some bytes of the file, and compares them with their
// checksums. It returns the range of bytes that this verifies. A damaged block gives a
// [*CorruptError].
func (f *VerbatimFile) Verify(ctx context.Context, file io.ReaderAt, from, to int64) (lo, hi int64, err error) {
	from, to = max(from, 0), min(to, f.Size)
	if from >= to {
		return from, from, ctx.Err()
	}
	if f.extents == nil {
		return 0, f.Size, f.verifyAll(ctx, file)
	}
	lo, hi = from, from
	for i := f.extentAt(from); i < len(f.extents) && f.extents[i].Offset < to; i++ {
		e := f.extents[i]
		first := max(from-e.Offset, 0) / checkpoint.BlockSize
		last := checkpoint.Blocks(min(to-e.Offset, e.Size))
		end := min(last*checkpoint.BlockSize, e.Size)
		lo = min(lo, e.Offset+first*checkpoint.BlockSize)
		if err := f.verifyBlocks(ctx, file, e, first, end); err != nil {
			return lo, hi, err
		}
		hi = e.Offset + end
	}
	return lo, hi, nil
}

// verifyBlocks compares the blocks of an extent, from the first on and up to its byte end,
// with their checksums.
func (f *VerbatimFile) verifyBlocks(ctx context.Context, file io.ReaderAt, e checkpoint.Extent, first, end int64) error {
	_, err := scan.Windows(ctx, file, e.Offset+first*checkpoint.BlockSize, e.Offset+end, func(window []byte, at int64) error {
		from := (at - e.Offset) / checkpoint.BlockSize
		k, got := scan.DamagedBlock(window, e.Sums[from:])
		if k < 0 {
			return nil
		}
		block := from + int64(k)
		return &CorruptError{
			File: f.Path, Block: -1, Offset: e.Offset + block*checkpoint.BlockSize, Problem: "checksum of the block",
			Want: fmt.Sprintf("%08x", e.Sums[block]), Got: fmt.Sprintf("%08x", got),
		}
	})
	return f.short(err)
}

// short returns an error, with the file's name, for a file that is too short or cannot be
// read.
func (f *VerbatimFile) short(err error) error {
	short := scan.ShortOf(err)
	switch {
	case short == nil:
		return err
	case short.Ends():
		return &CorruptError{File: f.Path, Block: -1, Offset: short.At, Problem: "the file ends here"}
	}
	return fmt.Errorf("read %s at %d: %w", f.Path, short.At, short.Err)
}

// Attach adds a whole pending file to a committed checkpoint. It is durable on return; the
// caller records it in the log.
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
	digest, _, known := of.contents.Payload(0, of.Size())
	if !known {
		if digest, err = from.root.fileDigest(ctx, lies, of.Size()); err != nil {
			return digest, 0, err
		}
	}
	return digest, of.Size(), r.link(ctx, ref, from.root, lies, name, digest)
}

// AttachKept adds a file of another committed checkpoint to a committed one, as [Root.Attach]
// does. It reads the file once, and does not compare it with its checksums.
func (r *Root) AttachKept(ctx context.Context, ref checkpoint.Ref, f *VerbatimFile) (checkpoint.Digest, error) {
	err := errors.Join(ctx.Err(), ref.Validate())
	var digest checkpoint.Digest
	if err == nil {
		digest, err = r.fileDigest(ctx, f.lies, f.Size)
	}
	if err == nil {
		err = r.link(ctx, ref, f.root, f.lies, f.Name, digest)
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
	digest, err := scan.Digest(ctx, file, 0, size)
	return digest, errors.Join(err, file.Close())
}

// link brings a file into a checkpoint's directory, as an attachment of that name.
func (r *Root) link(ctx context.Context, ref checkpoint.Ref, from *Root, lies, name string, digest checkpoint.Digest) error {
	if err := r.bring(ctx, from, lies, nameOf(ref, checkpoint.AttachedFile(name, digest))); err != nil {
		return err
	}
	return r.sync(ctx, ref)
}

// Attached returns an attached file of a checkpoint, as the log names it. It returns nil if
// the file is no attachment that [Root.Attach] makes.
func (r *Root) Attached(ref checkpoint.Ref, name string, digest checkpoint.Digest, size int64) *VerbatimFile {
	if checkpoint.ValidatePlainName(name) != nil {
		return nil
	}
	lies := nameOf(ref, checkpoint.AttachedFile(name, digest))
	return &VerbatimFile{Name: name, Size: size, Path: r.b.Path(lies), root: r, lies: lies, digest: digest}
}

// verifyAll compares an attachment with its digest.
func (f *VerbatimFile) verifyAll(ctx context.Context, file io.ReaderAt) error {
	got, err := scan.Digest(ctx, file, 0, f.Size)
	if err != nil {
		return f.short(err)
	}
	if got != f.digest {
		return &CorruptError{File: f.Path, Block: -1, Problem: "digest of the file", Want: f.digest.String(), Got: got.String()}
	}
	return nil
}
