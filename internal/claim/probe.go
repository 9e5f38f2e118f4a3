package claim

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Trace is a file by which another machine can tell that it shares a directory with this
// one: see [Look]. It is locked.
type Trace struct {
	Name string // in the directory
	Text string // content

	file *os.File
}

// Leave makes a trace in a directory.
func Leave(dir string) (*Trace, error) {
	t := &Trace{Name: "probe-" + rand.Text(), Text: rand.Text()}
	path := filepath.Join(dir, t.Name)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("probe %s: %w", dir, err)
	}
	t.file = f
	_, err = f.WriteString(t.Text)
	if err = errors.Join(err, f.Sync(), unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)); err != nil {
		return nil, errors.Join(fmt.Errorf("probe %s: %w", dir, err), t.Remove())
	}
	return t, nil
}

// Remove removes the trace.
func (t *Trace) Remove() error { return errors.Join(t.file.Close(), removed(t.file.Name())) }

// Sharing is what a machine finds of another one's trace.
type Sharing struct {
	// Locks reports whether the lock of the other machine holds here.
	Locks bool `json:"locks"`
}

// lookAgain is the pause before a directory is listed again.
const lookAgain = 200 * time.Millisecond

// Look looks for a trace that another machine has left in a directory, until ctx ends. An
// error means that the directory is not shared, or not as a store needs it.
func Look(ctx context.Context, dir, name, text string) (s Sharing, err error) {
	path := filepath.Join(dir, name)
	if filepath.Base(name) != name || name == "" {
		return s, fmt.Errorf("probe %s: %q is not a name", dir, name)
	}
	for {
		// The name is looked up only once a listing has it: a cache would remember that
		// it was missing.
		if listed(dir, name) {
			found, err := os.ReadFile(path)
			if err != nil {
				return s, fmt.Errorf("probe %s: %w", dir, err)
			}
			if !bytes.Equal(found, []byte(text)) {
				return s, fmt.Errorf("probe %s: the file of the other machine has other bytes here", dir)
			}
			break
		}
		select {
		case <-time.After(lookAgain):
		case <-ctx.Done():
			return s, fmt.Errorf("%s is not shared with the other machine: its file %s does not appear here: %w", dir, name, context.Cause(ctx))
		}
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if !errors.Is(err, fs.ErrExist) {
		if err == nil {
			err = errors.Join(errors.New("a file that another machine has made can be created exclusively"), f.Close())
		}
		return s, fmt.Errorf("probe %s: %w", dir, err)
	}
	if f, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
		return s, fmt.Errorf("probe %s: %w", dir, err)
	}
	s.Locks = errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
	return s, f.Close()
}

// listed reports whether a directory lists a name.
func listed(dir, name string) bool {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, e := range entries {
		if e.Name() == name {
			return true
		}
	}
	return false
}
