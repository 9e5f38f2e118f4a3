package store

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/internal/durable"
)

// An owner whose views fail says so in the store's directory, so that the next
// owner does not wait as long for a file system that does not answer: when several
// jobs end at once, each of them may own the store in turn.
const (
	viewsFailedName = "views.failed"
	// shortPatience is that for the views after an owner's failure. A file system
	// that works answers within it.
	shortPatience = 2 * time.Second
)

// viewsFailure is what the file says.
type viewsFailure struct {
	At    time.Time `json:"at"`
	Cause string    `json:"cause"`
}

// noteViewsFailed writes the file, as far as the disk lets it.
func (s *Store) noteViewsFailed(dir string, cause error) {
	if s.opts.Reader {
		return
	}
	text, err := json.Marshal(viewsFailure{At: time.Now().UTC(), Cause: cause.Error()})
	if err == nil {
		err = durable.Write(filepath.Join(dir, viewsFailedName), append(text, '\n'))
	}
	if err != nil {
		s.opts.Logger.Debug("the next owner is not told that the views fail", "error", err)
	}
}

// noteViewsWork removes the file.
func (s *Store) noteViewsWork(dir string) {
	if s.opts.Reader {
		return
	}
	if err := os.Remove(filepath.Join(dir, viewsFailedName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.opts.Logger.Debug("the note that the views have failed stays", "error", err)
	}
}

// viewsPatience is how long the views may take for one operation: 0 is the usual
// time, and less when an owner's views failed a while ago.
func viewsPatience(dir string, now time.Time) time.Duration {
	info, err := os.Lstat(filepath.Join(dir, viewsFailedName))
	if err != nil || !info.Mode().IsRegular() {
		return 0
	}
	if age := now.Sub(info.ModTime()); age < 0 || age > diskRetry {
		return 0
	}
	return shortPatience
}
