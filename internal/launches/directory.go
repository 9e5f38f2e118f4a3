package launches

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/ckptstore/ckptstore/internal/private"
)

// path is the directory of the records, and those above it that may have to be
// made, the highest first.
func path() (dir string, above []string, err error) {
	base := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(base) { // by its specification, a relative one counts as not set
		home := os.Getenv("HOME")
		if !filepath.IsAbs(home) {
			return "", nil, errors.New("neither $XDG_STATE_HOME nor $HOME is an absolute path")
		}
		base = filepath.Join(home, ".local", "state")
		above = []string{filepath.Dir(base)}
	}
	product := filepath.Join(base, "ckptstore")
	return filepath.Join(product, "launches"), append(above, base, product), nil
}

// makeDir makes the directory of the records and opens it. What is missing is
// made only in a directory of this user: not in the home of the user who called
// sudo, and not in /.
func makeDir() (*os.Root, error) {
	dir, above, err := path()
	if err != nil {
		return nil, err
	}
	for _, name := range append(above, dir) {
		if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) {
			continue // openDir says what is wrong with it
		}
		parent, err := os.Stat(filepath.Dir(name))
		if err != nil {
			return nil, err
		}
		if int(owner(parent)) != os.Getuid() {
			return nil, fmt.Errorf("%s is not there, and the directory above it is user %d's", name, owner(parent))
		}
		if err := os.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	return openDir()
}

// openDir opens the directory of the records, which must be private to this user.
// What is opened is what was looked at, whatever happens to the path.
func openDir() (*os.Root, error) {
	path, _, err := path()
	if err != nil {
		return nil, err
	}
	dir, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	info, err := dir.Stat(".")
	if err == nil {
		err = private.Directory(path, info, "remove it")
	}
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}
