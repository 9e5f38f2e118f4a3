package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"sync"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/local"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// Root is the data of a store. It is safe for concurrent use, also by several
// processes: everything shared lies in the backend.
type Root struct {
	b       object.Backend
	outside vfs.FS   // where adopted files lie
	stores  []string // whose checkpoints these are

	space    sync.Mutex
	pending  int64             // bytes that running WriteData calls have yet to write
	creating int               // files whose bytes may be counted twice: see begin
	created  chan struct{}     // closed when one of them is not any more
	keep     func(Usage) int64 // bytes that they leave free; nil: none

	reuse    sync.Mutex
	bases    []*base     // whose indexes are kept, the latest used first
	linkless atomic.Bool // no link can be made here, so that looking for what is equal is in vain

	tell sync.Mutex
	told map[checkpoint.Ref]bool // refs that were told to say
	say  func(checkpoint.Ref)    // nil: nobody is told
}

// Open names the data directory of a store, STORE/data. It touches nothing:
// the directory is made by the first writer, and readers need no permission
// to write.
func Open(fs vfs.FS, dir string) (*Root, error) {
	if fs == nil || dir == "" {
		return nil, errors.New("open data directory: no filesystem or no path given")
	}
	return OpenBackend(local.New(fs, dir), fs), nil
}

// OpenBackend is the data of a store in any backend. Files of other programs
// that checkpoints adopt lie outside of it, in a filesystem.
func OpenBackend(b object.Backend, outside vfs.FS) *Root {
	return &Root{b: b, outside: outside, created: make(chan struct{})}
}

// Dir is where the data lies: a path, or the URL of a bucket.
func (r *Root) Dir() string { return r.b.Path("") }

// nameOf is that of the directory of ref in the backend, or of a file in it.
func nameOf(ref checkpoint.Ref, file ...string) string {
	return path.Join(append([]string{ref.Run, ref.Trial, ref.Checkpoint}, file...)...)
}

// path is how people find it.
func (r *Root) path(ref checkpoint.Ref, file ...string) string { return r.b.Path(nameOf(ref, file...)) }

// sync makes the names in the directory of ref durable.
func (r *Root) sync(ctx context.Context, ref checkpoint.Ref) error { return r.b.Sync(ctx, nameOf(ref)) }

// readFile is the content of a small file.
func (r *Root) readFile(ctx context.Context, ref checkpoint.Ref, file string) ([]byte, error) {
	f, err := r.b.Open(ctx, nameOf(ref, file))
	if err != nil {
		return nil, fmt.Errorf("read: %w", err)
	}
	info, err := f.Stat()
	var data []byte
	if err == nil {
		data, err = io.ReadAll(io.NewSectionReader(f, 0, info.Size))
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("read %s: %w", r.path(ref, file), err)
	}
	return data, nil
}

// writeFile makes a small file. Its name is durable once its directory is.
func (r *Root) writeFile(ctx context.Context, ref checkpoint.Ref, file string, data []byte, mode object.Mode) error {
	u, err := r.b.Create(ctx, nameOf(ref, file), int64(len(data)), mode)
	if err != nil {
		return err
	}
	if _, err := u.WriteAt(data, 0); err != nil {
		u.Abort()
		return fmt.Errorf("write %s: %w", r.path(ref, file), err)
	}
	return u.Commit(ctx)
}

// Usage is the room on the disk of a backend, in bytes.
type Usage = object.Usage

// Usage is the backend's room; [errors.ErrUnsupported] where nobody knows.
func (r *Root) Usage(ctx context.Context) (Usage, error) { return r.b.Usage(ctx) }

// Free is what of the backend's room is free, in bytes; [errors.ErrUnsupported]
// where nobody knows.
func (r *Root) Free(ctx context.Context) (bytes uint64, err error) {
	u, err := r.b.Usage(ctx)
	return u.Free, err
}

// KeepFree makes WriteData refuse what would leave less free than keep says: a
// disk that saves have filled has no room for the log that says so.
func (r *Root) KeepFree(keep func(Usage) (bytes int64)) {
	r.space.Lock()
	defer r.space.Unlock()
	r.keep = keep
}

// reserve claims need bytes of the free space, together with what other
// writers have yet to write. The claim is given back by [Root.release].
func (r *Root) reserve(ctx context.Context, need int64) error {
	for {
		again, err := r.tryReserve(ctx, need)
		if again == nil {
			return err
		}
		select {
		case <-again:
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		}
	}
}

// tryReserve is reserve once. Where its error may be another in a moment, again
// is closed then.
func (r *Root) tryReserve(ctx context.Context, need int64) (again <-chan struct{}, err error) {
	r.space.Lock()
	defer r.space.Unlock()
	usage, err := r.b.Usage(ctx)
	keep := int64(0)
	if err == nil && r.keep != nil {
		keep = r.keep(usage)
	}
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		// Then the disk itself is the check: a full one fails the write.
	case err != nil:
		return nil, err
	case uint64(need+r.pending+keep) > usage.Free:
		err := &NoSpaceError{Dir: r.Dir(), Need: need, Pending: r.pending, Keep: keep, Free: usage.Free}
		if r.creating > 0 {
			return r.created, err
		}
		return nil, err
	}
	r.pending += need
	return nil, nil
}

func (r *Root) release(bytes int64) {
	r.space.Lock()
	defer r.space.Unlock()
	r.pending -= bytes
}

// OnUnverified sets who is told, once for each checkpoint, that bytes of
// adopted files are read whose sums are not learned yet. It is called before
// any reader is made; say must not block.
func (r *Root) OnUnverified(say func(checkpoint.Ref)) { r.say, r.told = say, map[checkpoint.Ref]bool{} }

func (r *Root) unverified(ref checkpoint.Ref) {
	if r.say == nil {
		return
	}
	r.tell.Lock()
	defer r.tell.Unlock()
	if !r.told[ref] {
		r.told[ref] = true
		r.say(ref)
	}
}

// OpenUnsynced names a data directory whose files are synced when the kernel
// sees fit: for data that is generated, and generated again after a crash.
func OpenUnsynced(dir string) (*Root, error) { return Open(unsynced{vfs.Default}, dir) }

// unsynced is a filesystem that leaves syncing to the kernel.
type unsynced struct{ vfs.FS }

func (u unsynced) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return unsyncedFile(u.FS.Create(name, c))
}

func (u unsynced) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	return unsyncedFile(u.FS.OpenReadWrite(name, c, o...))
}

func (u unsynced) OpenDir(name string) (vfs.File, error) { return unsyncedFile(u.FS.OpenDir(name)) }

func (u unsynced) Open(name string, o ...vfs.OpenOption) (vfs.File, error) {
	return unsyncedFile(u.FS.Open(name, o...))
}

func unsyncedFile(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return lazyFile{f}, nil
}

type lazyFile struct{ vfs.File }

func (lazyFile) Sync() error                { return nil }
func (lazyFile) SyncData() error            { return nil }
func (lazyFile) SyncTo(int64) (bool, error) { return true, nil }
