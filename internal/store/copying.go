package store

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/share"
)

// maxCopy is how many bytes of a log are copied at most: while they are, the
// store has no owner. A filesystem that shares blocks between files copies any
// number: it writes none.
const maxCopy = 64 << 20

// copying is a copy of a stream's files, or of its last block.
type copying struct {
	root     beneath.Root // no link is followed below it
	from, to string
	all      bool
	limit    int64
	space    *gauge

	blocks []string // paths below from, the newest first
	others []string
}

// list finds the files.
func (c *copying) list() error {
	err := c.root.WalkDir(c.from, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		name, err := filepath.Rel(c.from, path)
		if filepath.Dir(name) == "msgs" && filepath.Ext(name) == ".blk" {
			c.blocks = append(c.blocks, name)
		} else {
			c.others = append(c.others, name)
		}
		return err
	})
	// They are named by numbers without zeros in front.
	slices.SortFunc(c.blocks, func(a, b string) int { return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(b, a)) })
	if !c.all && len(c.blocks) > 0 {
		c.blocks, c.others = c.blocks[:1], nil
	}
	return err
}

// within reports whether an earlier copy has all that this one would: its blocks
// are those here, or begin with them, because a server has cut these since.
func (c *copying) within(dir string) (bool, error) {
	names := c.blocks
	if slices.Contains(c.others, "meta.inf") {
		names = append(slices.Clone(names), "meta.inf")
	}
	for _, name := range names {
		same, err := c.beginsWith(filepath.Join(dir, name), filepath.Join(c.from, name))
		if !same || err != nil {
			return false, err
		}
	}
	return true, nil
}

// beginsWith reports whether the file at long begins with that at short.
func (c *copying) beginsWith(long, short string) (bool, error) {
	l, err := c.root.Open(long)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = l.Close() }()
	s, err := c.root.Open(short)
	if err != nil {
		return false, err
	}
	defer func() { _ = s.Close() }()
	a, b := make([]byte, 1<<16), make([]byte, 1<<16)
	for {
		n, err := io.ReadFull(s, b)
		if n > 0 {
			if m, lerr := io.ReadFull(l, a[:n]); lerr != nil && !errors.Is(lerr, io.ErrUnexpectedEOF) && !errors.Is(lerr, io.EOF) {
				return false, lerr
			} else if m < n || !bytes.Equal(a[:n], b[:n]) {
				return false, nil
			}
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return true, nil
		case err != nil:
			return false, err
		}
	}
}

// run copies the last block, then what is no block, then the older blocks as far
// as there is room. Without room for the last block nothing is copied.
func (c *copying) run() (err error) {
	u, err := c.space.look()
	if err != nil {
		return err
	}
	left := min(c.limit, max(0, int64(min(u.Free, 1<<62))-keepForFacts-keepForEnds)) //nolint:gosec // below 1<<62
	// A copy that is cut has another name.
	temp := c.to + ".tmp"
	if err := errors.Join(c.root.RemoveAll(temp), c.root.MkdirAll(temp, 0o700)); err != nil {
		return err
	}
	defer func() {
		if err != nil && !exists(c.to) {
			err = errors.Join(err, c.root.RemoveAll(temp))
		}
	}()
	if c.all {
		if err := c.directories(temp); err != nil {
			return err
		}
	}
	var without []string
	for i, name := range slices.Concat(c.blocks[:1], c.others, c.blocks[1:]) {
		from, to := filepath.Join(c.from, name), filepath.Join(temp, name)
		info, err := c.root.Stat(from)
		if err == nil {
			err = c.root.MkdirAll(filepath.Dir(to), 0o700)
		}
		cloned := false
		if err == nil {
			cloned, err = c.clone(from, to)
		}
		if err != nil {
			return err
		}
		if cloned {
			continue
		}
		size := info.Size()
		if i == 0 {
			// The most likely one to be cut may take of the room of facts.
			if err := c.space.check(uint64(size) + keepToOwn); err != nil { //nolint:gosec // a file's size
				return err
			}
		} else if size > left {
			without = append(without, name)
			continue
		}
		left -= size
		if err := c.copyFile(from, to); err != nil {
			return err
		}
	}
	if len(without) > 0 {
		if err := os.WriteFile(filepath.Join(temp, notKeptName), []byte(strings.Join(without, "\n")+"\n"), 0o600); err != nil {
			return err
		}
	}
	if err := errors.Join(share.Tree(temp, nil), c.root.Rename(temp, c.to)); err != nil {
		return err
	}
	return notKept(c.to)
}

// directories makes those of the stream, also the empty ones.
func (c *copying) directories(to string) error {
	return c.root.WalkDir(c.from, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return err
		}
		name, err := filepath.Rel(c.from, path)
		if err != nil {
			return err
		}
		return c.root.MkdirAll(filepath.Join(to, name), 0o700)
	})
}

// clone lets a new file share the blocks of another, where the filesystem can.
// Otherwise it reports false, and there is no new file.
func (c *copying) clone(from, to string) (bool, error) {
	return c.between(from, to, func(out, in *os.File) error {
		return unix.IoctlFileClone(int(out.Fd()), int(in.Fd()))
	})
}

func (c *copying) copyFile(from, to string) error {
	done, err := c.between(from, to, func(out, in *os.File) error {
		_, err := io.Copy(out, in)
		return err
	})
	if err == nil && !done {
		err = fmt.Errorf("copy %s: %w", from, errors.ErrUnsupported)
	}
	return err
}

// between reports false when do is something that the filesystem cannot do.
func (c *copying) between(from, to string, do func(out, in *os.File) error) (bool, error) {
	in, err := c.root.Open(from)
	if err != nil {
		return false, err
	}
	defer func() { _ = in.Close() }()
	out, err := c.root.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return false, err
	}
	err = errors.Join(do(out, in), out.Close())
	if err == nil {
		return true, nil
	}
	for _, cannot := range []error{unix.EOPNOTSUPP, unix.ENOTTY, unix.EXDEV, unix.EINVAL, unix.ENOSYS, unix.EPERM, errors.ErrUnsupported} {
		if errors.Is(err, cannot) {
			return false, c.root.Remove(to)
		}
	}
	return false, fmt.Errorf("copy %s: %w", from, errors.Join(err, c.root.Remove(to)))
}
