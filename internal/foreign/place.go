package foreign

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/disk"
	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// exportNames are the names that an export gives to files.
var exportNames = regexp.MustCompile(`^(` + strings.Join([]string{
	regexp.QuoteMeta(dcp.MetadataFile), `__\d+_\d+\.distcp`,
	regexp.QuoteMeta(safetensors.SingleFile), regexp.QuoteMeta(safetensors.IndexFile), `model-\d{5,}-of-\d{5,}\.safetensors`,
}, "|") + `)$`)

// OccupiedError reports that the destination of an export is not empty or must not be
// replaced.
type OccupiedError struct {
	Dir    string
	Holds  string // a file in it
	Alien  bool   // whether no export writes such a file
	Source string // a path that a checkpoint is read from and that the export would touch; or empty
}

// Error reports the occupant and the next step.
func (e *OccupiedError) Error() string {
	switch {
	case e.Source != "":
		return fmt.Sprintf("%s is, holds or lies in %s, which a checkpoint is read from; choose another directory", e.Dir, e.Source)
	case e.Alien:
		return fmt.Sprintf("%s holds %q, which no export has written; choose another directory", e.Dir, e.Holds)
	}
	return fmt.Sprintf("%s is not empty (it holds %q); choose another directory, or replace its contents with --force", e.Dir, e.Holds)
}

// ProblemKind returns [problem.Conflict].
func (*OccupiedError) ProblemKind() problem.Kind { return problem.Conflict }

// spare refuses a directory that overlaps the source of the exported checkpoint, and a
// directory with files that any checkpoint of the store is read from.
func (x *exporter) spare() error {
	var paths []string
	roots := []*data.Root{x.o.Keep}
	switch from := x.from.(type) {
	case *data.Foreign:
		paths = append(append(paths, from.Path()), from.Files()...)
	case *data.FileReader:
		paths = append(paths, from.Root().Dir())
		roots = append(roots, from.Root())
	}
	if names, err := x.fs.List(x.dir); err == nil && len(names) > 0 && x.o.Replace {
		for _, r := range roots {
			if r == nil {
				continue
			}
			adopted, err := r.Adopted(x.ctx)
			if err != nil {
				return fmt.Errorf("%w; choose a directory that is empty", err)
			}
			paths = append(paths, adopted...)
		}
	}
	for _, p := range paths {
		full, err := filepath.Abs(p)
		if err == nil {
			full, err = real(x.fs, full)
		}
		if err != nil {
			return err
		}
		if within(x.dir, full) || within(full, x.dir) {
			return &OccupiedError{Dir: x.dir, Source: p}
		}
	}
	return nil
}

// within reports whether a path equals another, or lies below it.
func within(name, dir string) bool { return name == dir || strings.HasPrefix(name, dir+"/") }

// real returns a path without symbolic links, whose end may not exist.
func real(files vfs.FS, name string) (string, error) {
	if vfs.Root(files) != vfs.Default || name == "/" {
		return name, nil // other filesystems have no links
	}
	full, err := filepath.EvalSymlinks(name)
	if !errors.Is(err, fs.ErrNotExist) {
		return full, err
	}
	if _, err := os.Lstat(name); err == nil {
		return "", fmt.Errorf("%s is a dangling symbolic link; remove it, or create its target", name)
	}
	parent, err := real(files, path.Dir(name))
	return path.Join(parent, path.Base(name)), err
}

// look returns an error if the directory at dir must not be replaced.
func (x *exporter) look(dir string) (there bool, err error) {
	names, err := x.fs.List(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case errors.Is(err, syscall.ENOTDIR):
		return false, fmt.Errorf("it is a file; choose another directory")
	case err != nil:
		return false, err
	}
	slices.Sort(names)
	for _, name := range names {
		if ours, err := x.exported(dir, name); err != nil || !ours {
			return false, errors.Join(err, &OccupiedError{Dir: x.dir, Holds: name, Alien: true})
		}
	}
	if len(names) > 0 && !x.o.Replace {
		return false, &OccupiedError{Dir: x.dir, Holds: names[0]}
	}
	return true, nil
}

// exported reports whether an export writes files of that name and type.
func (x *exporter) exported(dir, name string) (bool, error) {
	if !exportNames.MatchString(name) {
		return false, nil
	}
	full := path.Join(dir, name)
	if vfs.Root(x.fs) == vfs.Default {
		info, err := os.Lstat(full) // a link is the user's
		return err == nil && info.Mode().IsRegular(), err
	}
	info, err := x.fs.Stat(full)
	return err == nil && info.Mode().IsRegular(), err
}

// unwritable adds the next step to an error of missing write permission.
func unwritable(err error) error {
	if errors.Is(err, syscall.EROFS) || errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w; choose a directory where you may write", err)
	}
	return err
}

// parents makes the directories above dir.
func (x *exporter) parents() error {
	for dir := path.Dir(x.dir); ; dir = path.Dir(dir) {
		_, err := x.fs.Stat(dir)
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) || dir == "/" {
			return err
		}
		x.made = append(x.made, dir)
	}
	return unwritable(disk.NoSpace(x.fs.MkdirAll(path.Dir(x.dir), 0o755)))
}

// place renames the complete directory to its final name. It moves an existing directory
// aside and checks it again: since the first check, files that must not be replaced may have
// been added.
func (x *exporter) place(partial string, there bool) (err error) {
	old := x.dir + replacedMark + x.suffix
	moved := false
	if there {
		err = x.fs.Rename(x.dir, old)
		if moved = err == nil; moved {
			_, err = x.look(old)
		} else {
			err = disk.Gone(err) // another process has removed it
		}
	}
	if err == nil {
		if err = x.fs.Rename(partial, x.dir); errors.Is(err, fs.ErrExist) {
			_, now := x.look(x.dir) // another process has made it
			err = errors.Join(err, now)
		}
	}
	if err != nil {
		if moved {
			err = errors.Join(err, x.fs.Rename(old, x.dir))
		}
		return errors.Join(err, x.fs.RemoveAll(partial))
	}
	for _, dir := range append([]string{path.Dir(x.dir)}, parentsOf(x.made)...) {
		if err := disk.SyncDir(x.fs, dir); err != nil {
			return err
		}
	}
	if !moved {
		return nil
	}
	if err := x.discard(old); err != nil {
		return fmt.Errorf("the export is whole, but what it replaced could not be removed from %s: %w", old, err)
	}
	return nil
}

// discard removes a directory of files that exports make, and nothing else.
func (x *exporter) discard(dir string) error {
	names, err := x.fs.List(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		ours, err := x.exported(dir, name)
		if err == nil && ours {
			err = x.fs.Remove(path.Join(dir, name))
		}
		if err != nil {
			return err
		}
	}
	return x.fs.Remove(dir)
}

// parentsOf returns the parent directory of each.
func parentsOf(dirs []string) []string {
	out := make([]string, len(dirs))
	for i, dir := range dirs {
		out[i] = path.Dir(dir)
	}
	return out
}
