package launches

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/ckptstore/ckptstore/internal/private"
)

// path returns the directory of the records, and the parent directories that may
// have to be created, the highest first.
func path() (dir string, above []string, err error) {
	base := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(base) { // the specification ignores a relative path
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

// makeDir creates the directory of the records and opens it. It creates missing
// directories only in a directory of this user: not in the home of the user who
// called sudo, and not in /.
func makeDir() (*os.Root, error) {
	dir, above, err := path()
	if err != nil {
		return nil, err
	}
	for _, name := range append(above, dir) {
		if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) {
			continue // openDir reports what is wrong with it
		}
		parent, err := os.Stat(filepath.Dir(name))
		if err != nil {
			return nil, err
		}
		if int(owner(parent)) != os.Getuid() {
			return nil, fmt.Errorf("%s does not exist, and its parent directory belongs to user %d", name, owner(parent))
		}
		if err := os.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	return openDir()
}

// openDir opens the directory of the records, which must be private to this user.
// It opens exactly the directory that it checked, even if the path changes
// meanwhile.
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
