package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

// A process that holds a lease keeps a file locked, its witness, in the runtime directory:
//
//	witness-<UUID>    0600: flock(2) of the process; the lease has the name
//
// A process number means nothing in another container. A container that starts again in
// its pod has the files of the last one, though, as /tmp is a volume there: a witness
// without the lock proves that its process has ended, and the lease is taken over at once.
const witnessPrefix = "witness-"

// witnessAge is how long the witness of a process that was killed is kept.
const witnessAge = 24 * time.Hour

// witness returns the name of this process's witness, which it makes. Close removes it.
func (s *Store) witness() (name string, err error) {
	s.witnessing.Lock()
	defer s.witnessing.Unlock()
	if s.witnessed == nil {
		if s.witnessed, err = makeWitness(s.Runtime); err != nil {
			return "", fmt.Errorf("make the witness of this process: %w", err)
		}
	}
	return filepath.Base(s.witnessed.Name()), nil
}

// makeWitness makes a locked file in a runtime directory, and removes old ones.
func makeWitness(runtime string) (*os.File, error) {
	sweepWitnesses(runtime)
	f, err := os.OpenFile(filepath.Join(runtime, witnessPrefix+uuid.NewString()), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	// Its name is known to this process alone until the lease has it.
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, os.Remove(f.Name()), f.Close())
	}
	return f, nil
}

// sweepWitnesses removes the files of processes that ended without Close, but not soon: they
// prove that.
func sweepWitnesses(runtime string) {
	paths, err := filepath.Glob(filepath.Join(runtime, witnessPrefix+"*"))
	if err != nil {
		return // only for a bad pattern
	}
	for _, path := range paths {
		if info, err := os.Lstat(path); err == nil && time.Since(info.ModTime()) > witnessAge && unlocked(path) {
			_ = os.Remove(path) // or the next process does
		}
	}
}

// closeWitness removes the witness. No lease of this process is needed any more.
func (s *Store) closeWitness() error {
	s.witnessing.Lock()
	defer s.witnessing.Unlock()
	f := s.witnessed
	if f == nil {
		return nil
	}
	s.witnessed = nil
	return errors.Join(os.Remove(f.Name()), f.Close())
}

// gone reports whether h has certainly ended because nothing locks its witness: it had the
// same kernel, and this process sees the same file.
func (s *Store) gone(h, me holder) bool {
	if h.Boot != me.Boot || !strings.HasPrefix(h.Witness, witnessPrefix) || filepath.Base(h.Witness) != h.Witness {
		return false
	}
	return unlocked(filepath.Join(s.Runtime, h.Witness))
}

// unlocked reports whether a file is there, and no process has locked it.
func unlocked(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	info, err := f.Stat()
	return err == nil && info.Mode().IsRegular() && unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) == nil
}
