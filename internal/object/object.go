// Package object says what the data plane asks of whatever keeps its files: a
// directory, or a bucket. It is small enough that an object store can give all
// of it, and exact enough that a filesystem keeps its speed.
//
//	name     a slash-separated path below the backend's own place, as
//	         "run/main/step-100.a1/r00003.idx"; no part is empty, "." or ".."
//	file     bytes that appear under a name at once, whole, and never change
//	upload   a file that is being written; nobody sees it
//	link     a second name of a file, where there is such a thing
//
// There is no rename and no append: an upload is committed under its name, or
// never was. A name becomes durable in two steps, since a filesystem has two:
//
//	Create ─▶ WriteAt* ─▶ Commit            Sync(directory)
//	          in any order  bytes durable,   names durable
//	                        name visible
//
// An object store does both in Commit, and nothing in Sync. Package objecttest
// holds every implementation to this page.
package object

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"
	"unsafe"
)

// Backend keeps files by name. Its methods may be called at the same time, by
// several processes too. They return when ctx ends, but for a system call that
// does not. A file that is not there is an error with [fs.ErrNotExist].
type Backend interface {
	// Path is how people find a file: the path, or the URL.
	Path(name string) string

	// MakeDir makes a directory with its parents. Files can be created in it
	// from then on; on return its name is durable.
	MakeDir(ctx context.Context, dir string) error

	// Create begins a file of size bytes, whose writes end with ctx. Too little
	// room for it is an error with syscall.ENOSPC or EDQUOT, here if that can
	// be known, before anything is written. Several uploads of one name, from
	// several processes too, know nothing of each other: what has the name is
	// always all of one of them.
	Create(ctx context.Context, name string, size int64, mode Mode) (Upload, error)

	// Open opens a file for reading, until ctx ends.
	Open(ctx context.Context, name string) (Object, error)

	// Stat looks at a file or directory. Where directories are not kept, a name
	// with files below it is one.
	Stat(ctx context.Context, name string) (Info, error)

	// List is the names in a directory, without the directory's own, in any
	// order; "" is that of the backend. It may have those of uploads, which end
	// in [Partial]. A directory that is not there is [fs.ErrNotExist], or empty
	// where directories are not kept.
	List(ctx context.Context, dir string) ([]string, error)

	// Remove removes a file or an empty directory. One that is not there is
	// success.
	Remove(ctx context.Context, name string) error

	// Link gives a file a second name, so that removing the first leaves its
	// bytes. A name that is taken is [fs.ErrExist], or replaced at once. Where there are no links it
	// is [errors.ErrUnsupported], and the caller copies.
	Link(ctx context.Context, from, to string, mode Mode) error

	// Sync makes durable what names were made and removed in a directory.
	Sync(ctx context.Context, dir string) error

	// Usage is the room that is left, [errors.ErrUnsupported] where nobody
	// knows.
	Usage(ctx context.Context) (Usage, error)
}

// Partial ends the names of files that are being written, which begin with the
// name that they are to have. They are never read. One that was left by a crash
// stays until it is removed, as its directory is.
const Partial = ".tmp"

// Mode says what is done about a name that is taken.
type Mode int

// The modes.
const (
	Replace   Mode = iota // it is given to the new file, at once
	Exclusive             // [fs.ErrExist], from Commit or Link
)

// Upload is a file that is being written.
type Upload interface {
	// WriteAt writes p at off: all of a file at once, or pieces of it, each
	// once, in any order, and as many at the same time as Depth says with
	// profit. A piece begins at a multiple of Piece and has so many bytes, but
	// for the last. p is fastest from [Buffer]. It is not changed, and not
	// kept.
	WriteAt(p []byte, off int64) (int, error)

	// Piece is the size of the writes that suit the backend, in bytes: the part
	// of an upload in parts. It is a multiple of Align.
	Piece() int

	// Reserved reports whether the room for all of its bytes is taken already,
	// so that Usage does not count it as free.
	Reserved() bool

	// Depth is how many writes at a time the backend can use.
	Depth() int

	// Commit makes the bytes durable, all of which were written, and gives the
	// file its name. After an error the upload is as after Abort.
	Commit(ctx context.Context) error

	// Abort gives the upload up. After Commit or Abort it does nothing.
	Abort()
}

// Object is an open file.
type Object interface {
	io.ReaderAt
	io.Closer
	// Stat is of what was opened, whatever has its name by now.
	Stat() (Info, error)
}

// Info is what is known of a file without reading it.
type Info struct {
	Size     int64 // in bytes
	Modified time.Time
	Dir      bool
	Links    uint64 // names that it has; 0 where nobody knows
	ID       FileID // zero where nobody knows
}

// FileID tells files apart that have several names.
type FileID struct{ Device, Inode uint64 }

// Usage is the room on a disk, in bytes.
type Usage struct {
	Free uint64 // that this process may still write
	Size uint64 // that and what is used
}

// Share is percent of the size.
func (u Usage) Share(percent uint64) uint64 { return u.Size / 100 * percent }

// Validate reports a name that is none, or that could lead out of the backend.
func Validate(name string) error {
	if !fs.ValidPath(name) || name == "." || strings.ContainsRune(name, 0) {
		return errors.New("backend: name " + quote(name) + " is not a clean relative path")
	}
	return nil
}

// Align is the number of bytes of which offset, length and address of a write
// are best multiples: a page, which is also what disks ask of writes that go
// past the page cache.
const Align = 4096

// Buffer is memory of size bytes that begins at a multiple of [Align].
func Buffer(size int) []byte {
	b := make([]byte, size+Align)
	at := 0
	if over := address(b) % Align; over != 0 {
		at = Align - int(over)
	}
	return b[at : at+size : at+size]
}

// Aligned reports whether p begins at a multiple of [Align], and is written to
// one.
func Aligned(p []byte, off int64) bool {
	return len(p) > 0 && off%Align == 0 && address(p)%Align == 0
}

// address is where p lies. The collector does not move what it is asked of.
func address(p []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(p))) }

func quote(name string) string { return fmt.Sprintf("%.200q", name) }
