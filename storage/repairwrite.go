package storage

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"

	"github.com/ckptstore/ckptstore/storage/disk"
	"github.com/cockroachdb/pebble/v2/vfs"
)

const (
	dataSuffix   = ".safetensors"
	repairSuffix = ".repair" + tempSuffix
)

// write makes a whole file of a damaged one, under its name. It reports false,
// and leaves everything as it is, if nothing would be better afterwards.
func (p *repair) write(ctx context.Context, here holder, k *knowledge) (chunks []RepairedChunk, ok bool, err error) {
	old, err := openRegular(p.root.fs, here.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, false, err
	}
	if old != nil {
		defer func() { _ = old.Close() }() // nothing was written to it
	}
	header, err := k.headerOf(old)
	if err != nil || header == nil {
		p.left(here.ref, here.name, nil, "its header is damaged, and the checkpoint that wrote it is gone: put the file back from a backup")
		return nil, false, ctx.Err()
	}
	bad, err := k.damaged(ctx, old)
	if err != nil {
		return nil, false, err
	}
	donors, err := p.donors(ctx, bad, k)
	if err != nil {
		return nil, false, err
	}
	from := map[*entry]donor{}
	for _, e := range bad {
		d, found, err := p.donor(ctx, e, donors[contentOf(e.item, e.digest)])
		if err != nil {
			return nil, false, err
		}
		if found {
			from[e] = d
			chunks = append(chunks, RepairedChunk{FQN: e.item.Shard.FQN, Chunk: e.box(), Bytes: e.item.Bytes, From: d.from})
			continue
		}
		p.left(here.ref, here.name, e, "no other file and no staging slot has these bytes: resume from another checkpoint, and delete this one")
		if !readable(old, e.offset, e.item.Bytes) {
			return nil, false, nil // there is nothing to put in its place
		}
	}
	if len(chunks) == 0 {
		if ok, err := k.sound(old); ok || err != nil {
			return nil, false, err // nothing would change
		}
	}
	return chunks, true, p.publish(ctx, here, k, header, old, from, bad)
}

func readable(f vfs.File, offset, size int64) bool {
	if f == nil {
		return false
	}
	_, err := io.Copy(io.Discard, io.NewSectionReader(f, offset, size))
	info, serr := f.Stat()
	return err == nil && serr == nil && info.Size() >= offset+size
}

// publish writes the file under a temporary name, compares it, and gives it the
// name of the damaged one.
func (p *repair) publish(ctx context.Context, here holder, k *knowledge, header []byte, old vfs.File, from map[*entry]donor, bad []*entry) (err error) {
	temp := here.path + repairSuffix
	// One that is left may be a link to a whole file, which is not to be cut.
	if err := disk.Gone(p.root.fs.Remove(temp)); err != nil {
		return err
	}
	if err := p.root.reserve(k.size); err != nil {
		return err
	}
	defer p.root.release(k.size)
	f, err := p.root.fs.OpenReadWrite(temp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("create %s: %w", temp, disk.NoSpace(err))
	}
	err = k.fill(ctx, f, header, old, from)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = k.compare(ctx, f, from, bad)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		p.root.discard(temp)
		return fmt.Errorf("write %s: %w", temp, disk.NoSpace(err))
	}
	if err := p.root.rename(temp, here.path); err != nil {
		return err
	}
	return p.root.syncDir(p.root.path(here.ref))
}

// fill writes all bytes of the file: the header, what lies between the known
// chunks as far as it can be read, which no checkpoint needs, and the chunks.
func (k *knowledge) fill(ctx context.Context, f vfs.File, header []byte, old vfs.File, from map[*entry]donor) error {
	if old != nil {
		if err := copyAt(ctx, f, old, 0, 0, k.size, true); err != nil {
			return err
		}
	}
	if _, err := f.WriteAt(bytes.Clone(header), 0); err != nil { // a file may change what it is given
		return err
	}
	for e, d := range from {
		if err := d.copyTo(ctx, f, e); err != nil {
			return err
		}
	}
	// The end may be bytes that nobody knows and that could not be read.
	info, err := f.Stat()
	if err != nil || info.Size() == k.size {
		return err
	}
	_, err = f.WriteAt([]byte{0}, k.size-1)
	return err
}

// compare reads what was written. Chunks that stay damaged are left out.
func (k *knowledge) compare(ctx context.Context, f vfs.File, from map[*entry]donor, bad []*entry) error {
	if ok, err := k.sound(f); !ok || err != nil {
		return errors.Join(err, errors.New("the repaired file has another size or header than was written"))
	}
	for _, e := range k.entries {
		if _, repaired := from[e]; !repaired && slices.Contains(bad, e) {
			continue
		}
		ok, err := holds(ctx, f, e, e.offset)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("the repaired file has other bytes of %q %s than were written", e.item.Shard.FQN, e.box())
		}
	}
	return nil
}

// copyAt copies size bytes from one file to another, a window at a time. What
// cannot be read is left out if partial is set, and an error otherwise.
func copyAt(ctx context.Context, to vfs.File, from io.ReaderAt, at, offset, size int64, partial bool) error {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for done := int64(0); done < size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		window := (*buf)[:min(int64(len(*buf)), size-done)]
		n, err := from.ReadAt(window, offset+done)
		if n < len(window) && !partial {
			return fmt.Errorf("read at %d: %w", offset+done, cmp.Or(err, io.ErrUnexpectedEOF))
		}
		if n > 0 {
			if _, err := to.WriteAt(window[:n], at+done); err != nil {
				return err
			}
		}
		done += int64(len(window))
	}
	return nil
}
