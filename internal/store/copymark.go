package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrBackup reports that a directory is a backup, which is read-only.
var ErrBackup = problem.New(problem.Denied, "this is a backup")

// A backup and a restore write a mark first and store.json last. A directory with a
// mark and without store.json is unfinished, and no command takes it for a store.
//
//	DIR/backup.json    stays: with store.json, DIR is a backup, which is read-only
//	DIR/restore.json   is removed at the end
const (
	backupName  = "backup.json"
	restoreName = "restore.json"
)

// copyMark is backup.json or restore.json.
type copyMark struct {
	Product string    `json:"product"`
	Store   string    `json:"store"` // identity of the source store
	From    string    `json:"from"`  // the source directory
	Begun   time.Time `json:"begun"`
	// For a complete backup: the end of its log, and its counts.
	Whole       bool      `json:"whole"`
	Made        time.Time `json:"made,omitzero"`
	Sequence    uint64    `json:"sequence,omitempty"`
	Event       string    `json:"event,omitempty"` // ID of that event
	Checkpoints int       `json:"checkpoints"`
	Incomplete  int       `json:"incomplete,omitempty"` // checkpoints that were incomplete in the store
}

// readCopyMark reads a mark. A missing mark is [os.ErrNotExist].
func readCopyMark(path string) (m copyMark, err error) {
	text, err := readFile(path)
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return m, fmt.Errorf("%w: %s is not valid JSON: %w; make the copy again in another directory", ErrDamaged, path, err)
	}
	if m.Product != product || m.Store == "" {
		return m, fmt.Errorf("%w: %s was not written by %s", ErrForeign, path, product)
	}
	return m, nil
}

func writeCopyMark(path string, m copyMark) error {
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return durable.Write(path, append(text, '\n'))
}

// unfinished returns an error if a backup or a restore into dir has not finished.
func unfinished(dir string) error {
	if exists(filepath.Join(dir, "store.json")) {
		return nil
	}
	for name, how := range map[string]string{
		backupName:  "a backup into it did not end: run the same `ckptstore backup` again, which finishes it, or remove the directory",
		restoreName: "a restore into it did not end: run the same `ckptstore restore` again, which finishes it, or remove the directory",
	} {
		if exists(filepath.Join(dir, name)) {
			return fmt.Errorf("%w in %s: %s", ErrNoStore, dir, how)
		}
	}
	return nil
}

// backedUp returns [ErrBackup], with the next step, if dir is a backup.
func backedUp(dir string) error {
	m, err := readCopyMark(filepath.Join(dir, backupName))
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("%w of store %s: %s is not written to: `ckptstore restore %s --store NEW` makes a store of it", ErrBackup, m.Store, dir, dir)
}

// destination is a directory that a backup or a restore writes.
type destination struct {
	dir  string
	mark copyMark
	name string // of the mark file
	lock *os.File
}

// openDestination takes dir, which must be absent, empty, or left by an interrupted run
// of the same command. from is the source store or backup.
func openDestination(dir, name string, mark copyMark) (_ *destination, err error) {
	path := filepath.Join(dir, name)
	here, err := readCopyMark(path)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		if err := emptyPlace(dir); err != nil {
			return nil, err
		}
		if err := makeOwn(dir); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	case exists(filepath.Join(dir, "store.json")):
		return nil, fmt.Errorf("%w: %s has a copy of store %s, made on %s: choose another directory", ErrExists, dir, here.Store, here.Made.Local().Format(time.DateTime))
	case here.Store != mark.Store || here.From != mark.From:
		return nil, fmt.Errorf("%w: %s has an unfinished copy of store %s from %s: finish that, remove the directory, or choose another", ErrExists, dir, here.Store, here.From)
	default:
		mark.Begun = here.Begun
	}
	lock, err := tryLock(dir)
	if err == nil && lock == nil {
		err = fmt.Errorf("%w: another process writes to %s: wait for it or end it", ErrLocked, dir)
	}
	if err != nil {
		return nil, err
	}
	if exists(filepath.Join(dir, "store.json")) { // another process has just finished there
		return nil, errors.Join(fmt.Errorf("%w: %s has a copy of store %s: choose another directory", ErrExists, dir, mark.Store), unlock(lock))
	}
	d := &destination{dir: dir, mark: mark, name: name, lock: lock}
	if err := errors.Join(writeCopyMark(path, mark), durable.SyncDir(filepath.Dir(dir))); err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

func (d *destination) close() error { return unlock(d.lock) }

// emptyPlace returns an error unless a directory is absent or empty.
func emptyPlace(dir string) error {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("%w: %s is a file: name a directory", ErrNotEmpty, dir)
	case err != nil:
		return err
	case exists(filepath.Join(dir, "store.json")):
		return fmt.Errorf("%w: %s has a store: choose an empty or a new directory", ErrExists, dir)
	}
	for _, e := range entries {
		if e.Name() != lockName { // from a copy interrupted before its mark
			return fmt.Errorf("%s is %w (it has %q): choose an empty or a new directory", dir, ErrNotEmpty, e.Name())
		}
	}
	return nil
}

// apart returns an error if two directories are the same or one contains the other.
func apart(from, to string) error {
	a, b := resolved(from), resolved(to)
	if within(a, b) || within(b, a) {
		return fmt.Errorf("%w: %s and %s overlap: choose a directory outside the other", ErrLocation, from, to)
	}
	return nil
}
