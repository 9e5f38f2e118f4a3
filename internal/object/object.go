// Package object defines the interface between the data plane and the backend that keeps its
// files: a directory, or a bucket. It is small enough that an object store can implement all
// of it, and precise enough that a filesystem keeps its speed.
//
//	name     a slash-separated path below the backend's own place, as
//	         "run/main/step-100.a1/r00003.idx"; no part is empty, "." or ".."
//	file     bytes that appear under a name atomically, whole, and never change
//	upload   a file that is being written; readers do not see it
//	link     a second name of a file, where the backend supports links
//
// There is no rename and no append: an upload is committed under its name, or never existed.
// A name becomes durable in two steps, since a filesystem has two:
//
//	Create ─▶ WriteAt* ─▶ Commit            Sync(directory)
//	          in any order  bytes durable,   names durable
//	                        name visible
//
// An object store does both in Commit, and nothing in Sync. Package objecttest tests every
// implementation against this page.
package object

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"runtime/debug"
	"strings"
	"time"
	"unsafe"
)

// Backend keeps files by name. Its methods may be called concurrently, also by several
// processes. They return when ctx ends, except from a system call that cannot be interrupted.
// A missing file is an error with [fs.ErrNotExist].
type Backend interface {
	// Path returns the name of a file for users: the path, or the URL.
	Path(name string) string

	// MakeDir makes a directory with its parents. Files can be created in it from then on; on
	// return its name is durable.
	MakeDir(ctx context.Context, dir string) error

	// Create begins a file of size bytes, whose writes end with ctx. Too little space is an
	// error with syscall.ENOSPC or EDQUOT, returned by Create, before anything is written, if
	// it can be known then. Concurrent uploads of one name, also from several processes, are
	// independent: the name always has all bytes of exactly one of them.
	Create(ctx context.Context, name string, size int64, mode Mode) (Upload, error)

	// Open opens a file for reading, until ctx ends. Where opening costs a request, a missing
	// file may be an error of the first read instead.
	Open(ctx context.Context, name string) (Object, error)

	// Get returns all bytes of a small file, in one request where requests count. A file of
	// more than most bytes is [ErrTooLarge].
	Get(ctx context.Context, name string, most int64) ([]byte, error)

	// Stat returns the Info of a file or directory. Where directories are not kept, a name
	// with files below it is one.
	Stat(ctx context.Context, name string) (Info, error)

	// List returns what is in a directory, in any order; "" is the backend's root. The result
	// may include uploads, whose names end in [Partial]. A missing directory is
	// [fs.ErrNotExist], or empty where directories are not kept.
	List(ctx context.Context, dir string) ([]Entry, error)

	// Remove removes files and empty directories, in any order, in as few requests as
	// possible. A missing one is success. After an error some may be left.
	Remove(ctx context.Context, names ...string) error

	// Link gives a file a second name, so that removing the first leaves its bytes. An
	// existing name is [fs.ErrExist], or replaced atomically, according to mode. Where links
	// are not supported, the error is [errors.ErrUnsupported], and the caller copies.
	Link(ctx context.Context, from, to string, mode Mode) error

	// Sync makes the creation and removal of names in a directory durable.
	Sync(ctx context.Context, dir string) error

	// Usage returns the remaining space, or [errors.ErrUnsupported] where it is unknown.
	Usage(ctx context.Context) (Usage, error)

	// Reading returns how files are read best.
	Reading() Reading
}

// Reading is how the files of a backend are read best.
type Reading struct {
	Span  int64 // bytes of one read: a read of fewer takes as long; 0: reads of any size cost the same
	Depth int   // reads at the same time; 0: as many as there are cores
}

// ErrChanged reports bytes that arrived other than they were summed.
var ErrChanged = errors.New("bytes changed after they were digested")

// ErrTooLarge reports a file that is larger than the caller of Get expects.
var ErrTooLarge = errors.New("the file is larger than any of its kind")

// Partial ends the names of files that are being written, which begin with their final name.
// They are never read. A file that was left by a crash stays until it, or its directory, is
// removed.
const Partial = ".tmp"

// Mode selects what happens to an existing name.
type Mode int

// The modes.
const (
	Replace   Mode = iota // the new file takes it over, atomically
	Exclusive             // [fs.ErrExist], from Commit or Link
)

// Upload is a file that is being written.
type Upload interface {
	// WriteAt writes p at off: all of a file in one call, or pieces of it, each once, in any
	// order, with up to Depth useful calls at the same time. A piece begins at a multiple of
	// Piece and has that many bytes, except the last. p is fastest if it comes from [Buffer].
	// WriteAt does not change or keep it.
	WriteAt(p []byte, off int64) (int, error)

	// Piece returns the backend's preferred size of writes, in bytes: the part size of a
	// multipart upload. It is a multiple of Align.
	Piece() int

	// Reserved reports whether the space for all of the file's bytes is allocated already, so
	// that Usage does not count it as free.
	Reserved() bool

	// Depth returns the number of concurrent writes that the backend can use.
	Depth() int

	// Commit makes the bytes durable and gives the file its name. All bytes were written.
	// After an error the upload is in the same state as after Abort.
	Commit(ctx context.Context) error

	// Abort abandons the upload. After Commit or Abort it does nothing.
	Abort()
}

// Gatherer is an [Upload] that sends pieces from where they lie.
type Gatherer interface {
	// WriteFrom is WriteAt for a piece in several runs of memory, which stay as they are until
	// Commit or Abort returns. sum is the CRC-32C of the piece. A backend that can compares it
	// with the bytes that arrive, so that a byte which changes after it was summed is an error.
	WriteFrom(p [][]byte, off int64, sum uint32) error
	// GatherDepth returns the number of concurrent calls of WriteFrom that the backend can
	// use: more than Depth, because the pieces need no memory of their own.
	GatherDepth() int
}

// Unfinished names an upload at a server, which keeps its pieces after the process that began
// it has died.
type Unfinished struct {
	ID    string // of the upload, the server's
	Token string // that the file will carry, by which its upload is recognized
	Piece int64  // bytes of a piece
}

// Outliving is an [Upload] that may become [Unfinished].
type Outliving interface {
	// OnBegin has use called before the first piece is sent, unless the file is sent in one
	// request. If use fails, so does the write.
	OnBegin(use func(ctx context.Context, as Unfinished) error)
}

// Resumer is a [Backend] with unfinished uploads.
type Resumer interface {
	// Resume is Create for a file whose pieces an earlier process has sent in part. A piece that the
	// server has with the same size and sum is not sent again. Pieces have the size of the
	// earlier ones. If the earlier process died after the server had committed its upload, no
	// piece is sent. If the upload is gone or cannot be continued, a new one begins.
	Resume(ctx context.Context, name string, size int64, mode Mode, earlier Unfinished) (Upload, error)

	// Discard removes what the server has of an upload. If there is none, that is success.
	Discard(ctx context.Context, name string, upload Unfinished) error

	// Uploads calls use with each unfinished upload below a directory. Of an upload it gives the
	// ID only. Some servers list none.
	Uploads(ctx context.Context, dir string, use func(name string, upload Unfinished)) error
}

// Versioned is a [Backend] that may keep the bytes of files that were replaced or removed, as
// versions of these files. Its Remove removes all versions of a file. A version that the server
// keeps stays as it is, and Remove returns a [*LockedError] once it has removed the others. A file
// that had no name before Remove has none after it.
type Versioned interface {
	// ListAll is List with all that takes space: the size of a file is that of its versions, and
	// removed files with versions that are left are there too.
	ListAll(ctx context.Context, dir string) ([]Entry, error)

	// Hide frees the names of files, whose bytes may stay as versions.
	Hide(ctx context.Context, names ...string) error

	// Locked returns a [*LockedError] if the server keeps versions of files until a time.
	Locked(ctx context.Context, names ...string) error

	// Unfreed returns why Remove frees no space, or nil if it does. Before the first Remove it
	// may return nil in spite of a permission that is missing.
	Unfreed(ctx context.Context) (why, err error)

	// Refresh forgets what the server has told of its rules and permissions, which may have
	// changed: the next call asks again.
	Refresh()
}

// LockedError reports versions of files that the server keeps.
type LockedError struct {
	Versions int       // how many
	Bytes    int64     // of them
	Until    time.Time // when the last can be removed; zero if none has a time
	Hold     bool      // some stay until the owner of the bucket ends their legal hold
	Refused  error     // why some stay that no known lock keeps
}

// Add adds what another error reports.
func (e *LockedError) Add(o *LockedError) {
	e.Versions += o.Versions
	e.Bytes += o.Bytes
	e.Hold = e.Hold || o.Hold
	if o.Until.After(e.Until) {
		e.Until = o.Until
	}
	if e.Refused == nil {
		e.Refused = o.Refused
	}
}

// Error names the time.
func (e *LockedError) Error() string {
	var parts []string
	if !e.Until.IsZero() {
		parts = append(parts, "locked until "+e.Until.UTC().Format(time.RFC3339))
	}
	switch {
	case e.Hold && len(parts) > 0:
		parts = append(parts, "and by a legal hold of the bucket")
	case e.Hold:
		parts = append(parts, "locked by a legal hold of the bucket")
	}
	if e.Refused != nil {
		parts = append(parts, "the server refuses the removal: "+e.Refused.Error())
	}
	return strings.Join(parts, ", ")
}

// Object is an open file. It never has bytes of two files: once its name belongs to another
// file, or to none, reads return the bytes of the file that was opened, or an error.
type Object interface {
	io.ReaderAt
	io.Closer
	// Stat describes the file that was opened.
	Stat() (Info, error)
}

// Ranger is an [Object] whose every ReadAt is a request to another machine. Its bytes are
// read as streams.
type Ranger interface {
	// ReadRange returns the n bytes from off on, as they arrive. Where the file ends before,
	// the stream ends with [io.ErrUnexpectedEOF].
	ReadRange(off, n int64) (io.ReadCloser, error)
}

// Entry is a name in a directory.
type Entry struct {
	Name string // without the directory's own
	Info *Info  // nil where a listing does not know it: Stat does
}

// Names returns the names of entries.
func Names(entries []Entry) []string {
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name
	}
	return names
}

// Info describes a file without reading it.
type Info struct {
	Size     int64 // in bytes
	Modified time.Time
	Dir      bool
	Links    uint64 // number of names; 0 where unknown
	ID       string // the same for all names of a file, and of no other; empty where unknown

	// Sum is the CRC-32C of all bytes if Attested: a server compared it with the bytes that
	// arrived, and keeps it.
	Sum      uint32
	Attested bool
}

// Usage is the space on a disk, in bytes.
type Usage struct {
	Free uint64 // available to this process
	Size uint64 // Free and the used bytes
}

// Share returns percent of the size.
func (u Usage) Share(percent uint64) uint64 { return u.Size / 100 * percent }

// Validate returns an error for an invalid name, or a name that leads out of the backend.
func Validate(name string) error {
	if !fs.ValidPath(name) || name == "." || strings.ContainsRune(name, 0) {
		return errors.New("backend: name " + quote(name) + " is not a clean relative path")
	}
	return nil
}

// Align is the number of bytes that should divide a write's offset, length and address: a page, which is also what disks require of writes past the page cache.
const Align = 4096

// Buffer returns memory of size bytes that begins at a multiple of [Align].
func Buffer(size int) []byte {
	b := make([]byte, size+Align)
	at := 0
	if over := address(b) % Align; over != 0 {
		at = Align - int(over)
	}
	return b[at : at+size : at+size]
}

// Aligned reports whether p begins at a multiple of [Align], and is written to a multiple of
// it.
func Aligned(p []byte, off int64) bool {
	return len(p) > 0 && off%Align == 0 && address(p)%Align == 0
}

// address returns the address of p. The garbage collector does not move heap memory.
func address(p []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(p))) }

// ErrUnreadable reports memory of a caller that cannot be read.
var ErrUnreadable = errors.New("memory of the file cannot be read: it was truncated, or its disk fails")

// Readable runs use, which reads mapped memory. It reports false if that memory is not
// available, because its file was truncated, or a disk or full shared memory does not provide
// it: use is then incomplete.
func Readable(use func()) (ok bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch fault := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			ok = false
		default:
			panic(fault)
		}
	}()
	use()
	return true
}

func quote(name string) string { return fmt.Sprintf("%.200q", name) }
