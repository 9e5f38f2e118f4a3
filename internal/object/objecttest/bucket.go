// Package objecttest tests every [object.Backend] against its documentation, and provides a
// backend with as few features of a filesystem as allowed.
package objecttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
	"sync"
	"testing/iotest"
	"time"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
)

// Bucket keeps files in memory, as an object store does: it has no directories, no links, and
// no limit of space. Concurrent writes are parts of one upload. Committed files are durable
// immediately.
type Bucket struct {
	piece int   // of an upload, in bytes
	span  int64 // of a read, in bytes

	mu      sync.Mutex
	objects map[string]*opened
}

var _ object.Backend = (*Bucket)(nil)

// NewBucket returns an empty bucket. Its pieces and spans are smaller than those of a real
// store, so that small files have several.
func NewBucket() *Bucket { return NewBucketOf(256<<10, 1<<20) }

// NewBucketOf returns an empty bucket with uploads in pieces of some bytes, and reads of spans.
func NewBucketOf(piece int, span int64) *Bucket {
	return &Bucket{piece: piece, span: span, objects: map[string]*opened{}}
}

type opened struct {
	*bytes.Reader
	modified time.Time
}

// Stat implements [object.Object].
func (o *opened) Stat() (object.Info, error) {
	info := o.listed()
	all, err := io.ReadAll(io.NewSectionReader(o, 0, o.Size()))
	info.Sum, info.Attested = crc32c.Checksum(all), true
	return info, err
}

// listed returns what a listing has of the object.
func (o *opened) listed() object.Info { return object.Info{Size: o.Size(), Modified: o.modified} }

// Close implements [object.Object].
func (o *opened) Close() error { return nil }

// ReadRange implements [object.Ranger].
func (o *opened) ReadRange(off, n int64) (io.ReadCloser, error) {
	if off+n > o.Size() {
		return io.NopCloser(io.MultiReader(io.NewSectionReader(o, off, n), iotest.ErrReader(io.ErrUnexpectedEOF))), nil
	}
	return io.NopCloser(io.NewSectionReader(o, off, n)), nil
}

func check(ctx context.Context, name string) error {
	return errors.Join(ctx.Err(), object.Validate(name))
}

// Path implements [object.Backend].
func (b *Bucket) Path(name string) string { return "mem://" + name }

// MakeDir implements [object.Backend].
func (b *Bucket) MakeDir(ctx context.Context, _ string) error { return ctx.Err() }

// Sync implements [object.Backend].
func (b *Bucket) Sync(ctx context.Context, _ string) error { return ctx.Err() }

// Link implements [object.Backend].
func (b *Bucket) Link(context.Context, string, string, object.Mode) error {
	return fmt.Errorf("link: %w", errors.ErrUnsupported)
}

// Usage implements [object.Backend].
func (b *Bucket) Usage(context.Context) (object.Usage, error) {
	return object.Usage{}, errors.ErrUnsupported
}

// Open implements [object.Backend].
func (b *Bucket) Open(ctx context.Context, name string) (object.Object, error) {
	o, err := b.find(ctx, name)
	if err != nil {
		return nil, err
	}
	return o, nil
}

func (b *Bucket) find(ctx context.Context, name string) (*opened, error) {
	if err := check(ctx, name); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	o := b.objects[name]
	if o == nil {
		return nil, &fs.PathError{Op: "open", Path: b.Path(name), Err: fs.ErrNotExist}
	}
	return o, nil
}

// Stat implements [object.Backend].
func (b *Bucket) Stat(ctx context.Context, name string) (object.Info, error) {
	o, err := b.Open(ctx, name)
	if err == nil {
		return o.Stat()
	}
	if in, no := b.List(ctx, name); no == nil && len(in) > 0 {
		return object.Info{Dir: true}, nil
	}
	return object.Info{}, err
}

// List implements [object.Backend].
func (b *Bucket) List(ctx context.Context, dir string) ([]object.Entry, error) {
	prefix := ""
	if dir != "" {
		if err := check(ctx, dir); err != nil {
			return nil, err
		}
		prefix = dir + "/"
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	var entries []object.Entry
	seen := map[string]bool{}
	for name, o := range b.objects {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			first, _, dir := strings.Cut(rest, "/")
			if seen[first] {
				continue
			}
			seen[first] = true
			info := object.Info{Dir: true}
			if !dir {
				info = o.listed()
			}
			entries = append(entries, object.Entry{Name: first, Info: &info})
		}
	}
	return entries, ctx.Err()
}

// Get implements [object.Backend].
func (b *Bucket) Get(ctx context.Context, name string, most int64) ([]byte, error) {
	if err := check(ctx, name); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	o := b.objects[name]
	switch {
	case o == nil:
		return nil, &fs.PathError{Op: "get", Path: b.Path(name), Err: fs.ErrNotExist}
	case o.Size() > most:
		return nil, fmt.Errorf("%s has %d bytes: %w", b.Path(name), o.Size(), object.ErrTooLarge)
	}
	return io.ReadAll(io.NewSectionReader(o, 0, o.Size()))
}

// Writes implements [object.Metered].
func (b *Bucket) Writes(size int64) int {
	if size <= int64(b.piece) {
		return 1
	}
	return int((size+int64(b.piece)-1)/int64(b.piece)) + 2
}

// Reading implements [object.Backend].
func (b *Bucket) Reading() object.Reading { return object.Reading{Span: b.span, Depth: 4} }

// Remove implements [object.Backend].
func (b *Bucket) Remove(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := check(ctx, name); err != nil {
			return err
		}
		b.mu.Lock()
		delete(b.objects, name)
		b.mu.Unlock()
	}
	return ctx.Err()
}

// Create implements [object.Backend].
func (b *Bucket) Create(ctx context.Context, name string, size int64, mode object.Mode) (object.Upload, error) {
	if err := check(ctx, name); err != nil {
		return nil, err
	}
	return &upload{b: b, name: name, mode: mode, data: make([]byte, size), written: map[int64]bool{}}, nil
}

// upload is a file in parts.
type upload struct {
	b    *Bucket
	name string
	mode object.Mode

	mu      sync.Mutex
	data    []byte
	written map[int64]bool // where pieces begin
	ended   bool
}

// WriteAt implements [object.Upload].
func (u *upload) WriteAt(p []byte, off int64) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.ended || off < 0 || off+int64(len(p)) > int64(len(u.data)) {
		return 0, fmt.Errorf("write %d bytes at %d of %s: it has %d, or has ended", len(p), off, path.Base(u.name), len(u.data))
	}
	piece := u.b.piece
	whole, last := len(p) == len(u.data), off+int64(len(p)) == int64(len(u.data))
	if off%int64(piece) != 0 || !whole && !last && len(p) != piece || !whole && len(p) > piece || u.written[off] {
		return 0, fmt.Errorf("write %d bytes at %d of %s: a piece has %d, except the last, and is written once", len(p), off, path.Base(u.name), piece)
	}
	u.written[off] = true
	return copy(u.data[off:], p), nil
}

// GatherDepth implements [object.Gatherer].
func (u *upload) GatherDepth() int { return 2 * u.Depth() }

// WriteFrom implements [object.Gatherer].
func (u *upload) WriteFrom(p [][]byte, off int64, sum uint32) error {
	piece := bytes.Join(p, nil)
	if crc32c.Checksum(piece) != sum {
		return fmt.Errorf("write %d bytes at %d of %s: %w", len(piece), off, path.Base(u.name), object.ErrChanged)
	}
	_, err := u.WriteAt(piece, off)
	return err
}

// Piece implements [object.Upload].
func (u *upload) Piece() int { return u.b.piece }

// Reserved implements [object.Upload].
func (u *upload) Reserved() bool { return false }

// Depth implements [object.Upload].
func (u *upload) Depth() int { return 4 }

// Commit implements [object.Upload].
func (u *upload) Commit(ctx context.Context) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.ended {
		return errors.New("commit: the upload has ended")
	}
	u.ended = true
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(u.written) == 0 && len(u.data) > 0 {
		return fmt.Errorf("commit: nothing of %s was written", path.Base(u.name))
	}
	u.b.mu.Lock()
	defer u.b.mu.Unlock()
	if u.mode == object.Exclusive && u.b.objects[u.name] != nil {
		return &fs.PathError{Op: "create", Path: u.b.Path(u.name), Err: fs.ErrExist}
	}
	u.b.objects[u.name] = &opened{bytes.NewReader(u.data), time.Now()}
	return nil
}

// Abort implements [object.Upload].
func (u *upload) Abort() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.ended = true
}
