package reading

import (
	"context"
	"slices"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
)

// place finds the wants that the caller can copy out of the checkpoint's own
// files, and assigns memory to the others.
func (w *wanted) place(ctx context.Context) error {
	// All plans are one caller's.
	reads, err := w.source.reader.PrepareLocalPlan(ctx, w.planned.Reads)
	if err != nil {
		return err
	}
	w.reads = reads
	if files, ok := w.source.reader.(*data.FileReader); ok {
		if w.spots, err = files.Spots(ctx, w.wants, w.reads); err != nil {
			return err
		}
	}
	for i, item := range w.of {
		switch _, lent := w.spots[i]; {
		case lent && w.checked != nil:
			w.checked[i] = w.sizes[item] >= client.SmallestChecked
		case !lent && w.sizes[item] > 0:
			w.offsets[item] = w.size
			w.size += (w.sizes[item] + align - 1) / align * align
		}
	}
	return nil
}

// into holds the buffers of wants.
type into struct {
	of   *wanted
	data []byte
}

var _ data.Destination = into{}

// Want implements data.Destination.
func (d into) Want(i int) []byte {
	if _, lent := d.of.spots[i]; lent {
		return nil
	}
	item := d.of.of[i]
	at := d.of.offsets[item]
	return d.data[at : at+d.of.sizes[item] : at+d.of.sizes[item]]
}

// fill reads and verifies everything except what the caller verifies.
func (w *wanted) fill(ctx context.Context, data []byte) error {
	reads := slices.DeleteFunc(slices.Clone(w.reads), func(r checkpoint.Read) bool { return w.checked[r.Want] })
	_, err := w.source.reader.ReadData(ctx, w.wants, reads, into{w, data})
	return err
}

// reply locates all items: in memory, or in files of the checkpoint.
func (w *wanted) reply(f *file) Reply {
	out := Reply{Arenas: []client.LoadArena{}, In: make([]int, len(w.sizes)), Offsets: w.offsets, Sizes: w.sizes}
	if f != nil {
		out.Arenas = append(out.Arenas, client.LoadArena{Path: f.file.Name(), Size: w.size})
	}
	number := map[string]int{}
	for i := range w.wants {
		at, lent := w.spots[i]
		if !lent {
			continue
		}
		n, known := number[at.Path]
		if !known {
			n = len(out.Arenas)
			number[at.Path] = n
			out.Arenas = append(out.Arenas, client.LoadArena{Path: at.Path, Size: at.Size})
		}
		out.In[w.of[i]], out.Offsets[w.of[i]] = n, at.Offset
		if w.checked[i] {
			if out.Checks == nil {
				out.Checks = &client.Checks{}
			}
			out.Checks.Add(w.of[i], at.Check.Before, at.Check.After, at.Check.Sums)
		}
	}
	return out
}
