package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// repairName is beside data/. It stays, empty, when a repair ends: whoever took
// away a file that others lock would let two of them in.
const repairName = "REPAIR"

// LockRepair keeps other repairs of the same data out until unlock, those of
// other processes too, whoever owns the store; of other machines, where their
// filesystem has locks for all of them. While another repair is at work it is
// [ErrLocked], at once. Where there is nothing to lock, because the data is in no
// directory or its filesystem has no locks, it is [errors.ErrUnsupported].
func (s *Store) LockRepair() (unlock func() error, err error) {
	path := filepath.Join(filepath.Dir(s.DataDir), repairName)
	if info, err := os.Stat(filepath.Dir(path)); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("repair: %w: the data of the store, %s, is in no directory of this machine that could be locked against another repair: run the command where it is", errors.ErrUnsupported, s.DataDir)
	}
	f, err := s.insideData().OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock against another repair: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(refusedRepair(path, err), f.Close())
	}
	host, _ := os.Hostname()
	card := fmt.Sprintf("process %d on %s since %s", os.Getpid(), host, time.Now().Format(time.DateTime))
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt([]byte(card), 0)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock against another repair: %w", err), f.Close())
	}
	return func() error { return errors.Join(f.Truncate(0), f.Close()) }, nil
}

// refusedRepair says why the lock is not to be had.
func refusedRepair(path string, err error) error {
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		who := "another process"
		if card, err := readFile(path); err == nil && strings.HasPrefix(string(card), "process ") {
			who = string(card)
		}
		return fmt.Errorf("%w against a second repair: %s repairs it and holds %s: wait until it ends, or end it, then run the command again", ErrLocked, who, path)
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.ENOTSUP), errors.Is(err, unix.ENOLCK):
		return fmt.Errorf("repair: %w: the filesystem of %s has no locks to keep a second repair out: %w", errors.ErrUnsupported, path, err)
	}
	return fmt.Errorf("lock %s against another repair: %w", path, err)
}
