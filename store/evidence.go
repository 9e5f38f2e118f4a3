package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

// The log as it was before a server started over it, when that server may
// rewrite what it cannot read: copyName until the store is open, damagedName
// when it was found to be damaged.
const (
	copyName    = ".log-copy"
	damagedName = "log.damaged"
)

// maxCopy is the size in bytes of the largest log that is copied.
const maxCopy = 64 << 20

// succeed takes the store over from its last owner, and keeps the log as that
// one has left it when it is found to be damaged.
func succeed(ctx context.Context, s *Store, dir string, lock *os.File) (*ownership, error) {
	if err := recovering(dir); err != nil { // since this process looked
		return nil, err
	}
	s.ballast().release()
	if err := s.space.check(keepToOwn); err != nil {
		return nil, fmt.Errorf("own the store %s: %w", dir, err)
	}
	card := filepath.Join(dir, cardName)
	if err := keepLog(s, dir, exists(card)); err != nil {
		s.opts.Logger.Warn("the log is opened without a copy of what its server may change, should it be damaged", "error", err)
	}
	// Who owned the store before is not whom to wait for, or to end.
	if err := removed(card); err != nil {
		return nil, err
	}
	own, err := takeOwnership(ctx, s, dir, lock)
	if err != nil {
		return nil, keepCopy(dir, err)
	}
	if err := os.RemoveAll(filepath.Join(dir, copyName)); err != nil {
		s.opts.Logger.Warn("a copy of the log is left over", "error", err)
	}
	return own, nil
}

// keepLog copies the files aside that the server may rewrite: all of them if it
// will not find them as it left them, because its last owner was killed or its
// index is gone. Then it reads the blocks one by one, cuts off what is damaged,
// and goes on behind it. Otherwise that is the last block alone. A copy from an
// earlier try that did not end is the better one and stays.
func keepLog(s *Store, dir string, killed bool) error {
	to := filepath.Join(dir, copyName)
	if exists(to) || exists(filepath.Join(dir, damagedName)) {
		return nil
	}
	streams, err := filepath.Glob(filepath.Join(dir, "log", "jetstream", "*", "streams", jetlog.Stream))
	if err != nil || len(streams) != 1 {
		return err // what is wrong then, the server says
	}
	from := os.DirFS(streams[0])
	if !killed && exists(filepath.Join(streams[0], "msgs", "index.db")) {
		// Then it compares the last block with the index, and cuts that one.
		if from, err = lastBlock(streams[0]); from == nil || err != nil {
			return err
		}
	}
	size, err := sizeOf(from)
	if err != nil {
		return err
	}
	if size > maxCopy {
		return fmt.Errorf("%s has %d bytes, up to %d are copied", streams[0], size, maxCopy)
	}
	if err := s.space.check(uint64(size) + keepForFacts + keepForEnds); err != nil {
		return err
	}
	// A copy that is cut has another name.
	temp := to + ".tmp"
	err = errors.Join(os.RemoveAll(temp), os.Mkdir(temp, 0o700))
	if err == nil {
		err = os.CopyFS(temp, from)
	}
	if err == nil {
		err = os.Rename(temp, to)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(temp))
	}
	return nil
}

// keepCopy ends what keepLog began when the store could not be opened: if that
// is because it is damaged, the copy gets its lasting name, and the error says
// where it is. After any other error it waits for the next try.
func keepCopy(dir string, why error) error {
	from, to := filepath.Join(dir, copyName), filepath.Join(dir, damagedName)
	if !errors.Is(why, ErrDamaged) || errors.As(why, new(viewsError)) {
		return why
	}
	if exists(from) {
		if err := os.Rename(from, to); err != nil {
			return errors.Join(why, fmt.Errorf("keep the copy of the log: %w", err))
		}
	}
	if exists(to) {
		return fmt.Errorf("%w (the log's files as they were before they were first opened are in %s; remove that when it is no longer needed)", why, to)
	}
	return why
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// lastBlock is the file with a stream's last events; nil when there is none.
func lastBlock(stream string) (fs.FS, error) {
	blocks, err := filepath.Glob(filepath.Join(stream, "msgs", "*.blk"))
	if err != nil || len(blocks) == 0 {
		return nil, err
	}
	// They are named by numbers without zeros in front.
	last := slices.MaxFunc(blocks, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	return only{os.DirFS(stream), path.Join("msgs", filepath.Base(last))}, nil
}

// only is a file system with one file of another.
type only struct {
	fs.FS
	name string
}

// ReadDir implements [fs.ReadDirFS].
func (o only) ReadDir(dir string) ([]fs.DirEntry, error) {
	all, err := fs.ReadDir(o.FS, dir)
	return slices.DeleteFunc(all, func(e fs.DirEntry) bool {
		at := path.Join(dir, e.Name())
		return at != o.name && at != path.Dir(o.name)
	}), err
}

// sizeOf is the bytes of all files.
func sizeOf(files fs.FS) (size int64, err error) {
	err = fs.WalkDir(files, ".", func(_ string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			size += info.Size()
		}
		return err
	})
	return size, err
}
