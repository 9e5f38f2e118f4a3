package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/local"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// Root is the data of a store. It is safe for concurrent use, also by several processes: all
// shared state lies in the backend.
type Root struct {
	b       object.Backend
	outside vfs.FS   // where adopted files lie
	spool   *Root    // where pending files lie; nil: here
	stores  []string // whose checkpoints these are

	space    sync.Mutex
	pending  int64             // bytes that running WriteData calls have yet to write
	creating int               // files whose bytes may be counted twice, see begin
	created  chan struct{}     // closed when the double counting of one ends
	keep     func(Usage) int64 // bytes that they leave free; nil: none

	reuse    sync.Mutex
	bases    []*base     // whose indexes are kept, the latest used first
	linkless atomic.Bool // links are impossible here although the backend has them, so looking for equal chunks is useless
	hasLinks func() bool // see HasLinks

	wrote wrote

	tell     sync.Mutex
	notified map[checkpoint.Ref]bool // refs that were passed to notify
	notify   func(checkpoint.Ref)    // nil: not called
}

// Open returns the data directory of a store, STORE/data. It touches no files: the first
// writer makes the directory, and readers need no permission to write.
func Open(fs vfs.FS, dir string) (*Root, error) {
	if fs == nil || dir == "" {
		return nil, errors.New("open data directory: no filesystem or no path given")
	}
	return OpenBackend(local.New(fs, dir), fs), nil
}

// OpenBackend returns the data of a store in any backend. Adopted files of other programs lie
// outside of it, in a filesystem.
func OpenBackend(b object.Backend, outside vfs.FS) *Root {
	return &Root{b: b, outside: outside, created: make(chan struct{}), hasLinks: sync.OnceValue(func() bool {
		if _, is := b.(*local.Dir); is {
			return true
		}
		err := b.Link(context.Background(), unlinked, unlinked+"2", object.Exclusive)
		return !errors.Is(err, errors.ErrUnsupported)
	})}
}

// unlinked is the name of no file. To link it tells whether a backend has links.
const unlinked = ".links"

// HasLinks reports whether files have links here. Without them a checkpoint names the files of
// earlier ones that it reuses, and needs them after those are deleted: package refs has the
// law. With them a checkpoint stays complete whatever happens to others.
func (r *Root) HasLinks() bool { return r.hasLinks() }

// OpenBucket is [OpenBackend] with the files of other programs on this machine.
func OpenBucket(b object.Backend) *Root { return OpenBackend(b, vfs.Default) }

// Dir returns the location of the data: a path, or the URL of a bucket.
func (r *Root) Dir() string { return r.b.Path("") }

// nameOf returns the name in the backend of the directory of ref, or of a file in it.
func nameOf(ref checkpoint.Ref, file ...string) string {
	return path.Join(append([]string{ref.Run, ref.Trial, ref.Checkpoint}, file...)...)
}

// Local returns the directory of the data, if it is one of this machine.
func (r *Root) Local() (dir string, ok bool) {
	if _, ok := r.b.(*local.Dir); ok {
		return r.b.Path(""), true
	}
	return "", false
}

// Path returns the name of a checkpoint's directory, or of a file in it, that is shown to users.
func (r *Root) Path(ref checkpoint.Ref, file ...string) string { return r.path(ref, file...) }

// Bytes returns the bytes of all files of a checkpoint, committed or not, or -1 if it has none. It
// does not count data files for which but, if not nil, returns true.
func (r *Root) Bytes(ctx context.Context, ref checkpoint.Ref, but func(name string) bool) (int64, error) {
	sizes, err := r.fileSizes(ctx, ref)
	if err != nil {
		return 0, err
	}
	if len(sizes) == 0 {
		return -1, nil
	}
	bytes := int64(0)
	for name, size := range sizes {
		if but == nil || !checkpoint.HoldsData(name) || !but(name) {
			bytes += size
		}
	}
	return bytes, nil
}

// fileSizes returns the sizes of all files of a checkpoint, by name; none if there is no such
// directory.
func (r *Root) fileSizes(ctx context.Context, ref checkpoint.Ref) (map[string]int64, error) {
	return r.sizes(ctx, ref, r.b.List)
}

// sizes returns the sizes of files that list lists.
func (r *Root) sizes(ctx context.Context, ref checkpoint.Ref, list lister) (map[string]int64, error) {
	entries, err := list(ctx, nameOf(ref))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", r.path(ref), err)
	}
	sizes := make(map[string]int64, len(entries))
	for _, e := range entries {
		info := e.Info
		if info == nil {
			is, err := r.b.Stat(ctx, nameOf(ref, e.Name))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("measure %s: %w", r.path(ref, e.Name), err)
			}
			info = &is
		}
		sizes[e.Name] = info.Size
	}
	return sizes, nil
}

// Requests are what a checkpoint asks of a bucket.
type Requests struct {
	Writes int   // PUT, POST and LIST, of its save
	Reads  int   // GET, of a load of all its bytes by as many ranks; at most, if tensors share bytes
	Lists  int   // LIST, of that load
	Bytes  int64 // of its own files, without those of other checkpoints that it names
}

// Metered reports whether requests have a price.
func (r *Root) Metered() bool {
	_, ok := r.b.(object.Metered)
	return ok
}

// Unfreed returns why removed files stay as versions in a bucket, which still cost, or nil if they
// do not.
func (r *Root) Unfreed(ctx context.Context) (why, err error) {
	if b, ok := r.b.(object.Versioned); ok {
		return b.Unfreed(ctx)
	}
	return nil, nil
}

// Refresh makes the next call ask a bucket again whether it keeps versions, and which may be removed.
func (r *Root) Refresh() {
	if b, ok := r.b.(object.Versioned); ok {
		b.Refresh()
	}
}

// lister lists a directory.
type lister func(ctx context.Context, dir string) ([]object.Entry, error)

// listAll lists a directory with all that takes space there.
func (r *Root) listAll(ctx context.Context, dir string) ([]object.Entry, error) {
	if b, ok := r.b.(object.Versioned); ok {
		return b.ListAll(ctx, dir)
	}
	return r.b.List(ctx, dir)
}

// Frees returns the bytes that [Root.RemoveExcept] frees, with those of older versions of the
// files, and what is locked of them: its bytes are not among the freed.
func (r *Root) Frees(ctx context.Context, ref checkpoint.Ref, keeps func(name string) bool, locked bool) (bytes int64, held *object.LockedError, err error) {
	sizes, err := r.sizes(ctx, ref, r.listAll)
	if err != nil {
		return 0, nil, err
	}
	var names []string
	for name, size := range sizes {
		if keeps == nil || !checkpoint.HoldsData(name) || !keeps(name) {
			bytes += size
			names = append(names, nameOf(ref, name))
		}
	}
	b, ok := r.b.(object.Versioned)
	if !ok || !locked {
		return bytes, nil, nil
	}
	if err := b.Locked(ctx, names...); errors.As(err, &held) {
		bytes -= held.Bytes
	} else if err != nil {
		return 0, nil, fmt.Errorf("ask what is locked of %s: %w", r.path(ref), err)
	}
	return bytes, held, nil
}

// Requests counts the requests for a checkpoint, without repeated ones. It returns false where
// requests have no price.
func (r *Root) Requests(ctx context.Context, ref checkpoint.Ref, m checkpoint.Manifest) (Requests, bool, error) {
	b, metered := r.b.(object.Metered)
	if !metered {
		return Requests{}, false, nil
	}
	sizes, err := r.fileSizes(ctx, ref)
	if err != nil {
		return Requests{}, false, err
	}
	span := r.b.Reading().Span
	// Lists before and after the writes; the receipt, the manifest and the indexes.
	out := Requests{Writes: 2, Reads: 2 + len(m.Ranks), Lists: 1}
	others := m.Layout.Bytes()
	for name, size := range sizes {
		out.Writes += b.Writes(size)
		out.Bytes += size
		if checkpoint.HoldsData(name) {
			out.Reads += int((size + span - 1) / span)
			others -= size
		}
	}
	if others > 0 {
		out.Reads += int((others + span - 1) / span)
	}
	return out, true, nil
}

// FileSize returns the size of a file of a checkpoint, in bytes.
func (r *Root) FileSize(ctx context.Context, ref checkpoint.Ref, file string) (int64, error) {
	info, err := r.b.Stat(ctx, nameOf(ref, file))
	return info.Size, err
}

// path returns the name that is shown to users.
func (r *Root) path(ref checkpoint.Ref, file ...string) string { return r.b.Path(nameOf(ref, file...)) }

// sync makes the names in the directory of ref durable.
func (r *Root) sync(ctx context.Context, ref checkpoint.Ref) error { return r.b.Sync(ctx, nameOf(ref)) }

// far reports whether each read, and each question whether a file exists, is a request to
// another machine.
func (r *Root) far() bool { return r.b.Reading().Span > 0 }

// wrote holds what this process knows of the last few checkpoints that it writes to a bucket,
// so that it does not ask the bucket again.
type wrote struct {
	mu    sync.Mutex
	order []checkpoint.Ref
	by    map[checkpoint.Ref]*known
}

// known is what this process knows of a checkpoint that it writes.
type known struct {
	setUp sync.Mutex
	isSet bool           // the directory was found free
	index map[int][]byte // of each rank, as the bucket acknowledged it
}

// wroteMost is how many checkpoints wrote keeps: saves that overlap.
const wroteMost = 8

// of returns what is known of a checkpoint. The caller holds the lock.
func (w *wrote) of(ref checkpoint.Ref) *known {
	if w.by == nil {
		w.by = map[checkpoint.Ref]*known{}
	}
	if w.by[ref] == nil {
		if w.order = append(w.order, ref); len(w.order) > wroteMost {
			delete(w.by, w.order[0])
			w.order = w.order[1:]
		}
		w.by[ref] = &known{index: map[int][]byte{}}
	}
	return w.by[ref]
}

// setUp calls check for a checkpoint until it succeeds. Callers wait for one another.
func (w *wrote) setUp(ref checkpoint.Ref, check func() error) (err error) {
	w.mu.Lock()
	k := w.of(ref)
	w.mu.Unlock()
	k.setUp.Lock()
	defer k.setUp.Unlock()
	if !k.isSet {
		err = check()
		k.isSet = err == nil
	}
	return err
}

func (w *wrote) add(ref checkpoint.Ref, rank int, index []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.of(ref).index[rank] = index
}

func (w *wrote) get(ref checkpoint.Ref, rank int) []byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	if k := w.by[ref]; k != nil {
		return k.index[rank]
	}
	return nil
}

// forget drops what is known of a checkpoint.
func (w *wrote) forget(ref checkpoint.Ref) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.by[ref] != nil {
		delete(w.by, ref)
		w.order = slices.DeleteFunc(w.order, func(r checkpoint.Ref) bool { return r == ref })
	}
}

// names returns the names in a directory of the backend.
func (r *Root) names(ctx context.Context, dir string) ([]string, error) {
	entries, err := r.b.List(ctx, dir)
	return object.Names(entries), err
}

// mostMeta is more bytes than any index, manifest or receipt has. Their decoders have
// their own limits.
const mostMeta = 1 << 31

// readFile returns the content of a small file.
func (r *Root) readFile(ctx context.Context, ref checkpoint.Ref, file string) ([]byte, error) {
	data, err := r.b.Get(ctx, nameOf(ref, file), mostMeta)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read: %w", err)
	}
	if err != nil {
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

// Usage is the space on the disk of a backend, in bytes.
type Usage = object.Usage

// Usage returns the backend's space, or [errors.ErrUnsupported] where it is unknown.
func (r *Root) Usage(ctx context.Context) (Usage, error) { return r.b.Usage(ctx) }

// Free returns the free space of the backend, in bytes, or [errors.ErrUnsupported] where it
// is unknown.
func (r *Root) Free(ctx context.Context) (bytes uint64, err error) {
	u, err := r.b.Usage(ctx)
	return u.Free, err
}

// KeepFree makes WriteData refuse writes that would leave less free space than keep returns:
// a disk filled by saves would have no space for the log.
func (r *Root) KeepFree(keep func(Usage) (bytes int64)) {
	r.space.Lock()
	defer r.space.Unlock()
	r.keep = keep
}

// reserve claims need bytes of the free space, in addition to the outstanding writes of other
// writers. [Root.release] returns the claim.
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

// tryReserve tries to reserve once. If the result may differ shortly, again is closed when it
// does.
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
		// If the usage is unknown, a full disk fails the write itself.
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

// OnUnverified sets the function that is called, once for each checkpoint, when bytes of
// adopted files are read whose sums are not learned yet. It is called before any reader is
// made; notify must not block.
func (r *Root) OnUnverified(notify func(checkpoint.Ref)) {
	r.notify, r.notified = notify, map[checkpoint.Ref]bool{}
}

func (r *Root) unverified(ref checkpoint.Ref) {
	if r.notify == nil {
		return
	}
	r.tell.Lock()
	defer r.tell.Unlock()
	if !r.notified[ref] {
		r.notified[ref] = true
		r.notify(ref)
	}
}

// OpenUnsynced returns a data directory whose files are synced by the kernel's schedule: for
// data that can be generated again after a crash.
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

// begin creates a file of size bytes, for which space is claimed. Where the disk counts the
// file as used from now on, begin returns that part of the claim. open is the part that the
// writes will return, nil if none is left. In between, both count the space: a writer that
// finds too little space then retries when begin has ended.
func (r *Root) begin(c *claim, size int64, create func() (object.Upload, error)) (up object.Upload, open *claim, err error) {
	r.space.Lock()
	r.creating++
	r.space.Unlock()
	up, err = create()
	open = c
	if err == nil && up.Reserved() {
		c.use(size)
		open = nil
	}
	r.space.Lock()
	defer r.space.Unlock()
	r.creating--
	close(r.created)
	r.created = make(chan struct{})
	return up, open, err
}

// claim is the part of a write's reserved space that it has yet to use.
type claim struct {
	root *Root
	mu   sync.Mutex
	left int64
}

// use returns the part of the claim that the disk itself counts from now on.
func (c *claim) use(bytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	bytes = min(bytes, c.left)
	c.left -= bytes
	c.root.release(bytes)
}

func (c *claim) give() { c.use(math.MaxInt64) }
