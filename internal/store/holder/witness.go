package holder

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

// WitnessPrefix starts the name of a witness. A process that holds a lease keeps this file
// locked in the runtime directory of the store:
//
//	witness-<UUID>    0600: flock(2) of the process; the lease has the name
//
// A process number means nothing in another container. A container that starts again in
// its pod has the files of the last one, though, as /tmp is a volume there: a witness
// without the lock proves that its process has ended, and the lease is taken over at once.
const WitnessPrefix = "witness-"

// WitnessAge is how long the witness of a process that was killed is kept, from its last renewal of a lease.
const WitnessAge = 24 * time.Hour

// Witness is the witness of this process. The zero value is ready for use; its methods may be
// called concurrently.
type Witness struct {
	mu   sync.Mutex
	file *os.File // nil until the first Name
}

// Name returns the name of the witness in the runtime directory dir. The first call makes the
// file, which [Witness.Close] removes.
func (w *Witness) Name(dir string) (name string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file == nil {
		if w.file, err = MakeWitness(dir); err != nil {
			return "", fmt.Errorf("make the witness of this process: %w", err)
		}
	}
	return filepath.Base(w.file.Name()), nil
}

// MakeWitness makes a locked file in a runtime directory.
func MakeWitness(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, WitnessPrefix+uuid.NewString()), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	// Its name is known to this process alone until the lease has it.
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, os.Remove(f.Name()), f.Close())
	}
	return f, nil
}

// Touch notes in the witness that this process lived at a time.
func (w *Witness) Touch(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file != nil {
		_ = os.Chtimes(w.file.Name(), now, now) // or the next renewal does
	}
}

// Close removes the witness. No lease of this process is needed any more.
func (w *Witness) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	f := w.file
	if f == nil {
		return nil
	}
	w.file = nil
	return errors.Join(os.Remove(f.Name()), f.Close())
}

// Gone reports whether p has certainly ended because nothing locks its witness in the runtime
// directory dir: p had the same kernel as the process me, which sees the same file.
func (p Process) Gone(dir string, me Process) bool {
	if p.Boot != me.Boot || !strings.HasPrefix(p.Witness, WitnessPrefix) || filepath.Base(p.Witness) != p.Witness {
		return false
	}
	return Unlocked(filepath.Join(dir, p.Witness))
}

// SweepWitnesses removes the files of processes that ended without Close from a runtime
// directory, but not soon: they prove that end.
func SweepWitnesses(dir string) {
	paths, err := filepath.Glob(filepath.Join(dir, WitnessPrefix+"*"))
	if err != nil {
		return // only for a bad pattern
	}
	for _, path := range paths {
		if info, err := os.Lstat(path); err == nil && time.Since(info.ModTime()) > WitnessAge && Unlocked(path) {
			_ = os.Remove(path) // or the next process does
		}
	}
}

// Unlocked reports whether a file is there, and no process has locked it.
func Unlocked(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	info, err := f.Stat()
	return err == nil && info.Mode().IsRegular() && unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) == nil
}
