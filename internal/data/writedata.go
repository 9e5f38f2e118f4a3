package data

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/reuse"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/data/stream"
	"github.com/ckptstore/ckptstore/internal/object"
)

// WriteData implements [Writer]. It opens one file at a time and uses a fixed amount of
// memory.
func (w *FileWriter) WriteData(ctx context.Context, rank int, items []checkpoint.Item, src Source) (written Written, err error) {
	// Items are probed and digested here before they are written: a slot may be truncated.
	if !object.Readable(func() { written, err = w.writeData(ctx, rank, items, src) }) {
		err = object.ErrUnreadable
	}
	if err != nil {
		return Written{}, w.wrap(fmt.Sprintf("write rank %d", rank), err)
	}
	return written, nil
}

func (w *FileWriter) writeData(ctx context.Context, rank int, items []checkpoint.Item, src Source) (Written, error) {
	if err := w.check(ctx); err != nil {
		return Written{}, err
	}
	if rank < 0 {
		return Written{}, errors.New("the rank is negative")
	}
	var there []string
	earlier := func() (written Written, done bool, err error) {
		var sealed bool
		if there, sealed, err = w.there(ctx); err != nil {
			return Written{}, false, err
		}
		return w.repeated(ctx, rank, items, src, there, sealed)
	}
	if !w.root.far() {
		if written, done, err := earlier(); done || err != nil {
			return written, err
		}
	}
	written, err := w.writeRank(ctx, rank, items, src, there)
	if !errors.Is(err, fs.ErrExist) {
		return written, err
	}
	// The rank has a file already: of an earlier call, or of another writer that has finished since. A bucket is asked
	// only now.
	if written, done, err := earlier(); done || err != nil {
		return written, err
	}
	if w.root.far() && w.alone {
		return w.writeRank(ctx, rank, items, src, there)
	}
	// It stays: its writer may be about to commit it, and no request removes a file on the
	// condition that it is not committed.
	return Written{}, fmt.Errorf("%s: %w; save again under another name: `ckptstore gc --apply` removes the file when this save has ended",
		w.root.path(w.ref, checkpoint.DataFile(rank)), ErrOtherWriter)
}

// ErrOtherWriter reports a file of a rank that an earlier or concurrent writer of the same save
// has made, and that cannot be known to have the bytes of this one.
var ErrOtherWriter = errors.New("another writer of this save has made it")

// Alone makes the writer replace the files of a save that is not committed: the caller knows that
// no other process writes it any more. It returns w.
func (w *FileWriter) Alone() *FileWriter {
	w.alone = true
	return w
}

// writeRank writes the files of a rank. there has the names of leftovers in the directory.
func (w *FileWriter) writeRank(ctx context.Context, rank int, items []checkpoint.Item, src Source, there []string) (Written, error) {
	began := time.Now()
	u, err := w.reuse(ctx, rank, items, src)
	if err != nil {
		return Written{}, err
	}
	timing := WriteTimes{Digest: time.Since(began)}
	x, order, header, err := layOut(rank, items, u)
	if err != nil {
		return Written{}, err
	}
	indexSize := x.EncodedSize()
	claim := &claim{root: w.root, left: x.Files[0].Size + indexSize}
	if err := w.root.reserve(ctx, claim.left); err != nil {
		return Written{}, err
	}
	defer claim.give()
	if err := w.clear(ctx, rank, there); err != nil {
		return Written{}, err
	}

	synced, err := w.writeFile(ctx, x, order, header, src, claim, u, &timing.Digest)
	if err != nil {
		return Written{}, err
	}
	timing.Write = synced.Sub(began) - timing.Digest
	data := x.Encode()
	err = w.root.writeFile(ctx, w.ref, checkpoint.IndexFile(rank), data, object.Exclusive)
	if errors.Is(err, fs.ErrExist) {
		if there, rerr := w.root.readFile(ctx, w.ref, checkpoint.IndexFile(rank)); rerr == nil && bytes.Equal(there, data) {
			err = nil
		}
	}
	if err != nil {
		return Written{}, err
	}
	if err := w.root.sync(ctx, w.ref); err != nil {
		return Written{}, err
	}
	if w.root.far() {
		w.root.wrote.add(w.ref, rank, data)
	}
	written := writtenOf(&x, data)
	timing.Sync = time.Since(synced)
	written.Took = &timing
	return written, nil
}

// writtenOf returns the result for an index whose file is data.
func writtenOf(x *checkpoint.Index, data []byte) Written {
	out := Written{Index: checkpoint.Sum(data)}
	out.Files = append(append(out.Files, x.Files...), checkpoint.File{Name: checkpoint.IndexFile(x.Rank), Size: int64(len(data))})
	for _, e := range x.Entries {
		out.BytesReused += e.Item.Bytes
	}
	for _, i := range x.Own() {
		out.BytesWritten += x.Entries[i].Item.Bytes
	}
	out.BytesReused -= out.BytesWritten
	return out
}

// writeFile writes a data file, the header after the data, so that a truncated file has no
// header. It fills in the digests and sums of x, whose index describes the file from then on.
//
// It adds the time in which it computed digests to digesting, and returns when the bytes were
// written but not yet durable.
func (w *FileWriter) writeFile(ctx context.Context, x checkpoint.Index, order []int, header []byte, src Source, c *claim, u reuse.Plan, digesting *time.Duration) (written time.Time, err error) {
	up, open, err := w.root.begin(c, x.Files[0].Size, func() (object.Upload, error) { return w.create(ctx, x.Rank, x.Files[0]) })
	if err != nil {
		return written, err
	}
	defer up.Abort()
	took, err := put(ctx, up, header, open, x, order, src)
	if err != nil {
		return written, fmt.Errorf("write %s: %w", w.root.path(w.ref, x.Files[0].Name), err)
	}
	*digesting += took
	if err := tieReused(&x, u); err != nil {
		return written, err
	}
	written = time.Now()
	err = up.Commit(ctx)
	if !errors.Is(err, fs.ErrExist) {
		return written, err
	}
	// Such as by a process that died before its index.
	if same, serr := w.root.attests(ctx, w.ref, &x); same || serr != nil {
		return written, serr
	}
	return written, err
}

// attests reports whether the server of a bucket keeps the rank's own file with the size and the
// CRC-32C of the bytes that an index describes. Other bytes have them with a probability of 2^-32;
// a load then finds that they have not the digests of the index.
func (r *Root) attests(ctx context.Context, ref checkpoint.Ref, x *checkpoint.Index) (bool, error) {
	info, err := r.b.Stat(ctx, nameOf(ref, x.Files[0].Name))
	if err != nil || !info.Attested || info.Size != x.Files[0].Size {
		return false, err
	}
	want, ok := fileSum(x)
	return ok && want == info.Sum, nil
}

// put writes a header and the items after it: from where they lie, if the upload and the
// source allow it, else in copies. It returns the time in which it computed digests.
func put(ctx context.Context, up object.Upload, header []byte, c *claim, x checkpoint.Index, order []int, src Source) (digesting time.Duration, err error) {
	var used func(int64) // without a claim, the disk counts all bytes
	if c != nil {
		used = c.use
	}
	_, lasts := src.(Lasting)
	if to, ok := up.(object.Gatherer); ok && lasts {
		return stream.Send(ctx, up, to, header, used, x, order, src)
	}
	return stream.Write(ctx, up, header, used, x, order, src)
}

// there returns the names in the directory of the checkpoint, and whether it is sealed: it
// has a manifest or a receipt, so its bytes may have been committed.
func (w *FileWriter) there(ctx context.Context) (names []string, sealed bool, err error) {
	names, err = w.root.names(ctx, nameOf(w.ref))
	if err != nil {
		return nil, false, fmt.Errorf("list %s, which SetUp creates: %w", w.root.path(w.ref), err)
	}
	receipt, manifest, err := w.root.own(ctx, w.ref, names)
	return names, receipt || manifest, err
}

// repeated handles a write that was done before, perhaps by a call whose answer was lost. The
// log may then name that index, and another choice of reused chunks would give another index.
// Equal bytes are success, and nothing is written. Other bytes are an error if the checkpoint
// is sealed.
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
	if err := w.root.checkFiles(ctx, w.ref, &x, nil); err != nil {
		if sealed {
			return Written{}, false, err
		}
		return Written{}, false, nil // interrupted before all names were durable
	}
	same, err := holdsBytes(ctx, &x, items, src)
	if err != nil {
		return Written{}, false, err
	}
	if !same {
		return refuse()
	}
	if !sealed {
		// The call that wrote it may have been interrupted before this sync.
		err = w.root.sync(ctx, w.ref)
	}
	return writtenOf(&x, data), err == nil, err
}

// holdsBytes reports whether the index describes these bytes.
func holdsBytes(ctx context.Context, x *checkpoint.Index, items []checkpoint.Item, src Source) (bool, error) {
	at := make(map[key]*checkpoint.Entry, len(x.Entries))
	for i := range x.Entries {
		at[itemKey(x.Rank, x.Entries[i].Item)] = &x.Entries[i]
	}
	for i, it := range items {
		data, err := stream.Item(ctx, src, i, it)
		if err != nil {
			return false, err
		}
		digest, err := scan.DigestBytes(ctx, data)
		if err != nil || digest != at[itemKey(x.Rank, it)].Digest {
			return false, err
		}
	}
	return true, nil
}

// clear removes the files of a rank that will be rewritten, with the leftovers of an
// interrupted write. The index is removed first and durably: an index found after a crash
// always matches the data next to it.
//
// A data file that had no index when there was listed may be that of another writer, which has finished since:
// its save may be committed. Then the file stays, and the error is [fs.ErrExist].
func (w *FileWriter) clear(ctx context.Context, rank int, there []string) error {
	if slices.Contains(there, checkpoint.DataFile(rank)) && !slices.Contains(there, checkpoint.IndexFile(rank)) {
		if _, err := w.root.b.Stat(ctx, nameOf(w.ref, checkpoint.IndexFile(rank))); !errors.Is(err, fs.ErrNotExist) {
			return cmp.Or(err, fs.ErrExist)
		}
	}
	for _, file := range []string{checkpoint.IndexFile(rank), checkpoint.DataFile(rank)} {
		cleared := false
		for _, name := range there {
			if name != file && (!strings.HasPrefix(name, file+".") || !strings.HasSuffix(name, object.Partial)) {
				continue
			}
			if _, err := w.root.vacate(ctx, nameOf(w.ref, name)); err != nil {
				return fmt.Errorf("remove leftover %s: %w", w.root.path(w.ref, name), err)
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

// waiting is the number of threads that may wait for a disk while others compute: those of
// two ranks that write past the page cache.
const waiting = 4

// Threads lets Go run as many threads as there are cores while others wait for the disk. A
// write past the page cache holds its thread for milliseconds, and the runtime takes a while
// to notice. A command that saves or loads calls Threads once. A $GOMAXPROCS set by the user
// stays.
func Threads() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + waiting)
	}
}
