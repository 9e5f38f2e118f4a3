package collection

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
)

// Footprint is the disk space of a checkpoint's files by their sizes, with indexes, manifest and
// receipt. It is valid at the moment of the call: a save that links a file in, or a deletion,
// changes it.
type Footprint struct {
	Shared    int64 // bytes of files that have a link outside its directory
	Exclusive int64 // bytes of the others, which deleting it alone would free
}

// MeasureFiles returns the footprint of the checkpoint at ref below a data directory. Without a
// directory it returns [fs.ErrNotExist]: the footprint is then unknown, not 0.
func MeasureFiles(ctx context.Context, root *data.Root, ref checkpoint.Ref) (Footprint, error) {
	if err := errors.Join(ctx.Err(), ref.Validate()); err != nil {
		return Footprint{}, fmt.Errorf("measure %s: %w", root.Path(ref), err)
	}
	dataDir, local := root.Local()
	if !local {
		bytes, err := root.Bytes(ctx, ref, nil)
		if err == nil && bytes < 0 {
			err = fmt.Errorf("measure %s: %w", root.Path(ref), fs.ErrNotExist)
		}
		return Footprint{Exclusive: bytes}, err
	}
	files, err := linkedFiles(dataDir, filepath.Join(dataDir, ref.String()))
	if err != nil {
		return Footprint{}, err
	}
	var out Footprint
	for _, f := range files {
		if f.links >= f.all {
			out.Exclusive += f.size
		} else {
			out.Shared += f.size
		}
	}
	return out, nil
}

// inode identifies a file with any number of names.
type inode struct{ device, number uint64 }

// linkedFile is a file with a name in a directory.
type linkedFile struct {
	size  int64
	links uint64 // in the directory
	all   uint64 // anywhere
}

// linkedFiles returns the files below a directory of the data.
func linkedFiles(dataDir, dir string) (map[inode]linkedFile, error) {
	files := map[inode]linkedFile{}
	err := beneath.At(filepath.Dir(dataDir)).WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it was removed meanwhile
		}
		if err != nil {
			return err
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Errorf("%s: this system does not report how many links a file has", path)
		}
		id := inode{uint64(stat.Dev), stat.Ino}                                    //nolint:unconvert // narrower on other systems
		files[id] = linkedFile{stat.Size, files[id].links + 1, uint64(stat.Nlink)} //nolint:unconvert // narrower on other systems
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("measure %s: %w", dir, err)
	}
	return files, nil
}
