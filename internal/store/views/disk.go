package views

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// DamageError reports damage of the views alone: the log may be intact.
type DamageError struct{ error }

// Unwrap returns the damage.
func (e DamageError) Unwrap() error { return e.error }

// openDisk opens the views on disk. An error is a [DamageError], unless the machine lacks resources or
// the file system fails, which is [viewdb.ErrFailed].
func (o Options) openDisk(ctx context.Context) (*viewdb.DB, error) {
	db, err := viewdb.OpenContext(ctx, o.Dir, viewdb.Options{FS: onDisk(o.FS, o.Dir), Store: o.Store, Logger: o.Logger, Patience: patienceOf(filepath.Dir(o.Dir), time.Now())})
	if err == nil || ctx.Err() != nil || errors.Is(err, viewdb.ErrFailed) {
		return db, err
	}
	for _, lack := range []error{
		syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.ENOSPC, syscall.EDQUOT, syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.EAGAIN,
	} {
		if errors.Is(err, lack) {
			return nil, err
		}
	}
	return nil, DamageError{err}
}

// probeSize is the number of bytes that a failed directory must accept before it is used again.
const probeSize = 1 << 20

// probe writes to the file system of the views and returns an error if that fails. If the file
// system does not answer, a goroutine stays until it does.
func (v *Views) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		f, err := os.CreateTemp(filepath.Dir(v.o.Dir), durable.TempPrefix+"probe-*")
		if info, missing := os.Lstat(v.o.Dir); missing == nil && info.IsDir() {
			if err == nil {
				err = errors.Join(f.Close(), os.Remove(f.Name()))
			}
			if err == nil {
				f, err = os.CreateTemp(v.o.Dir, "probe-*")
			}
		}
		if err != nil {
			ended <- err
			return
		}
		_, err = f.Write(make([]byte, probeSize))
		ended <- errors.Join(err, f.Sync(), f.Close(), os.Remove(f.Name()))
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return fmt.Errorf("probe %s: %w", v.o.Dir, ctx.Err())
	}
}

// plainFS is the filesystem of views. It checks them before a database opens their files, since
// the database would follow symbolic links and wait for pipes. The check is part of the database's
// first call, so that a disk that does not answer is treated as in any other call.
type plainFS struct {
	vfs.FS
	dir string
}

// onDisk returns the filesystem of the views in a directory. If files is nil, it uses the machine's.
func onDisk(files vfs.FS, dir string) vfs.FS {
	if files == nil {
		files = vfs.Default
	}
	return plainFS{files, dir}
}

// MkdirAll implements [vfs.FS].
func (p plainFS) MkdirAll(dir string, perm os.FileMode) error {
	if err := beneath.At(filepath.Dir(p.dir)).Plain(p.dir); err != nil {
		return err
	}
	return p.FS.MkdirAll(dir, perm)
}

// Unwrap implements [vfs.FS].
func (p plainFS) Unwrap() vfs.FS { return p.FS }

// An owner whose views fail records this in the store's directory, so that the next owner waits less
// long for a file system that does not answer: when several jobs end at once, each of them may own
// the store in turn.
const (
	failedName = "views.failed"
	// shortPatience is the patience for the views after an owner's failure. A working file
	// system answers within it.
	shortPatience = 2 * time.Second
)

// failure is the content of that file.
type failure struct {
	At    time.Time `json:"at"`
	Cause string    `json:"cause"`
}

// noteFailed writes the file, best effort.
func (o Options) noteFailed(cause error) {
	if o.ReadOnly {
		return
	}
	text, err := json.Marshal(failure{At: time.Now().UTC(), Cause: cause.Error()})
	if err == nil {
		err = durable.Write(filepath.Join(filepath.Dir(o.Dir), failedName), append(text, '\n'))
	}
	if err != nil {
		o.Logger.Debug("failure of the views not recorded for the next owner", "error", err)
	}
}

// noteWorks removes the file.
func (o Options) noteWorks() {
	if o.ReadOnly {
		return
	}
	if err := os.Remove(filepath.Join(filepath.Dir(o.Dir), failedName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		o.Logger.Debug("record of failed views not removed", "error", err)
	}
}

// patienceOf returns how long one operation of the views may take: 0 for the default, or less if
// an owner's views failed recently.
func patienceOf(dir string, now time.Time) time.Duration {
	info, err := os.Lstat(filepath.Join(dir, failedName))
	if err != nil || !info.Mode().IsRegular() {
		return 0
	}
	if age := now.Sub(info.ModTime()); age < 0 || age > Retry {
		return 0
	}
	return shortPatience
}
