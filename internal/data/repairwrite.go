package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// rewritten is a file that was made of a damaged one.
type rewritten struct {
	ok     bool
	chunks []RepairedChunk
	lost   []*checkpoint.Entry // that are damaged in it too
}

// write makes a whole file of a damaged one, nil if it is gone, under its name.
// It is not ok, and everything is as it was, if nothing would be better
// afterwards.
func (p *repair) write(ctx context.Context, here holder, k *knowledge, old object.Object) (out rewritten, err error) {
	header, err := k.headerOf(old)
	if err != nil || header == nil {
		p.left(here.ref, here.name, nil, "its header is damaged, and the checkpoint that wrote it is gone: put the file back from a backup")
		return rewritten{}, ctx.Err()
	}
	bad, err := k.damaged(ctx, old)
	if err != nil {
		return rewritten{}, err
	}
	from := map[*checkpoint.Entry]donor{}
	for _, e := range bad {
		d, found, err := p.donor(ctx, e)
		if err != nil {
			return rewritten{}, err
		}
		if found {
			from[e] = d
			out.chunks = append(out.chunks, RepairedChunk{FQN: e.Item.Shard.FQN, Chunk: e.BoxString(), Bytes: e.Item.Bytes, From: d.from})
			continue
		}
		out.lost = append(out.lost, e)
		p.left(here.ref, here.name, e, "no other file and no staging slot has these bytes: resume from another checkpoint, and delete this one")
		if !readable(old, e.Offset, e.Item.Bytes) {
			return rewritten{}, nil // there is nothing to put in its place
		}
	}
	if len(out.chunks) == 0 {
		if ok, err := k.sound(old); ok || err != nil {
			return rewritten{}, err // nothing would change
		}
	}
	out.ok = true
	return out, p.publish(ctx, here, k, header, old, from, out.lost)
}

func readable(f object.Object, offset, size int64) bool {
	if f == nil {
		return false
	}
	_, err := io.Copy(io.Discard, io.NewSectionReader(f, offset, size))
	info, serr := f.Stat()
	return err == nil && serr == nil && info.Size >= offset+size
}

// publish writes the file and gives it the name of the damaged one.
func (p *repair) publish(ctx context.Context, here holder, k *knowledge, header []byte, old object.Object, from map[*checkpoint.Entry]donor, lost []*checkpoint.Entry) (err error) {
	claim := &claim{root: p.root, left: k.size}
	if err := p.root.reserve(ctx, claim.left); err != nil {
		return err
	}
	defer claim.give()
	up, _, err := p.root.begin(ctx, here.at(), k.size, claim)
	if err != nil {
		return err
	}
	defer up.Abort()
	to := &inPieces{to: up, buf: object.Buffer(up.Piece())}
	if err := errors.Join(k.fill(ctx, to, header, old, from, lost), to.flush()); err != nil {
		return fmt.Errorf("write %s: %w", p.root.path(here.ref, here.name), err)
	}
	if err := up.Commit(ctx); err != nil {
		return err
	}
	return p.root.sync(ctx, here.ref)
}

// inPieces makes pieces of writes that follow each other.
type inPieces struct {
	to  object.Upload
	buf []byte
	n   int // bytes of the present piece
	off int64
}

// WriteAt implements io.WriterAt for the next byte.
func (w *inPieces) WriteAt(p []byte, off int64) (int, error) {
	if off != w.off+int64(w.n) {
		return 0, fmt.Errorf("write at %d, the next byte is %d", off, w.off+int64(w.n))
	}
	total := len(p)
	for len(p) > 0 {
		k := copy(w.buf[w.n:], p)
		w.n += k
		p = p[k:]
		if w.n == len(w.buf) {
			if err := w.flush(); err != nil {
				return 0, err
			}
		}
	}
	return total, nil
}

// flush writes a piece, the last one too.
func (w *inPieces) flush() error {
	if w.n == 0 {
		return nil
	}
	_, err := w.to.WriteAt(w.buf[:w.n], w.off)
	w.off += int64(w.n)
	w.n = 0
	return err
}

// fill writes all bytes of the file: the header; the chunks, each compared with
// its digest on the way, but for those that stay damaged; and what lies between
// them, which no checkpoint needs, as far as it can be read.
func (k *knowledge) fill(ctx context.Context, to io.WriterAt, header []byte, old object.Object, from map[*checkpoint.Entry]donor, lost []*checkpoint.Entry) error {
	if _, err := to.WriteAt(header, 0); err != nil {
		return err
	}
	at := int64(len(header))
	for _, e := range k.entries {
		if err := copyRest(ctx, to, old, at, e.Offset); err != nil {
			return err
		}
		at = e.Offset + e.Item.Bytes
		d, repaired := from[e]
		var err error
		switch {
		case repaired:
			err = d.copyTo(ctx, to, e)
		case slices.Contains(lost, e):
			err = copyRest(ctx, to, old, e.Offset, at)
		default:
			err = copyChunk(ctx, to, old, e.Offset, e)
		}
		if err != nil {
			return err
		}
	}
	return copyRest(ctx, to, old, at, k.size)
}

// copyChunk writes the bytes of a chunk, which src has at offset from, and compares them
// with its digest.
func copyChunk(ctx context.Context, to io.WriterAt, src io.ReaderAt, from int64, e *checkpoint.Entry) error {
	hash := newHasher()
	defer hash.free()
	_, err := scan(ctx, src, from, from+e.Item.Bytes, func(window []byte, at int64) error {
		hash.add(window)
		_, err := to.WriteAt(window, e.Offset+at-from)
		return err
	})
	if shortOf(err) != nil {
		return fmt.Errorf("read %q: %w", e.Item.Shard.FQN, err)
	}
	if err == nil && hash.digest() != e.Digest {
		err = fmt.Errorf("the bytes of %q %s have changed while they were copied: run the command again", e.Item.Shard.FQN, e.BoxString())
	}
	return err
}

// copyRest writes what a file has between two offsets, and zeros for what of
// that cannot be read.
func copyRest(ctx context.Context, to io.WriterAt, old object.Object, at, end int64) error {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for at < end {
		if err := ctx.Err(); err != nil {
			return err
		}
		window := (*buf)[:min(int64(len(*buf)), end-at)]
		n := 0
		if old != nil {
			n, _ = old.ReadAt(window, at) // nobody needs what is lost
		}
		clear(window[n:])
		if _, err := to.WriteAt(window, at); err != nil {
			return err
		}
		at += int64(len(window))
	}
	return nil
}
