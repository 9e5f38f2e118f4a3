package store

import (
	"bytes"
	"cmp"
	"context"
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
	"github.com/ckptstore/ckptstore/internal/store/space"
	"github.com/ckptstore/ckptstore/internal/store/views"
)

// A server may rewrite parts of the log that it cannot read, so the log's files are
// copied before it starts: to copyName until the store is open, to damagedName if the
// log turns out to be damaged, and damagedName-2 the second time:
//
//	STORE/log.damaged/   files of the stream CKPT
//	  msgs/7.blk         its events
//	  NOT-KEPT           names of files that did not fit, one a line
const (
	copyName    = ".log-copy"
	damagedName = "log.damaged"
	notKeptName = "NOT-KEPT"
)

// succeed takes the store over from its last owner.
func succeed(ctx context.Context, s *Store, dir string, lock *hold) (own *ownership, err error) {
	if err := sound(dir); err != nil {
		return nil, fmt.Errorf("own the store %s: %w", dir, err)
	}
	err = guarded(s, dir, func() (err error) {
		own, err = takeOwnership(ctx, s, dir, lock)
		return err
	})
	if err != nil {
		return nil, err
	}
	return own, nil
}

// guarded runs do, which starts a server over the log, under the store's lock. If the log
// turns out to be damaged, it keeps the log as the last owner left it.
func guarded(s *Store, dir string, do func() error) error {
	if err := recovering(dir); err != nil { // may have begun since this process last checked
		return err
	}
	if err := plainLog(dir); err != nil {
		return fmt.Errorf("own the store %s: %w", dir, err)
	}
	s.ballast().Release()
	if err := s.space.Check(space.ToOwn); err != nil {
		return fmt.Errorf("own the store %s: %w", dir, err)
	}
	card := filepath.Join(dir, cardName)
	had, lack := keepLog(s, dir, exists(card), maxCopy)
	if lack != nil {
		s.opts.Logger.Warn("log opened without a complete copy of the files that its server may change", "error", lack)
	}
	// The previous owner is not to be waited for, or ended.
	if err := removed(card); err != nil {
		return err
	}
	if err := do(); err != nil {
		return keepCopy(dir, had, lack, err)
	}
	if err := os.RemoveAll(filepath.Join(dir, copyName)); err != nil {
		s.opts.Logger.Warn("leftover copy of the log not removed", "error", err)
	}
	return nil
}

// keepLog copies the files that the server may rewrite. If the last owner was killed or
// the index is gone, these are all files: the server reads block by block, truncates
// damaged blocks and continues behind them. Otherwise it is the last block alone. A copy
// from an earlier, unfinished try is the better one and stays. If evidence that already
// has all of it exists, keepLog returns its name as had and copies nothing. It returns an
// error if files could not be copied.
func keepLog(s *Store, dir string, killed bool, limit int64) (had string, err error) {
	to := filepath.Join(dir, copyName)
	if exists(to) {
		return "", notKept(to)
	}
	streams, err := streamsOf(filepath.Join(dir, "log"))
	if err != nil || len(streams) != 1 {
		return "", err // the server reports the cause
	}
	// With an index the server compares the last block with it, and truncates that block.
	c := copying{root: beneath.At(dir), from: streams[0], to: to, all: killed || !exists(filepath.Join(streams[0], "msgs", "index.db")), limit: limit, space: s.space}
	if err := c.list(); err != nil || len(c.blocks) == 0 {
		return "", err
	}
	for _, had := range slices.Backward(incidents(dir)) {
		if same, err := c.within(had); same || err != nil {
			return had, err
		}
	}
	return "", c.run()
}

// incidents returns the kept logs that were damaged, the oldest first.
func incidents(dir string) (found []string) {
	for path := filepath.Join(dir, damagedName); exists(path); path = nextIncident(dir, len(found)) {
		found = append(found, path)
	}
	return found
}

// nextIncident returns the name of the incident after number n.
func nextIncident(dir string, n int) string {
	if n == 0 {
		return filepath.Join(dir, damagedName)
	}
	return filepath.Join(dir, fmt.Sprintf("%s-%d", damagedName, n+1))
}

// keepCopy finishes the work of keepLog after the store could not be opened. If the store
// is damaged, it gives the copy its lasting name, and the error names the copy and what it
// lacks. After any other error the copy stays for the next try.
func keepCopy(dir, had string, lack, why error) error {
	from := filepath.Join(dir, copyName)
	if !errors.Is(why, ErrDamaged) || errors.As(why, new(views.DamageError)) {
		return why
	}
	if exists(from) {
		had = nextIncident(dir, len(incidents(dir)))
		if err := os.Rename(from, had); err != nil {
			return errors.Join(why, fmt.Errorf("keep the copy of the log: %w", err))
		}
		lack = notKept(had)
	}
	switch {
	case had != "" && lack != nil:
		return fmt.Errorf("%w (some of the log's original files are in %s; %v)", why, had, lack) //nolint:errorlint // not the cause
	case had != "":
		return fmt.Errorf("%w (the log's original files are in %s; remove that directory when it is no longer needed)", why, had)
	case lack != nil:
		return fmt.Errorf("%w (there is no copy of the log's original files: %v)", why, lack) //nolint:errorlint // as above
	}
	return why
}

// notKept returns an error if a copy is incomplete, else nil.
func notKept(dir string) error {
	text, err := beneath.At(filepath.Dir(dir)).ReadFile(filepath.Join(dir, notKeptName))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	names := strings.Fields(string(text))
	if err != nil || len(names) == 0 {
		return fmt.Errorf("the list of files missing from the copy %s of the log cannot be read: %w", dir, err)
	}
	return fmt.Errorf("there was no room, or no time, for a copy of %d more files, %s to %s, which the log's server may have changed", len(names), names[len(names)-1], names[0])
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// maxCopy limits the bytes of a log that are copied, since the store has no owner meanwhile. It does
// not apply to a filesystem that shares blocks between files, which writes none.
const maxCopy = 64 << 20

// copying is a copy of a stream's files, or of its last block.
type copying struct {
	root     beneath.Root // no link is followed below it
	from, to string
	all      bool
	limit    int64
	space    *space.Gauge

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
	// The names are numbers without leading zeros.
	slices.SortFunc(c.blocks, func(a, b string) int { return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(b, a)) })
	if !c.all && len(c.blocks) > 0 {
		c.blocks, c.others = c.blocks[:1], nil
	}
	return err
}

// within reports whether an earlier copy has everything that this one would have: its blocks
// are those here, or begin with them, because a server has truncated these since.
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

// run copies the last block, then the files that are not blocks, then the older blocks as far
// as there is room. Without room for the last block nothing is copied.
func (c *copying) run() (err error) {
	u, err := c.space.Look()
	if err != nil {
		return err
	}
	left := min(c.limit, max(0, int64(min(u.Free, 1<<62))-space.ForFacts-space.ForEnds)) //nolint:gosec // below 1<<62
	// An interrupted copy has another name.
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
			// The last block is the most likely to be truncated: it may use the room for facts.
			if err := c.space.Check(uint64(size) + space.ToOwn); err != nil { //nolint:gosec // a file's size
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

// directories makes the directories of the stream, including empty ones.
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

// between returns false if the filesystem does not support do.
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
