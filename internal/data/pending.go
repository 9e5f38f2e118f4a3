package data

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/data/segments"
	"github.com/ckptstore/ckptstore/internal/data/stream"
	"github.com/ckptstore/ckptstore/internal/disk"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/local"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// pendingDir holds the files of checkpoints before their commit, below the data directory. No
// run has such a name.
const pendingDir = ".pending"

// Pending holds the files of a checkpoint before its commit. They arrive in the format of
// another program, and their contents are not known yet, so they have a directory of their
// own, separate from the checkpoint's. It is safe for concurrent use.
type Pending struct {
	root *Root
	dir  string // in the backend

	lock io.Closer // held while this process writes here; nil where no other process can see it

	mu    sync.Mutex
	files map[string]*PendingFile
	count int
}

// grower is a backend that accepts files of unknown size.
type grower interface {
	Grow(ctx context.Context, name string) (*local.Growing, error)
	Files() vfs.FS
}

// NewPending makes a directory for the files of a future checkpoint.
func (r *Root) NewPending(ctx context.Context) (*Pending, error) {
	r, err := r.growing()
	if err != nil {
		return nil, err
	}
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	p := &Pending{root: r, dir: path.Join(pendingDir, hex.EncodeToString(id[:])), files: map[string]*PendingFile{}}
	if err := r.b.MakeDir(ctx, p.dir); err != nil {
		return nil, err
	}
	if p.lock, err = lockDir(r.Dir(), p.Path()); err != nil {
		return nil, fmt.Errorf("lock %s: %w", p.Path(), err)
	}
	return p, nil
}

// growing returns the root in which pending files lie, if it is a directory.
func (r *Root) growing() (*Root, error) {
	in := r.pendingRoot()
	if _, ok := in.b.(grower); !ok {
		return nil, fmt.Errorf("%s: files of other formats grow in a directory, and this store has none: %w", r.Dir(), errors.ErrUnsupported)
	}
	return in, nil
}

// JoinPending returns the directory of a [Pending] that a process of another machine has
// made and keeps. The caller writes files there under names of that process, and gives it
// their descriptions: see [Pending.Give].
func (r *Root) JoinPending(dir string) (*Pending, error) {
	r, err := r.growing()
	if err != nil {
		return nil, err
	}
	id, ok := strings.CutPrefix(dir, pendingDir+"/")
	if raw, err := hex.DecodeString(id); !ok || err != nil || len(raw) != 8 {
		return nil, fmt.Errorf("%q is no directory of pending files", dir)
	}
	return &Pending{root: r, dir: dir, files: map[string]*PendingFile{}}, nil
}

// Dir returns the directory of the files in the backend, for [Root.JoinPending].
func (p *Pending) Dir() string { return p.dir }

// Reserve returns the name in the directory for a file of another machine.
func (p *Pending) Reserve() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count++
	return fmt.Sprintf("f%d", p.count)
}

// CreateAs begins a file under a name that [Pending.Reserve] returned on another machine.
func (p *Pending) CreateAs(ctx context.Context, name, lies string) (*PendingFile, error) {
	if err := PendingName(name); err != nil {
		return nil, err
	}
	if lies == "" || lies != path.Base(lies) {
		return nil, fmt.Errorf("%q is no name of a pending file", lies)
	}
	var up *local.Growing
	err := visible(ctx, p.Path(), func() (err error) {
		up, err = p.root.b.(grower).Grow(ctx, path.Join(p.dir, lies))
		return err
	})
	if err != nil {
		return nil, err
	}
	f := newPendingFile(p, lies, up)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.files[name] = f
	return f, nil
}

// Give adds a whole file that another machine has written, and described by
// [PendingFile.Describe].
func (p *Pending) Give(ctx context.Context, name, lies string, d segments.Description) error {
	if err := PendingName(name); err != nil {
		return err
	}
	err := visible(ctx, p.Path(), func() error {
		info, err := p.root.b.Stat(ctx, path.Join(p.dir, lies))
		if err == nil && info.Size != d.Size {
			err = fmt.Errorf("%s has %d bytes on this machine, and its writer reports %d: %w", path.Join(p.Path(), lies), info.Size, d.Size, fs.ErrNotExist)
		}
		return err
	})
	if err != nil {
		return err
	}
	of, err := d.Contents()
	if err != nil {
		return err
	}
	f := &PendingFile{p: p, name: lies, ended: make(chan struct{}), closed: true, whole: true, said: d.Size, contents: of}
	close(f.ended)
	p.mu.Lock()
	before := p.files[name]
	p.files[name] = f
	p.mu.Unlock()
	if before != nil {
		before.Abort()
	}
	return nil
}

// visibleLimit is how long what another machine has written may be invisible here.
const visibleLimit = time.Minute

// visible repeats an operation while it finds no file. A network file system remembers
// for a while that a name did not exist; listing the directories asks its server.
func visible(ctx context.Context, dir string, do func() error) error {
	limit := time.NewTimer(visibleLimit)
	defer limit.Stop()
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := do()
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, d := range []string{filepath.Dir(dir), dir} {
			_, _ = os.ReadDir(d) // best effort
		}
		select {
		case <-time.After(pause):
		case <-limit.C:
			return err
		case <-ctx.Done():
			return err
		}
	}
}

// SweepPending removes the pending files of processes that have ended.
func (r *Root) SweepPending(ctx context.Context) error {
	r = r.pendingRoot()
	names, err := r.names(ctx, pendingDir)
	if err != nil {
		return disk.Gone(err)
	}
	var problems []error
	for _, name := range names {
		dir := path.Join(pendingDir, name)
		lock, err := lockDir(r.Dir(), r.b.Path(dir))
		if stray(err, r.b.Path(dir)) {
			problems = append(problems, r.b.Remove(ctx, dir))
			continue
		}
		if err != nil {
			continue // another process writes there, or has just removed it
		}
		files, err := r.names(ctx, dir)
		if err == nil {
			err = r.removeAll(ctx, dir, files)
		}
		if lock != nil {
			err = errors.Join(err, lock.Close())
		}
		problems = append(problems, disk.Gone(err))
	}
	return errors.Join(problems...)
}

// Path returns the directory of the files.
func (p *Pending) Path() string { return p.root.b.Path(p.dir) }

// Remove removes all files. Files that were linked into a checkpoint stay there.
func (p *Pending) Remove(ctx context.Context) error {
	p.mu.Lock()
	files := p.files
	p.files = map[string]*PendingFile{}
	p.mu.Unlock()
	for _, f := range files {
		f.Abort()
	}
	names, err := p.root.names(ctx, p.dir)
	if err == nil {
		err = p.root.removeAll(ctx, p.dir, names)
	}
	if p.lock != nil {
		err = errors.Join(disk.Gone(err), p.lock.Close())
	}
	return disk.Gone(err)
}

// PendingName returns an error for a name that no file of a [Pending] can have: a
// [*checkpoint.NameError], or an error of its syntax.
func PendingName(name string) error {
	return checkpoint.ValidatePlainName(strings.TrimSuffix(name, object.Partial))
}

// Create begins a file. It aborts an earlier file of that name, whose writes then fail.
func (p *Pending) Create(ctx context.Context, name string) (*PendingFile, error) {
	if err := PendingName(name); err != nil {
		return nil, err
	}
	p.mu.Lock()
	p.count++
	lies := fmt.Sprintf("f%d", p.count) // so that an aborted file does not block this one
	p.mu.Unlock()
	up, err := p.root.b.(grower).Grow(ctx, path.Join(p.dir, lies))
	if err != nil {
		return nil, err
	}
	f := newPendingFile(p, lies, up)
	p.mu.Lock()
	before := p.files[name]
	p.files[name] = f
	p.mu.Unlock()
	if before != nil {
		before.Abort()
	}
	return f, nil
}

// File returns the file of a name, nil if there is none.
func (p *Pending) File(name string) *PendingFile {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.files[name]
}

// Names returns the sorted names of all files, whole or not.
func (p *Pending) Names() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var names []string
	for name := range p.files {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Rename renames a file. It removes a file that has the new name.
func (p *Pending) Rename(from, to string) error {
	if err := PendingName(to); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.files[from]
	if f == nil {
		return fmt.Errorf("rename %s: %w", from, fs.ErrNotExist)
	}
	if old := p.files[to]; old != nil && old != f {
		old.Abort()
	}
	delete(p.files, from)
	p.files[to] = f
	return nil
}

// Detach moves a whole file into a Pending of its own, whose Remove leaves the other files in
// place. It returns nil if the name belongs to another file by now, or the file is not whole.
func (p *Pending) Detach(name string, f *PendingFile) *Pending {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.files[name] != f || !f.Whole() {
		return nil
	}
	delete(p.files, name)
	return &Pending{root: p.root, dir: p.dir, files: map[string]*PendingFile{name: f}}
}

// Adopt moves the whole file of a name here from another Pending. It removes a file that has
// the name here.
func (p *Pending) Adopt(ctx context.Context, from *Pending, name string) error {
	f := from.File(name)
	if f == nil || !f.Whole() {
		return fmt.Errorf("move %s: it is not whole", name)
	}
	p.mu.Lock()
	p.count++
	lies := fmt.Sprintf("f%d", p.count)
	p.mu.Unlock()
	if err := p.root.b.Link(ctx, path.Join(from.dir, f.name), path.Join(p.dir, lies), object.Replace); err != nil {
		return err
	}
	from.mu.Lock()
	delete(from.files, name)
	from.mu.Unlock()
	moved := f.at(p, lies)
	p.mu.Lock()
	before := p.files[name]
	p.files[name] = moved
	p.mu.Unlock()
	if before != nil {
		before.Abort()
	}
	return nil
}

// Drop removes an aborted file from the names, if the name is still that file's.
func (p *Pending) Drop(name string, f *PendingFile) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.files[name] == f {
		delete(p.files, name)
	}
}

// Discard removes a file.
func (p *Pending) Discard(ctx context.Context, name string) error {
	p.mu.Lock()
	f := p.files[name]
	delete(p.files, name)
	p.mu.Unlock()
	if f == nil {
		return fmt.Errorf("remove %s: %w", name, fs.ErrNotExist)
	}
	f.Abort()
	return p.root.b.Remove(ctx, path.Join(p.dir, f.name))
}

// Files returns the whole files at the time of the call, for a reader of the format. The
// bytes between tensors come from memory.
func (p *Pending) Files() vfs.FS { return pendingFS{p.inside(), p} }

// inside returns the filesystem of the files.
func (p *Pending) inside() vfs.FS { return p.root.b.(grower).Files() }

type pendingFS struct {
	vfs.FS
	p *Pending
}

func (f pendingFS) at(name string) (*PendingFile, string) {
	if path.Dir(name) != f.p.Path() {
		return nil, name
	}
	if file := f.p.File(path.Base(name)); file != nil {
		return file, path.Join(path.Dir(name), file.name)
	}
	return nil, name
}

// List implements vfs.FS.
func (f pendingFS) List(dir string) ([]string, error) {
	if dir == f.p.Path() {
		return f.p.Names(), nil
	}
	return f.FS.List(dir)
}

// Stat implements vfs.FS.
func (f pendingFS) Stat(name string) (vfs.FileInfo, error) {
	_, real := f.at(name)
	return f.FS.Stat(real)
}

// Open implements vfs.FS.
func (f pendingFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	of, real := f.at(name)
	file, err := f.FS.Open(real, opts...)
	if err != nil || of == nil {
		return file, err
	}
	return pendingRead{file, of}, nil
}

// pendingRead reads the bytes that are kept in memory from there.
type pendingRead struct {
	vfs.File
	of *PendingFile
}

// ReadAt implements io.ReaderAt.
func (r pendingRead) ReadAt(b []byte, off int64) (int, error) {
	if data := r.of.contents.Literal(off, int64(len(b))); data != nil {
		return copy(b, data), nil
	}
	return r.File.ReadAt(b, off)
}

// pendingObject implements [object.Object] where the file is read as an object.
type pendingObject struct{ pendingRead }

func (o pendingObject) Stat() (object.Info, error) {
	return object.Info{Size: o.of.contents.Size()}, nil
}

var _ io.ReaderAt = pendingRead{}

// lockDir locks a directory until the lock is closed, or this process ends. A directory
// outside the operating system's filesystem has no lock, and needs none: only this process
// sees it. Links are not followed.
func lockDir(data, path string) (io.Closer, error) {
	f, err := beneath.At(filepath.Dir(data)).OpenDir(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Spool makes another root the place of pending files, which grow and are renamed as a bucket
// allows no file to. Whole ones are sent to this root's backend. It is called before anything
// is written.
func (r *Root) Spool(in *Root) { r.spool = in }

// pending returns the root in which pending files lie.
func (r *Root) pendingRoot() *Root {
	if r.spool != nil {
		return r.spool
	}
	return r
}

// bring gives a whole file in another root, of which nothing changes, a name in this one: a
// link where both are one backend that has links, else a copy. The same bytes under that name
// are success.
func (r *Root) bring(ctx context.Context, from *Root, lies, name string) error {
	if r.b == from.b {
		err := r.b.Link(ctx, lies, name, object.Replace)
		if !errors.Is(err, errors.ErrUnsupported) {
			return err
		}
	}
	f, err := from.b.Open(ctx, lies)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // nothing was written to it
	info, err := f.Stat()
	if err != nil {
		return err
	}
	err = r.send(ctx, name, f, info.Size)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	same, err := r.holds(ctx, name, f, info.Size)
	if err == nil && !same {
		err = fmt.Errorf("%s has other bytes already; save under another name", r.b.Path(name))
	}
	return err
}

// sendDepth is how many pieces of a copy are read and sent at a time. Each has memory of its
// own.
const sendDepth = 4

// send makes a file of size bytes of another.
func (r *Root) send(ctx context.Context, name string, f io.ReaderAt, size int64) error {
	u, err := r.b.Create(ctx, name, size, object.Exclusive)
	if err != nil {
		return err
	}
	defer u.Abort()
	g, inner := errgroup.WithContext(ctx)
	g.SetLimit(max(min(u.Depth(), sendDepth), 1))
	for at := int64(0); at < size && inner.Err() == nil; at += int64(u.Piece()) {
		g.Go(func() error {
			buf := stream.Borrow(int(min(int64(u.Piece()), size)))
			defer stream.Return(buf)
			p := (*buf)[:min(int64(len(*buf)), size-at)]
			if n, err := f.ReadAt(p, at); n < len(p) {
				return fmt.Errorf("read %d bytes at %d: %w", len(p), at, errors.Join(err, io.ErrUnexpectedEOF))
			}
			_, err := u.WriteAt(p, at)
			return err
		})
	}
	if err := errors.Join(g.Wait(), ctx.Err()); err != nil {
		return fmt.Errorf("copy to %s: %w", r.b.Path(name), err)
	}
	return u.Commit(ctx)
}

// holds reports whether a file has the size and digest of another.
func (r *Root) holds(ctx context.Context, name string, f io.ReaderAt, size int64) (bool, error) {
	there, err := r.b.Open(ctx, name)
	if err != nil {
		return false, err
	}
	defer func() { _ = there.Close() }() // nothing was written to it
	if info, err := there.Stat(); err != nil || info.Size != size {
		return false, err
	}
	var digests [2]checkpoint.Digest
	for i, file := range []io.ReaderAt{f, there} {
		if digests[i], err = scan.Digest(ctx, file, 0, size); err != nil {
			return false, err
		}
	}
	return digests[0] == digests[1], nil
}
