package logs

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/beneath"
)

// Options configure how files are written.
type Options struct {
	Top     string           // a parent directory, below which no symbolic link is followed; empty: the directory itself
	MaxSize int64            // bytes at which a file is rotated; 0: [DefaultMaxSize]
	Now     func() time.Time // nil: time.Now
	Failed  func(error)      // called once, when files can no longer be written; may be nil
}

// Dir is the directory of the files that a job writes. It is created with the
// first line. Its methods are safe for concurrent use.
type Dir struct {
	path string
	top  string
	root beneath.Root // at top
	o    Options

	mu     sync.Mutex
	failed bool
}

// NewDir returns the directory of a job's output.
func NewDir(path string, o Options) *Dir {
	if o.MaxSize == 0 {
		o.MaxSize = DefaultMaxSize
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Failed == nil {
		o.Failed = func(error) {}
	}
	top := cmp.Or(o.Top, path)
	return &Dir{path: path, top: top, root: beneath.At(top), o: o}
}

// make creates the directory.
func (d *Dir) make() error {
	if err := os.MkdirAll(d.top, 0o755); err != nil {
		return err
	}
	return d.root.MkdirAll(d.path, 0o755)
}

// fail stops the writing of all files.
func (d *Dir) fail(err error) {
	d.mu.Lock()
	first := !d.failed
	d.failed = true
	d.mu.Unlock()
	if first {
		d.o.Failed(fmt.Errorf("keep the output of workers in %s: %w", d.path, err))
	}
}

// Failed reports whether files are no longer written.
func (d *Dir) Failed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.failed
}

// File returns one output of a rank. The file is created with its first line.
func (d *Dir) File(attempt, rank int, s Stream) *File {
	k := key{attempt, rank, s}
	return &File{dir: d, path: filepath.Join(d.path, k.name())}
}

// File is an [io.WriteCloser] that never fails: write errors go to
// [Options.Failed]. Each write is one line, with or without its end, or a state
// of a redrawn line, which ends with "\r". A redrawn line keeps all its states.
type File struct {
	dir  *Dir
	path string

	mu     sync.Mutex
	f      *os.File
	size   int64
	line   []byte
	states []byte // of a line whose end has not come yet
	closed bool
}

// Write implements [io.Writer].
func (f *File) Write(text []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || f.dir.Failed() {
		return len(text), nil
	}
	if len(f.states)+len(text) > longestText {
		f.keep()
	}
	f.states = append(f.states, text...)
	if len(text) == 0 || text[len(text)-1] != '\r' {
		f.keep()
	}
	return len(text), nil
}

// longestText is the maximum size of a line in bytes, without its time.
const longestText = 64 << 10

// keep writes the pending line, if any.
func (f *File) keep() {
	text := f.states
	f.states = text[:0]
	if len(text) == 0 || f.dir.Failed() {
		return
	}
	f.set(text)
	if err := f.put(); err != nil {
		f.dir.fail(err)
		_ = f.shut() // closing fails for the same reason
	}
}

// set makes text the line to write.
func (f *File) set(text []byte) {
	f.line = f.dir.o.Now().UTC().AppendFormat(f.line[:0], layout)
	f.line = append(append(f.line, ' '), text...)
	if len(text) == 0 || text[len(text)-1] != '\n' {
		f.line = append(f.line, '\n')
	}
}

// put writes the line, in a new file if this one is full.
func (f *File) put() error {
	if f.f == nil {
		if err := f.open(); err != nil {
			return err
		}
	}
	if f.size > 0 && f.size+int64(len(f.line)) > f.dir.o.MaxSize {
		if err := f.rotate(); err != nil {
			return err
		}
	}
	n, err := f.f.Write(f.line)
	if err != nil && n > 0 { // part of a line is worse than none
		return errors.Join(err, f.f.Truncate(f.size))
	}
	f.size += int64(n)
	return err
}

func (f *File) open() error {
	if err := f.dir.make(); err != nil {
		return err
	}
	file, err := f.dir.root.OpenFile(f.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	info, err := file.Stat()
	if err != nil {
		return errors.Join(err, file.Close())
	}
	f.f, f.size = file, info.Size()
	return nil
}

// rotate begins a new file, whose first line reports the rotation.
func (f *File) rotate() error {
	line := append([]byte(nil), f.line...)
	_, err := f.dir.root.Lstat(f.path + before)
	if err := errors.Join(f.shut(), f.dir.root.Rename(f.path, f.path+before), f.open()); err != nil {
		return err
	}
	says := fmt.Sprintf("ckptstore: this output has reached %d bytes: what came before is in %s", f.dir.o.MaxSize, filepath.Base(f.path)+before)
	if err == nil {
		says += ", and what that had before is dropped"
	}
	f.set([]byte(says))
	n, err := f.f.Write(f.line)
	f.size += int64(n)
	f.line = line
	return err
}

func (f *File) shut() error {
	if f.f == nil {
		return nil
	}
	err := f.f.Close()
	f.f = nil
	return err
}

// Close implements [io.Closer]. Later writes are dropped.
func (f *File) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		f.keep()
	}
	f.closed = true
	return f.shut()
}
