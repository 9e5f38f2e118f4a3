package storage

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"path"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// file adds a file to the index of a rank and opens it.
func (b *foreignBuilder) file(rank int, name string) (*index, int, vfs.File, error) {
	full := path.Join(b.dir, name)
	if err := regular(b.fs, full); err != nil {
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
	x := b.indexes[rank]
	if x == nil {
		x = &index{rank: rank, modified: []int64{}}
		b.indexes[rank] = x
	}
	x.files = append(x.files, File{Name: full, Size: info.Size()})
	x.modified = append(x.modified, info.ModTime().UnixNano())
	return x, len(x.files) - 1, file, nil
}

// lost says what a checkpoint lacks without a file that it names: the
// checkpoint is there then, and damaged. Other errors stay as they are.
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
	return &CorruptError{File: file, Block: -1, Problem: "the file is not there, and the checkpoint has parts in it of " + of}
}

// readSmall reads a file of at most limit bytes.
func readSmall(files vfs.FS, name string, limit int64) ([]byte, error) {
	if err := regular(files, name); err != nil {
		return nil, err
	}
	info, err := files.Stat(name)
	if err != nil {
		return nil, err
	}
	if info.Size() > limit {
		return nil, fmt.Errorf("%s has %d bytes, at most %d are read", name, info.Size(), limit)
	}
	r := Root{fs: files}
	return r.readFile(name)
}
