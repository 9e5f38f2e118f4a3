package data

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// there is what the directory of the checkpoint holds, and whether that is
// sealed: it has a manifest or a receipt, so that its bytes may have been
// committed.
func (w *FileWriter) there(ctx context.Context) (names []string, sealed bool, err error) {
	names, err = w.root.b.List(ctx, nameOf(w.ref))
	if err != nil {
		return nil, false, fmt.Errorf("list %s, which SetUp makes: %w", w.root.path(w.ref), err)
	}
	receipt, manifest, err := w.root.own(ctx, w.ref, names)
	return names, receipt || manifest, err
}

// repeated is a write of what was written before, perhaps by a call whose
// answer was lost: then the log may name that index, and another choice of
// what to reuse would not be it. Equal bytes are success, and nothing is
// written. Others are, into a sealed checkpoint, an error.
func (w *FileWriter) repeated(ctx context.Context, rank int, items []checkpoint.Item, src Source, there []string, sealed bool) (out Written, done bool, err error) {
	refuse := func() (Written, bool, error) {
		if !sealed {
			return Written{}, false, nil
		}
		return Written{}, false, fmt.Errorf("%s: %w; save under another name", w.root.path(w.ref, checkpoint.IndexFile(rank)), ErrSealed)
	}
	if !slices.Contains(there, checkpoint.IndexFile(rank)) {
		return refuse()
	}
	data, err := w.root.readFile(ctx, w.ref, checkpoint.IndexFile(rank))
	if err != nil {
		return Written{}, false, err
	}
	x, err := checkpoint.DecodeIndex(data)
	if err != nil || x.Adopted() || x.Verbatim() {
		return refuse()
	}
	if missing, extra := compareItems(&x, items); len(missing)+len(extra) > 0 {
		return refuse()
	}
	if err := w.root.checkFiles(ctx, w.ref, &x); err != nil {
		if sealed {
			return Written{}, false, err
		}
		return Written{}, false, nil // cut off before all names were durable
	}
	same, err := holdsBytes(ctx, &x, items, src)
	if err != nil {
		return Written{}, false, err
	}
	if !same {
		return refuse()
	}
	if !sealed {
		// The call that wrote it may not have come to this.
		err = w.root.sync(ctx, w.ref)
	}
	return writtenOf(&x, data), err == nil, err
}

// holdsBytes reports whether the index is that of these bytes.
func holdsBytes(ctx context.Context, x *checkpoint.Index, items []checkpoint.Item, src Source) (bool, error) {
	at := make(map[key]*checkpoint.Entry, len(x.Entries))
	for i := range x.Entries {
		at[itemKey(x.Rank, x.Entries[i].Item)] = &x.Entries[i]
	}
	for i, it := range items {
		data, err := itemBytes(ctx, src, i, it)
		if err != nil {
			return false, err
		}
		digest, err := digestBytes(ctx, data)
		if err != nil || digest != at[itemKey(x.Rank, it)].Digest {
			return false, err
		}
	}
	return true, nil
}

// checkFiles holds the files of an index to be in place and of the size that
// they were written with.
func (r *Root) checkFiles(ctx context.Context, ref checkpoint.Ref, x *checkpoint.Index) error {
	for _, f := range x.Files {
		info, err := r.b.Stat(ctx, nameOf(ref, f.Name))
		if err != nil {
			return fmt.Errorf("file of rank %d: %w", x.Rank, err)
		}
		if info.Size != f.Size {
			return fmt.Errorf("file of rank %d: %s has %d bytes, %d were written", x.Rank, r.path(ref, f.Name), info.Size, f.Size)
		}
	}
	return nil
}

// clear removes the files of a rank that are to be written anew, with what a
// write that was cut off has left of them. The index goes first and durably: one
// that is found after a crash is always that of the data beside it.
func (w *FileWriter) clear(ctx context.Context, rank int, there []string) error {
	for _, file := range []string{checkpoint.IndexFile(rank), checkpoint.DataFile(rank)} {
		cleared := false
		for _, name := range there {
			if name != file && (!strings.HasPrefix(name, file+".") || !strings.HasSuffix(name, object.Partial)) {
				continue
			}
			if err := w.root.b.Remove(ctx, nameOf(w.ref, name)); err != nil {
				return fmt.Errorf("remove the leftover %s: %w", w.root.path(w.ref, name), err)
			}
			cleared = true
		}
		if !cleared {
			continue
		}
		if err := w.root.sync(ctx, w.ref); err != nil {
			return err
		}
	}
	return nil
}
