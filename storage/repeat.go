package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/ckptstore/ckptstore/planner/plan"
)

// there is what the directory of the checkpoint holds, and whether that is
// sealed: it has a manifest or a receipt, so that its bytes may have been
// committed.
func (w *FileWriter) there() (names []string, sealed bool, err error) {
	dir := w.root.path(w.ref)
	names, err = w.root.fs.List(dir)
	if err != nil {
		return nil, false, fmt.Errorf("list %s, which SetUp makes: %w", dir, err)
	}
	receipt, manifest, err := w.root.own(w.ref, names)
	return names, receipt || manifest, err
}

// repeated is a write of what was written before, perhaps by a call whose
// answer was lost: then the log may name that index, and another choice of
// what to reuse would not be it. Equal bytes are success, and nothing is
// written. Others are, into a sealed checkpoint, an error.
func (w *FileWriter) repeated(ctx context.Context, rank int, items []plan.Item, src Source, there []string, sealed bool) (out Written, done bool, err error) {
	path := w.root.path(w.ref, indexFile(rank))
	refuse := func() (Written, bool, error) {
		if !sealed {
			return Written{}, false, nil
		}
		return Written{}, false, fmt.Errorf("%s: %w; save under another name", path, ErrSealed)
	}
	if !slices.Contains(there, indexFile(rank)) {
		return refuse()
	}
	data, err := w.root.readFile(path)
	if err != nil {
		return Written{}, false, err
	}
	x, err := decodeIndex(data)
	if err != nil || x.adopted() {
		return refuse()
	}
	if missing, extra := x.compare(items); len(missing)+len(extra) > 0 {
		return refuse()
	}
	if err := w.root.checkFiles(w.ref, &x); err != nil && !sealed {
		return Written{}, false, nil // cut off before all names were durable
	}
	same, err := x.holds(ctx, items, src)
	if err != nil {
		return Written{}, false, err
	}
	if !same {
		return refuse()
	}
	if !sealed {
		// The call that wrote it may not have come to this.
		err = w.root.syncDirs(w.ref)
	}
	return x.written(data), err == nil, err
}

// holds reports whether the index is that of these bytes.
func (x *index) holds(ctx context.Context, items []plan.Item, src Source) (bool, error) {
	at := make(map[key]*entry, len(x.entries))
	for i := range x.entries {
		at[itemKey(x.rank, x.entries[i].item)] = &x.entries[i]
	}
	for i, it := range items {
		data, err := itemBytes(ctx, src, i, it)
		if err != nil {
			return false, err
		}
		digest, _, err := digestOf(ctx, data, nil, true)
		if err != nil || digest != at[itemKey(x.rank, it)].digest {
			return false, err
		}
	}
	return true, nil
}

// checkFiles holds the files of an index to be in place and of the size that
// they were written with.
func (r *Root) checkFiles(ref Ref, x *index) error {
	for _, f := range x.files {
		path := r.path(ref, f.Name)
		info, err := r.fs.Stat(path)
		if err != nil {
			return fmt.Errorf("file of rank %d: %w", x.rank, err)
		}
		if info.Size() != f.Size {
			return fmt.Errorf("file of rank %d: %s has %d bytes, %d were written", x.rank, path, info.Size(), f.Size)
		}
	}
	return nil
}

// clear removes the files of a rank that are to be written anew, the index
// first and durably: one that is found after a crash is always that of the
// data beside it.
func (w *FileWriter) clear(rank int, there []string) error {
	cleared := false
	for _, name := range []string{indexFile(rank), dataFile(rank)} {
		if !slices.Contains(there, name) {
			continue
		}
		path := w.root.path(w.ref, name)
		if err := w.root.fs.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the leftover %s: %w", path, err)
		}
		cleared = true
	}
	if !cleared {
		return nil
	}
	return w.root.syncDir(w.root.path(w.ref))
}
