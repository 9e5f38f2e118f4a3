package store

import (
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/ckptstore/ckptstore/internal/beneath"
)

// inside is the store's directory, below which no symbolic link is followed.
func (s *Store) inside() beneath.Root { return beneath.At(s.Location) }

// insideData is the directory that holds data/, wherever that is.
func (s *Store) insideData() beneath.Root { return beneath.At(filepath.Dir(s.DataDir)) }

// readFile returns the content of a small file in the directory of a store. A
// symbolic link is not followed, and a pipe not waited for.
func readFile(path string) ([]byte, error) { return beneath.At(filepath.Dir(path)).ReadFile(path) }

// plainLog refuses a log with symbolic links, pipes or devices in it, before a
// server opens its files on its own.
func plainLog(dir string) error {
	return onlyPlain(dir, filepath.Join(dir, "log"))
}

// onlyPlain refuses what is neither a directory nor a regular file at a path in
// dir and below it. A path that nothing has is fine.
func onlyPlain(dir, path string) error {
	return beneath.At(dir).WalkDir(path, func(path string, e fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // or it was removed meanwhile
		case err != nil:
			return err
		case !e.IsDir() && !e.Type().IsRegular():
			return &beneath.TypeError{Path: path, Type: e.Type()}
		}
		return nil
	})
}
