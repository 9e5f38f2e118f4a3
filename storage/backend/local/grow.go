package local

import (
	"context"
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/storage/backend"
	"github.com/ckptstore/ckptstore/storage/disk"
)

// Grow is Create for a file whose size nobody knows yet: it has no blocks
// reserved, replaces what has its name, and ends where its last write ends.
func (d *Dir) Grow(ctx context.Context, name string) (backend.Upload, error) {
	path, err := d.at(ctx, name)
	if err != nil {
		return nil, err
	}
	u := &upload{d: d, path: path, temp: partial(path), mode: backend.Replace}
	if u.file, err = d.fs.OpenReadWrite(u.temp, vfs.WriteCategoryUnspecified); err != nil {
		return nil, fmt.Errorf("create %s: %w", u.temp, disk.NoSpace(err))
	}
	if u.file.Fd() != vfs.InvalidFd {
		u.past = direct(d.fs, u.temp)
	}
	return u, nil
}
