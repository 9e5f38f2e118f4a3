package store

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
)

// Footprint is what the files of a checkpoint have of the disk, by their sizes,
// with indexes, manifest and receipt. It is a fact of the filesystem at the
// moment of asking: a save that links a file in, or a deletion, changes it.
type Footprint struct {
	Shared    int64 // bytes of files that have a link outside of its directory
	Exclusive int64 // bytes of the others: what deleting it alone would free
}

// MeasureFiles is the footprint of the checkpoint at ref below a data
// directory. Without a directory the error is [fs.ErrNotExist]: then nothing is
// known, which is not the same as 0.
func MeasureFiles(ctx context.Context, dataDir string, ref checkpoint.Ref) (Footprint, error) {
	dir := filepath.Join(dataDir, ref.String())
	if err := errors.Join(ctx.Err(), ref.Validate()); err != nil {
		return Footprint{}, fmt.Errorf("measure %s: %w", dir, err)
	}
	files, err := linkedFiles(dataDir, dir)
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

// inode is a file, whatever its names are.
type inode struct{ device, number uint64 }

// linkedFile is a file with a name in a directory.
type linkedFile struct {
	size  int64
	links uint64 // in the directory
	all   uint64 // wherever
}

// linkedFiles are the files below a directory of the data.
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
			return fmt.Errorf("%s: this system does not say how many links a file has", path)
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
