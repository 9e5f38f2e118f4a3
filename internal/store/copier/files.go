// Package copier copies the files of a store, for its backup and for a store that is made from
// one. A file has its name in the copy only once its bytes are durable there, so a copy that is
// interrupted is finished by the same calls.
//
//	files.go        single files and trees: hard links stay hard links
//	checkpoints.go  checkpoints of a store that is in use: each copy is checked, and those that
//	                vanish or are incomplete are listed
package copier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/durable"
)

// ErrVanished reports that files were removed during their copy.
var ErrVanished = errors.New("its files are gone")

// Files copies files that are not written to any more. A copy gets its name once its
// bytes are durable, and the time of the original, by which a second run finds finished
// copies. Originals that are hard links of each other become hard links of each other.
// Its methods may be called concurrently.
type Files struct {
	from, to beneath.Root // follow no symbolic link

	link bool        // hard-link the originals of checkpoints instead
	tell func(int64) // called with bytes done; may be nil

	mu     sync.Mutex
	copies map[fileKey]*copied
	sum    Sum
}

// Sum counts the work of a [Files].
type Sum struct {
	Files  int   `json:"files"`
	Bytes  int64 `json:"bytes"`  // written or shared by the filesystem
	Linked int   `json:"linked"` // files that only got another name
	Kept   int   `json:"kept"`   // files that existed already
}

// fileKey identifies a file with several names. An inode number may be reused after a
// removal; size and time detect that.
type fileKey struct {
	device, inode  uint64
	size, modified int64
}

// copied locates the copy of a file with several names.
type copied struct {
	mu   sync.Mutex
	path string
}

// New returns a copier from the directory of one store or backup to that of another. With link,
// the files of checkpoints are hard-linked instead of copied. tell, which may be nil, is called
// with bytes done.
func New(from, to string, link bool, tell func(int64)) *Files {
	if tell == nil {
		tell = func(int64) {}
	}
	return &Files{from: beneath.At(from), to: beneath.At(to), link: link, tell: tell, copies: map[fileKey]*copied{}}
}

// Sum returns what was done so far.
func (c *Files) Sum() Sum {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sum
}

// count adds to the sum.
func (c *Files) count(add func(*Sum)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	add(&c.sum)
}

// checkpoint copies the directory of a checkpoint, its receipt last. It returns
// [ErrVanished] if files disappear meanwhile.
func (c *Files) checkpoint(ctx context.Context, from, to string) error {
	entries, err := c.from.ReadDir(from)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", ErrVanished, err)
	}
	if err == nil {
		err = c.to.MkdirAll(to, 0o700)
	}
	if err != nil {
		return err
	}
	receipt := false
	for _, e := range entries {
		switch name := e.Name(); {
		case strings.HasSuffix(name, partialSuffix):
		case name == checkpoint.ReceiptFile:
			receipt = true
		default:
			if err := c.place(ctx, filepath.Join(from, name), filepath.Join(to, name), c.link); err != nil {
				return err
			}
		}
	}
	if err := c.to.SyncDir(to); err != nil || !receipt {
		return err
	}
	if err := c.place(ctx, filepath.Join(from, checkpoint.ReceiptFile), filepath.Join(to, checkpoint.ReceiptFile), c.link); err != nil {
		return err
	}
	return c.to.SyncDir(to)
}

// partialSuffix ends the name of a file that is being written: see package data.
const partialSuffix = ".tmp"

// Tree copies all files below a directory except those that are being written. A
// missing directory is empty.
func (c *Files) Tree(ctx context.Context, from, to string) error {
	entries, err := c.from.ReadDir(from)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = c.to.MkdirAll(to, 0o700)
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		source, target := filepath.Join(from, e.Name()), filepath.Join(to, e.Name())
		switch {
		case strings.HasPrefix(e.Name(), durable.TempPrefix), strings.HasSuffix(e.Name(), partialSuffix):
			continue
		case e.IsDir():
			err = c.Tree(ctx, source, target)
		default:
			err = c.File(ctx, source, target)
		}
		if err != nil {
			return err
		}
	}
	return c.to.SyncDir(to)
}

// File copies one file. It never links, so that damage to the store's log does not
// reach that of its backup.
func (c *Files) File(ctx context.Context, from, to string) error {
	return c.place(ctx, from, to, false)
}

// place copies one file, or links it.
func (c *Files) place(ctx context.Context, from, to string, link bool) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	in, err := c.from.Open(from)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", ErrVanished, err)
	}
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	defer func() { _ = in.Close() }() // opened for reading only
	info, err := in.Stat()
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("copy %s: this system does not report how many names a file has", from)
	}
	there, err := c.to.Lstat(to)
	same := err == nil && there.Mode().IsRegular() && there.Size() == info.Size() && there.ModTime().Equal(info.ModTime())
	if st.Nlink > 1 && !link {
		l := c.copyOf(fileKey{st.Dev, st.Ino, info.Size(), info.ModTime().UnixNano()})
		l.mu.Lock()
		defer l.mu.Unlock()
		if !same && l.path != "" {
			err := c.relink(c.to, l.path, to)
			if err == nil {
				c.tell(info.Size())
				c.count(func(s *Sum) { s.Linked++ })
				return nil
			}
			// Its directory may be gone, or it has the maximum number of names.
			if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EMLINK) {
				return err
			}
		}
		defer func() {
			if same {
				l.path = to
			}
		}()
	}
	if same {
		c.tell(info.Size())
		c.count(func(s *Sum) { s.Kept++ })
		return nil
	}
	if link {
		err := c.relink(c.from, from, to)
		if err == nil {
			c.tell(info.Size())
			c.count(func(s *Sum) { s.Linked++ })
			return nil
		}
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: %w", ErrVanished, err)
		}
		if !errors.Is(err, unix.EMLINK) {
			return fmt.Errorf("%w: links need one filesystem and the rights to the files: leave --link out", err)
		}
	}
	if err := c.write(ctx, in, info, to); err != nil {
		return fmt.Errorf("copy %s: %w", from, err)
	}
	same = true
	c.count(func(s *Sum) { s.Files++; s.Bytes += info.Size() })
	return nil
}

func (c *Files) copyOf(key fileKey) *copied {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.copies[key]
	if l == nil {
		l = &copied{}
		c.copies[key] = l
	}
	return l
}

// relink gives a file below root another name among the copies and replaces an
// existing file of that name.
func (c *Files) relink(root beneath.Root, from, to string) error {
	err := root.Link(from, c.to, to)
	if errors.Is(err, fs.ErrExist) {
		if err = c.to.Remove(to); err == nil {
			err = root.Link(from, c.to, to)
		}
	}
	return err
}

// write copies the bytes. Filesystems that can share them do.
func (c *Files) write(ctx context.Context, in *os.File, info fs.FileInfo, to string) (err error) {
	temp := to + partialSuffix
	if err := c.to.RemoveAll(temp); err != nil {
		return err
	}
	out, err := c.to.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, info.Mode().Perm()|0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.to.RemoveAll(temp))
		}
	}()
	if unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) == nil {
		c.tell(info.Size())
	} else {
		err = c.stream(ctx, out, in, info.Size())
	}
	if err == nil {
		err = out.Sync()
	}
	if err = errors.Join(err, out.Close()); err != nil {
		return err
	}
	if err := c.to.Chtimes(temp, info.ModTime()); err != nil {
		return err
	}
	return c.to.Rename(temp, to)
}

// copyPiece is the number of bytes copied between two checks of the context.
const copyPiece = 32 << 20

func (c *Files) stream(ctx context.Context, out, in *os.File, size int64) error {
	for left := size; left > 0; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n, err := io.CopyN(out, in, min(left, copyPiece))
		left -= n
		c.tell(n)
		if err != nil {
			return err // also io.EOF: the file was truncated meanwhile
		}
	}
	return nil
}
