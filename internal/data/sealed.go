package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/object"
)

// Sealed is a checkpoint in pending files whose digests and checksums are all known.
type Sealed struct {
	pending *Pending
	from    *Foreign
	ranks   map[int]*checkpoint.Index
}

// Seal finds the digests and checksums of everything in from, which was opened from
// [Pending.Files]. Digests of chunks that were written as a whole are known; the other chunks
// are read. Whole files listed in others are part of the checkpoint too, except data files
// that nothing refers to.
func (p *Pending) Seal(ctx context.Context, from *Foreign, others ...string) (*Sealed, error) {
	s := &Sealed{pending: p, from: from, ranks: map[int]*checkpoint.Index{}}
	lowest, held := -1, map[string]bool{}
	for rank, r := range from.ranks {
		x := &checkpoint.Index{Rank: rank, Entries: slices.Clone(r.index.Entries)}
		for _, f := range r.index.Files {
			name := path.Base(f.Name)
			if f.Name != path.Join(p.Path(), name) || p.File(name) == nil {
				return nil, fmt.Errorf("%s is not one of the files that were written", f.Name)
			}
			x.Files, held[name] = append(x.Files, checkpoint.File{Name: name, Size: f.Size}), true
		}
		s.ranks[rank] = x
		if lowest < 0 || rank < lowest {
			lowest = rank
		}
	}
	if lowest < 0 {
		return nil, errors.New("the checkpoint holds no tensor and no value")
	}
	for _, name := range others {
		if f := p.File(name); f != nil && !held[name] && checkpoint.ValidatePlainName(name) == nil && !strings.HasSuffix(name, checkpoint.VerbatimSuffix) {
			s.ranks[lowest].Files = append(s.ranks[lowest].Files, checkpoint.File{Name: name, Size: f.Size()})
		}
	}
	for _, x := range s.ranks {
		if err := s.digest(ctx, x); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s *Sealed) digest(ctx context.Context, x *checkpoint.Index) error {
	x.Frames = make([][]checkpoint.Frame, len(x.Files))
	for n := range x.Files {
		of := s.pending.File(x.Files[n].Name)
		if of == nil {
			return fmt.Errorf("%s was removed meanwhile", x.Files[n].Name)
		}
		file, err := s.pending.inside().Open(path.Join(s.pending.Path(), of.name))
		if err != nil {
			return err
		}
		read := pendingObject{pendingRead{file, of}}
		err = s.digestFile(ctx, x, n, of, read)
		if err = errors.Join(err, file.Close()); err != nil {
			return err
		}
	}
	return nil
}

func (s *Sealed) digestFile(ctx context.Context, x *checkpoint.Index, n int, of *PendingFile, file pendingObject) (err error) {
	for i := range x.Entries {
		e := &x.Entries[i]
		if e.File != n {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		e.Record = nil
		if digest, sums, ok := of.contents.Payload(e.Offset, e.Item.Bytes); ok && e.Strides == nil {
			e.Digest, e.Sums = digest, sums
			continue
		}
		if err := digestEntry(ctx, e, file); err != nil {
			return err
		}
	}
	x.Frames[n], err = framesOf(ctx, x, n, file)
	return err
}

// Manifest describes the checkpoint, as [Foreign.Manifest] does.
func (s *Sealed) Manifest() checkpoint.Manifest { return s.from.Manifest() }

// Foreign returns the foreign checkpoint that was sealed.
func (s *Sealed) Foreign() *Foreign { return s.from }

// Items returns the items of a rank.
func (s *Sealed) Items(rank int) []checkpoint.Item { return s.from.Items(rank) }

// KeepData replaces [FileWriter.WriteData] for a rank of a checkpoint in pending files. It
// links the files into the checkpoint's directory, and writes an index of where each chunk
// lies in them. Everything is durable on return. Like WriteData, it may be repeated.
func (w *FileWriter) KeepData(ctx context.Context, rank int, items []checkpoint.Item, from *Sealed) (Written, error) {
	written, err := w.keepData(ctx, rank, items, from)
	return written, w.wrap(fmt.Sprintf("keep the files of rank %d", rank), err)
}

func (w *FileWriter) keepData(ctx context.Context, rank int, items []checkpoint.Item, from *Sealed) (Written, error) {
	if err := w.check(ctx); err != nil {
		return Written{}, err
	}
	whole := from.ranks[rank]
	if whole == nil {
		return Written{}, fmt.Errorf("%s has no file of this rank", from.pending.Path())
	}
	all := &rankIndex{}
	all.set(whole)
	x, err := all.only(items)
	if err != nil {
		return Written{}, fmt.Errorf("%s: %w", from.pending.Path(), err)
	}
	if _, sealed, err := w.there(ctx); err != nil {
		return Written{}, err
	} else if sealed {
		return Written{}, fmt.Errorf("%s: %w; save under another name", w.root.path(w.ref, checkpoint.IndexFile(rank)), ErrSealed)
	}
	for _, f := range x.Files {
		of := from.pending.File(f.Name)
		if of == nil {
			return Written{}, fmt.Errorf("%s was removed meanwhile", f.Name)
		}
		err := w.root.bring(ctx, from.pending.root, path.Join(from.pending.dir, of.name), nameOf(w.ref, f.Name))
		if err != nil {
			return Written{}, err
		}
	}
	data := x.Encode()
	if err := w.root.writeFile(ctx, w.ref, checkpoint.IndexFile(rank), data, object.Replace); err != nil {
		return Written{}, err
	}
	if err := w.root.sync(ctx, w.ref); err != nil {
		return Written{}, err
	}
	out := Written{Index: checkpoint.Sum(data), Files: append(slices.Clone(x.Files), checkpoint.File{Name: checkpoint.IndexFile(rank), Size: int64(len(data))})}
	for _, e := range x.Entries {
		out.BytesWritten += e.Item.Bytes
	}
	return out, nil
}

// Kept reports whether the files of m's ranks are in the format of another program, as
// written by [FileWriter.KeepData] and [FileWriter.AdoptData] and never by a [Storage]. It
// inspects the files on disk.
func (w *FileWriter) Kept(ctx context.Context, m checkpoint.Manifest) (bool, error) {
	for _, r := range m.Ranks {
		x, err := w.root.readIndex(ctx, w.ref, r)
		var other *CorruptError
		switch {
		case errors.Is(err, fs.ErrNotExist) || errors.As(err, &other):
			// The file is the storage's, or does not exist.
		case err != nil:
			return false, w.wrap("look for files that are kept", err)
		case x.Verbatim() || x.Adopted():
			return true, nil
		}
	}
	return false, nil
}

// framesOf returns the parts of a file of size bytes that no contiguous chunk covers, with
// their checksums.
func framesOf(ctx context.Context, x *checkpoint.Index, n int, file io.ReaderAt) ([]checkpoint.Frame, error) {
	at := int64(0)
	out := []checkpoint.Frame{}
	fill := func(to int64) error {
		if to <= at {
			return nil
		}
		var sums scan.BlockSums
		if _, err := scan.Windows(ctx, file, at, to, func(window []byte, _ int64) error {
			sums.Add(window)
			return nil
		}); err != nil {
			return fmt.Errorf("read the bytes from %d to %d of %s: %w", at, to, x.Files[n].Name, err)
		}
		out = append(out, checkpoint.Frame{Offset: at, Size: to - at, Sums: sums.End()})
		return nil
	}
	chunks := x.Extents(n)
	for _, c := range chunks {
		if err := fill(c.Offset); err != nil {
			return nil, err
		}
		at = max(at, c.Offset+c.Size)
	}
	return out, fill(x.Files[n].Size)
}

// digestEntry finds the digest and checksums of a chunk by reading it.
func digestEntry(ctx context.Context, e *checkpoint.Entry, file object.Object) error {
	d := scan.NewDigester(e.Item.Bytes)
	defer d.Free()
	src, err := scan.InOrder(e, file)
	if err == nil {
		_, err = scan.Windows(ctx, src, e.Offset, e.Offset+e.Item.Bytes, func(window []byte, _ int64) error {
			d.Add(window)
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("read %q: %w", e.Item.Shard.FQN, err)
	}
	e.Digest, e.Sums = d.End()
	return nil
}
