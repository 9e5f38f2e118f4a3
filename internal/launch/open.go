package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// open makes the directory of the job's sockets and takes its shared memory.
func (j *job) open() (err error) {
	j.runtime = filepath.Join(j.store.Runtime, "job-"+j.cfg.Job[len(j.cfg.Job)-8:])
	if err := os.MkdirAll(j.runtime, 0o700); err != nil {
		return fmt.Errorf("make the job's runtime directory: %w", err)
	}
	if j.arenas, err = staging.Open(j.store.Shared, j.store.ID, j.cfg.Run, j.store.room, j.log); err != nil {
		return errors.Join(err, os.RemoveAll(j.runtime))
	}
	return nil
}

// close gives back what open has taken, when the job has ended with err. A
// writer that hangs may wake up and read what it has to write: its memory is
// left to the end of the process, and to the next trainer.
func (j *job) close(err error) error {
	if !errors.Is(err, errStuck) {
		err = errors.Join(err, j.arenas.Close())
	}
	return errors.Join(err, os.RemoveAll(j.runtime))
}
