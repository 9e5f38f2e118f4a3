package foreign

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"path"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/disk"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// file adds a file to the part of a rank and opens it.
func (b *builder) file(rank int, name string) (*data.Part, int, vfs.File, error) {
	full := path.Join(b.dir, name)
	if err := disk.Regular(b.fs, full); err != nil {
		return nil, 0, nil, err
	}
	file, err := b.fs.Open(full)
	if err != nil {
		return nil, 0, nil, err
	}
	info, err := file.Stat()
	if err != nil {
		return nil, 0, nil, errors.Join(err, file.Close())
	}
	p := b.parts[rank]
	if p == nil {
		p = &data.Part{Rank: rank}
		b.parts[rank] = p
	}
	p.Files = append(p.Files, data.PlacedFile{Path: full, Size: info.Size(), Modified: info.ModTime().UnixNano()})
	return p, len(p.Files) - 1, file, nil
}

// lost converts the error of a missing file to a CorruptError that lists the tensors and
// values in it: the checkpoint exists, and is damaged. Other errors stay unchanged.
func lost(err error, file string, fqns iter.Seq[string]) error {
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	const most = 8
	var named []string
	seen := map[string]bool{}
	for fqn := range fqns {
		if !seen[fqn] && len(named) < most {
			named = append(named, strconv.Quote(fqn))
		}
		seen[fqn] = true
	}
	of := strings.Join(named, ", ")
	if more := len(seen) - len(named); more > 0 {
		of += fmt.Sprintf(" and %d more", more)
	}
	return &data.CorruptError{File: file, Block: -1, Problem: "the file is not there, and the checkpoint has parts in it of " + of}
}

// readSmall reads a file of at most limit bytes.
func readSmall(files vfs.FS, name string, limit int64) ([]byte, error) {
	if err := disk.Regular(files, name); err != nil {
		return nil, err
	}
	info, err := files.Stat(name)
	if err != nil {
		return nil, err
	}
	if info.Size() > limit {
		return nil, fmt.Errorf("%s has %d bytes, at most %d are read", name, info.Size(), limit)
	}
	return disk.ReadFile(files, name)
}
