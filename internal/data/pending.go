package data

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/disk"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/local"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"
)

// pendingDir holds the files of checkpoints to be, below the data directory. No
// run has such a name.
const pendingDir = ".pending"

// Pending is the files of a checkpoint to be, which come in the format of
// another program, while nobody knows yet what is in them: they have a
// directory of their own, and none of the checkpoint's. It is safe for
// concurrent use.
type Pending struct {
	root *Root
	dir  string // in the backend

	lock io.Closer // held while somebody writes here; nil where nobody else can see it

	mu    sync.Mutex
	files map[string]*PendingFile
	count int
}

// grower is a backend that takes files whose size is not known before.
type grower interface {
	Grow(ctx context.Context, name string) (*local.Growing, error)
	Files() vfs.FS
}

// NewPending makes a directory for files of a checkpoint to be.
func (r *Root) NewPending(ctx context.Context) (*Pending, error) {
	if _, ok := r.b.(grower); !ok {
		return nil, fmt.Errorf("%s: files of other formats are taken by a store in a directory alone: %w", r.Dir(), errors.ErrUnsupported)
	}
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	p := &Pending{root: r, dir: path.Join(pendingDir, hex.EncodeToString(id[:])), files: map[string]*PendingFile{}}
	if err := r.b.MakeDir(ctx, p.dir); err != nil {
		return nil, err
	}
	var err error
	if p.lock, err = lockDir(r.Dir(), p.Path()); err != nil {
		return nil, fmt.Errorf("lock %s: %w", p.Path(), err)
	}
	return p, nil
}

// SweepPending removes what processes that are gone have left of checkpoints
// that never were.
func (r *Root) SweepPending(ctx context.Context) error {
	names, err := r.b.List(ctx, pendingDir)
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
			continue // somebody writes there, or has just removed it
		}
		files, err := r.b.List(ctx, dir)
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

// Path is where the files lie.
func (p *Pending) Path() string { return p.root.b.Path(p.dir) }

// Remove removes all files. What was linked into a checkpoint stays there.
func (p *Pending) Remove(ctx context.Context) error {
	p.mu.Lock()
	files := p.files
	p.files = map[string]*PendingFile{}
	p.mu.Unlock()
	for _, f := range files {
		f.Abort()
	}
	names, err := p.root.b.List(ctx, p.dir)
	if err == nil {
		err = p.root.removeAll(ctx, p.dir, names)
	}
	if p.lock != nil {
		err = errors.Join(disk.Gone(err), p.lock.Close())
	}
	return disk.Gone(err)
}

// PendingName reports a name that no file of a [Pending] can have: a
// [*checkpoint.NameError], or one that is no name.
func PendingName(name string) error {
	return checkpoint.ValidatePlainName(strings.TrimSuffix(name, object.Partial))
}

// Create begins a file. One of that name is given up: its writes are errors.
func (p *Pending) Create(ctx context.Context, name string) (*PendingFile, error) {
	if err := PendingName(name); err != nil {
		return nil, err
	}
	p.mu.Lock()
	p.count++
	lies := fmt.Sprintf("f%d", p.count) // so that what was given up is in nobody's way
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

// File is the file of a name, nil if there is none.
func (p *Pending) File(name string) *PendingFile {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.files[name]
}

// Names are those of all files, sorted, whole or not.
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

// Rename gives a file another name. A file that has it goes.
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

// Detach takes a whole file out, as the one of a Pending that has nothing else; nil if
// the file of that name is another by now, or not whole. Its Remove leaves the other
// files where they are.
func (p *Pending) Detach(name string, f *PendingFile) *Pending {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.files[name] != f || !f.Whole() {
		return nil
	}
	delete(p.files, name)
	return &Pending{root: p.root, dir: p.dir, files: map[string]*PendingFile{name: f}}
}

// Adopt moves the whole file of a name here from another Pending. A file that has the
// name goes.
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

// Drop takes a file that was given up out, if it has the name still.
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

// Files are the whole files as they are when this is called, for whoever reads
// the format: what lies between tensors comes from memory.
func (p *Pending) Files() vfs.FS { return pendingFS{p.inside(), p} }

// inside is the filesystem that the files lie in.
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

// pendingRead reads what is in memory from there.
type pendingRead struct {
	vfs.File
	of *PendingFile
}

// ReadAt implements io.ReaderAt.
func (r pendingRead) ReadAt(b []byte, off int64) (int, error) {
	if data := r.of.literal(off, int64(len(b))); data != nil {
		return copy(b, data), nil
	}
	return r.File.ReadAt(b, off)
}

// Stat implements [object.Object] where the file is read as one.
type pendingObject struct{ pendingRead }

func (o pendingObject) Stat() (object.Info, error) {
	return object.Info{Size: o.of.size}, nil
}

var _ io.ReaderAt = pendingRead{}

// lockDir locks a directory until it is closed, or this process ends. One that
// is no directory of the system has no lock, and needs none: only this process
// sees it.
// A link is not followed.
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
