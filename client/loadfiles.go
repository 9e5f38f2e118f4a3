package client

import (
	"fmt"
	"os"
)

// loadFiles are the files of a load, in the order of its reply. They are read,
// not mapped: a read of memory costs as much as to map and to copy it, and one
// of memory that is not there is an error, and no signal.
type loadFiles []*os.File

// open opens all files, and sees that they hold what they are to hold.
func (r LoadReply) open() (loadFiles, error) {
	files := make(loadFiles, len(r.Arenas))
	for i, a := range r.Arenas {
		f, err := os.Open(a.Path)
		if err != nil {
			files.close()
			return nil, fmt.Errorf("open what is loaded: %w", err)
		}
		files[i] = f
		info, err := f.Stat()
		if err == nil && info.Size() < a.Size {
			err = fmt.Errorf("%s has %d bytes, the trainer has named %d", a.Path, info.Size(), a.Size)
		}
		if err != nil {
			files.close()
			return nil, fmt.Errorf("open what is loaded: %w", err)
		}
	}
	return files, nil
}

// read fills data with what begins at a byte of a file.
func (f loadFiles) read(data []byte, file int, at int64) error {
	if len(data) == 0 {
		return nil
	}
	if _, err := f[file].ReadAt(data, at); err != nil {
		return fmt.Errorf("read what is loaded: %w", err)
	}
	return nil
}

func (f loadFiles) close() {
	for _, file := range f {
		if file != nil {
			_ = file.Close() // it was only read
		}
	}
}
