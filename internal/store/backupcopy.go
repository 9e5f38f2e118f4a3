package store

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

// errVanished says that files of a checkpoint were removed while it was copied.
var errVanished = errors.New("its files are gone")

// copier copies files that are never written to again. A copy gets its name when its
// bytes are durable, and the time of the original, by which a second run knows what
// is there. Hard links among the originals are hard links among the copies. Its
// methods may be called concurrently.
type copier struct {
	from, to beneath.Root // no symbolic link is followed below either

	link bool        // hard-link the originals of checkpoints instead
	tell func(int64) // told of bytes that are done; nil: nobody

	mu     sync.Mutex
	copies map[fileKey]*copied
	sum    copySum
}

// copySum counts what a copier did.
type copySum struct {
	Files  int   `json:"files"`
	Bytes  int64 `json:"bytes"`  // written or shared by the filesystem
	Linked int   `json:"linked"` // files that got another name only
	Kept   int   `json:"kept"`   // files that were there already
}

// fileKey tells files with several names apart. An inode's number may be given to
// another file when it is removed: size and time tell that one apart.
type fileKey struct {
	device, inode  uint64
	size, modified int64
}

// copied is where the copy of a file with several names is.
type copied struct {
	mu   sync.Mutex
	path string
}

// newCopier copies from one directory of a store or backup to another.
func newCopier(from, to string, link bool, tell func(int64)) *copier {
	if tell == nil {
		tell = func(int64) {}
	}
	return &copier{from: beneath.At(from), to: beneath.At(to), link: link, tell: tell, copies: map[fileKey]*copied{}}
}

// count adds to the sum.
func (c *copier) count(add func(*copySum)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	add(&c.sum)
}

// checkpoint copies the directory of a checkpoint, its receipt last. It is
// [errVanished] if a file or all of it goes away meanwhile.
func (c *copier) checkpoint(ctx context.Context, from, to string) error {
	entries, err := c.from.ReadDir(from)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", errVanished, err)
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

// tree copies all files below a directory, but those that are being written. A
// directory that is not there has none.
func (c *copier) tree(ctx context.Context, from, to string) error {
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
			err = c.tree(ctx, source, target)
		default:
			err = c.file(ctx, source, target)
		}
		if err != nil {
			return err
		}
	}
	return c.to.SyncDir(to)
}

// file copies one file: never by a link, so that the log of a store and that of its
// backup are not damaged together.
func (c *copier) file(ctx context.Context, from, to string) error {
	return c.place(ctx, from, to, false)
}

// place copies one file, or gives it another name.
func (c *copier) place(ctx context.Context, from, to string, link bool) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	in, err := c.from.Open(from)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", errVanished, err)
	}
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	defer func() { _ = in.Close() }() // it was only read
	info, err := in.Stat()
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("copy %s: this system does not say how many names a file has", from)
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
				c.count(func(s *copySum) { s.Linked++ })
				return nil
			}
			// Its directory may be gone, or it has all the names that it may have.
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
		c.count(func(s *copySum) { s.Kept++ })
		return nil
	}
	if link {
		err := c.relink(c.from, from, to)
		if err == nil {
			c.tell(info.Size())
			c.count(func(s *copySum) { s.Linked++ })
			return nil
		}
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: %w", errVanished, err)
		}
		if !errors.Is(err, unix.EMLINK) {
			return fmt.Errorf("%w: links need one filesystem and the rights to the files: leave --link out", err)
		}
	}
	if err := c.write(ctx, in, info, to); err != nil {
		return fmt.Errorf("copy %s: %w", from, err)
	}
	same = true
	c.count(func(s *copySum) { s.Files++; s.Bytes += info.Size() })
	return nil
}

func (c *copier) copyOf(key fileKey) *copied {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.copies[key]
	if l == nil {
		l = &copied{}
		c.copies[key] = l
	}
	return l
}

// relink gives a file below root another name among the copies, in the place of
// what has it.
func (c *copier) relink(root beneath.Root, from, to string) error {
	err := root.Link(from, c.to, to)
	if errors.Is(err, fs.ErrExist) {
		if err = c.to.Remove(to); err == nil {
			err = root.Link(from, c.to, to)
		}
	}
	return err
}

// write copies the bytes: the filesystem shares them where it can.
func (c *copier) write(ctx context.Context, in *os.File, info fs.FileInfo, to string) (err error) {
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

// copyPiece is how many bytes are copied between two looks at the context.
const copyPiece = 32 << 20

func (c *copier) stream(ctx context.Context, out, in *os.File, size int64) error {
	for left := size; left > 0; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n, err := io.CopyN(out, in, min(left, copyPiece))
		left -= n
		c.tell(n)
		if err != nil {
			return err // also io.EOF: it was cut meanwhile
		}
	}
	return nil
}
