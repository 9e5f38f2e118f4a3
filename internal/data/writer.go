package data

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/object"
	"golang.org/x/sync/errgroup"
)

// FileWriter writes one checkpoint as files.
type FileWriter struct {
	root *Root
	ref  checkpoint.Ref

	reusing bool
	bases   []Base
	warn    func(error) // called with the reason why a file was not reused
	uses    *Uses       // of all ranks; nil: each rank is judged alone
	uploads Uploads     // nil: no upload outlives its process
	begun   []string    // IDs of this writer's own uploads
	alone   bool        // no other process writes the save
}

var _ Writer = (*FileWriter)(nil)

// Writer writes the checkpoint at ref. If ref is invalid, each step returns an error.
func (r *Root) Writer(ref checkpoint.Ref) *FileWriter { return &FileWriter{root: r, ref: ref} }

// wrap adds the step and the checkpoint to an error.
func (w *FileWriter) wrap(step string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s of checkpoint %s: %w", step, w.ref, err)
}

func (w *FileWriter) check(ctx context.Context) error {
	return errors.Join(ctx.Err(), w.ref.Validate())
}

// SetUp implements [Writer].
func (w *FileWriter) SetUp(ctx context.Context, _ bool) error {
	err := w.check(ctx)
	if err == nil && w.root.far() {
		// The ranks of a process ask once: names are written once, so that a directory which
		// another checkpoint takes meanwhile loses nothing.
		err = w.root.wrote.setUp(w.ref, func() error {
			_, err := w.root.free(ctx, w.ref)
			return err
		})
	} else if err == nil {
		_, err = w.root.free(ctx, w.ref)
	}
	if err == nil {
		err = w.root.b.MakeDir(ctx, nameOf(w.ref))
	}
	return w.wrap("set up the directory", err)
}

// PrepareLocalPlan implements [Writer]. It returns the plan unchanged.
func (w *FileWriter) PrepareLocalPlan(ctx context.Context, local checkpoint.Local) (checkpoint.Local, error) {
	err := w.check(ctx)
	if err == nil && local.Rank < 0 {
		err = fmt.Errorf("rank %d is negative", local.Rank)
	}
	if err == nil {
		_, _, _, err = layOut(local.Rank, local.Items, reuse{})
	}
	if err != nil {
		return checkpoint.Local{}, w.wrap(fmt.Sprintf("local plan of rank %d", local.Rank), err)
	}
	return local, nil
}

// PrepareGlobalPlan implements [Writer]. It returns the layout unchanged.
func (w *FileWriter) PrepareGlobalPlan(ctx context.Context, layout checkpoint.Layout) (checkpoint.Layout, error) {
	err := w.check(ctx)
	for _, t := range layout.Tensors {
		for _, c := range t.Chunks {
			if c.Rank < 0 && err == nil {
				err = fmt.Errorf("tensor %q: rank %d is negative", t.FQN, c.Rank)
			}
		}
	}
	for _, v := range layout.Values {
		if v.Rank < 0 && err == nil {
			err = fmt.Errorf("value %q: rank %d is negative", v.FQN, v.Rank)
		}
	}
	if err != nil {
		return checkpoint.Layout{}, w.wrap("global plan", err)
	}
	return layout, nil
}

// Finish implements [Writer].
func (w *FileWriter) Finish(ctx context.Context, m checkpoint.Manifest, commit Commit) (checkpoint.Receipt, error) {
	return w.finish(ctx, m, commit, true)
}

// finish checks the ranks' files first if they are this writer's own.
func (w *FileWriter) finish(ctx context.Context, m checkpoint.Manifest, commit Commit, own bool) (checkpoint.Receipt, error) {
	err := w.check(ctx)
	var sizes map[string]int64
	if err == nil {
		// Another checkpoint may have been put there since the writes.
		sizes, err = w.root.free(ctx, w.ref)
	}
	if err == nil && own {
		err = w.checkWritten(ctx, m, sizes)
	}
	var digest checkpoint.Digest
	if err == nil {
		digest, err = w.createManifest(ctx, m)
	}
	if err != nil {
		return checkpoint.Receipt{}, w.wrap("commit", err)
	}
	decision, err := commit(ctx, digest)
	if err != nil {
		return checkpoint.Receipt{}, w.wrap("commit", err)
	}
	receipt := checkpoint.NewReceipt(m, digest, decision)
	if err := w.root.writeReceipt(ctx, w.ref, receipt); err != nil {
		return checkpoint.Receipt{}, &UnrecordedError{Ref: w.ref, Receipt: receipt, Err: err}
	}
	receipt.Ref = w.ref
	return receipt, nil
}

// UnrecordedError reports that a checkpoint was committed in the log, but its receipt could
// not be written. The checkpoint exists, but readers without the log do not see it.
type UnrecordedError struct {
	Ref     checkpoint.Ref
	Receipt checkpoint.Receipt // for [Root.WriteReceipt]
	Err     error
}

// Error reports the checkpoint and the next step.
func (e *UnrecordedError) Error() string {
	return fmt.Sprintf("checkpoint %s is committed at sequence %d, but its receipt could not be written: %v; "+
		"it is repaired when the store is opened again", e.Ref, e.Receipt.Sequence, e.Err)
}

// Unwrap returns the error of the write.
func (e *UnrecordedError) Unwrap() error { return e.Err }

// finishers is the number of ranks whose indexes are checked at a time.
const finishers = 8

// checkWritten checks that every index in m and its data exist with the right size: a
// checkpoint must not be committed if a file disappeared after its write. sizes has those that
// a listing has, by name.
func (w *FileWriter) checkWritten(ctx context.Context, m checkpoint.Manifest, sizes map[string]int64) error {
	items := itemsByRank(m.Layout)
	indexed := make(map[int]bool, len(m.Ranks))
	for _, r := range m.Ranks {
		indexed[r.Rank] = true
	}
	for rank := range items {
		if !indexed[rank] {
			return fmt.Errorf("the layout has chunks of rank %d, the manifest has no index of it", rank)
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(finishers)
	for _, r := range m.Ranks {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			x, err := w.written(ctx, r)
			if err != nil {
				return err
			}
			if missing, extra := compareItems(&x, items[r.Rank]); len(missing)+len(extra) > 0 {
				return fmt.Errorf("index of rank %d is not that of the layout: %s",
					r.Rank, strings.Join(append(missing, extra...), ", "))
			}
			if x.Adopted() {
				return w.root.checkUnchanged(ctx, &x)
			}
			return w.root.checkFiles(ctx, w.ref, &x, sizes)
		})
	}
	return g.Wait()
}

// written returns the index that a rank has written: its own copy, if this process made the
// index and a bucket acknowledged it, else the index in the directory.
func (w *FileWriter) written(ctx context.Context, r checkpoint.RankIndex) (checkpoint.Index, error) {
	if data := w.root.wrote.get(w.ref, r.Rank); data != nil && checkpoint.Sum(data) == r.Index {
		return checkpoint.DecodeIndex(data)
	}
	return w.root.readIndex(ctx, w.ref, r)
}

// itemsByRank returns the items that every rank has to write.
func itemsByRank(l checkpoint.Layout) map[int][]checkpoint.Item {
	items := map[int][]checkpoint.Item{}
	for _, t := range l.Tensors {
		for _, c := range t.Chunks {
			it := checkpoint.Item{}
			it.Shard.FQN, it.Shard.DType, it.Shard.Global, it.Shard.Box = t.FQN, t.DType, t.Shape, c.Box
			it.Bytes = it.Shard.Bytes()
			items[c.Rank] = append(items[c.Rank], it)
		}
	}
	for _, v := range l.Values {
		it := checkpoint.Item{Value: true, Bytes: v.Bytes, PerRank: v.PerRank}
		it.Shard.FQN = v.FQN
		items[v.Rank] = append(items[v.Rank], it)
	}
	return items
}

// createManifest makes the manifest durable under the name of its digest. It fails if that
// name holds other bytes; the same bytes are success.
func (w *FileWriter) createManifest(ctx context.Context, m checkpoint.Manifest) (checkpoint.Digest, error) {
	data := checkpoint.EncodeManifest(m)
	digest := checkpoint.Sum(data)
	if err := w.root.create(ctx, w.ref, checkpoint.ManifestFile(digest), data); err != nil {
		return digest, err
	}
	return digest, w.root.sync(ctx, w.ref)
}

// create makes a small file under a unique name: the same bytes are success, others a
// [*CorruptError]. The name is not durable yet.
func (r *Root) create(ctx context.Context, ref checkpoint.Ref, file string, data []byte) error {
	err := r.writeFile(ctx, ref, file, data, object.Exclusive)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	there, err := r.readFile(ctx, ref, file)
	if err == nil && string(there) != string(data) {
		err = &CorruptError{
			File: r.path(ref, file), Block: -1, Problem: "a file of that name holds other bytes",
			Want: checkpoint.Sum(data).String(), Got: checkpoint.Sum(there).String(),
		}
	}
	return err
}

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
	if !w.root.far() {
		var sealed bool
		var err error
		if there, sealed, err = w.there(ctx); err != nil {
			return Written{}, err
		}
		if written, done, err := w.repeated(ctx, rank, items, src, there, sealed); done || err != nil {
			return written, err
		}
	}
	written, err := w.writeRank(ctx, rank, items, src, there)
	if !errors.Is(err, fs.ErrExist) {
		return written, err
	}
	// A file of that name is there. A bucket is asked only now whether it is that of an earlier call.
	if w.root.far() {
		var sealed bool
		if there, sealed, err = w.there(ctx); err != nil {
			return Written{}, err
		}
		if written, done, err := w.repeated(ctx, rank, items, src, there, sealed); done || err != nil {
			return written, err
		}
		if w.alone {
			return w.writeRank(ctx, rank, items, src, there)
		}
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
func (w *FileWriter) writeFile(ctx context.Context, x checkpoint.Index, order []int, header []byte, src Source, c *claim, u reuse, digesting *time.Duration) (written time.Time, err error) {
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
	_, lasts := src.(Lasting)
	if to, ok := up.(object.Gatherer); ok && lasts {
		return send(ctx, up, to, header, c, x, order, src)
	}
	s := newStream(up, header, c)
	err = s.run(ctx, x, order, src)
	return s.digesting, err
}

// Upload is a file of a checkpoint that is sent in pieces to a server. The server keeps them
// after the sender has died.
type Upload struct {
	File  string // within the checkpoint's directory
	ID    string // of the server
	Token string // in the metadata of the object that the upload becomes
	Piece int64  // bytes of a piece
}

// unfinished returns the backend's name of the upload.
func (u Upload) unfinished() object.Unfinished {
	return object.Unfinished{ID: u.ID, Token: u.Token, Piece: u.Piece}
}

// Uploads records the uploads of a checkpoint, so that they do not depend on the process that
// began them.
type Uploads interface {
	// Began durably records an upload of a rank, before its first piece is sent. If it fails,
	// so does the write.
	Began(ctx context.Context, rank int, u Upload) error
	// Left returns the newest upload that was recorded for a rank, if any.
	Left(rank int) (Upload, bool)
}

// Resuming makes the writer record its uploads, and continue those of earlier processes: it
// does not send again what the server has. It returns w. Where a file is written on a disk,
// it changes nothing.
func (w *FileWriter) Resuming(u Uploads) *FileWriter {
	w.uploads = u
	return w
}

// create begins the data file of a rank, or continues what an earlier process sent of it.
func (w *FileWriter) create(ctx context.Context, rank int, f checkpoint.File) (object.Upload, error) {
	name := nameOf(w.ref, f.Name)
	backend, resumes := w.root.b.(object.Resumer)
	if !resumes || w.uploads == nil {
		return w.root.b.Create(ctx, name, f.Size, object.Exclusive)
	}
	var up object.Upload
	var err error
	// An upload of its own that has failed is being removed.
	if left, ok := w.uploads.Left(rank); ok && left.File == f.Name && !slices.Contains(w.begun, left.ID) {
		up, err = backend.Resume(ctx, name, f.Size, object.Exclusive, left.unfinished())
	} else {
		up, err = w.root.b.Create(ctx, name, f.Size, object.Exclusive)
	}
	if err != nil {
		return nil, err
	}
	if outlives, ok := up.(object.Outliving); ok {
		outlives.OnBegin(func(ctx context.Context, as object.Unfinished) error {
			w.begun = append(w.begun, as.ID)
			return w.uploads.Began(ctx, rank, Upload{f.Name, as.ID, as.Token, as.Piece})
		})
	}
	return up, nil
}

// Uploads returns the unfinished uploads below the root. Of each it has the file and the ID.
func (r *Root) Uploads(ctx context.Context) (map[checkpoint.Ref][]Upload, error) {
	backend, resumes := r.b.(object.Resumer)
	if !resumes {
		return nil, nil
	}
	found := map[checkpoint.Ref][]Upload{}
	err := backend.Uploads(ctx, "", func(name string, u object.Unfinished) {
		if of := strings.Split(name, "/"); len(of) == 4 {
			ref := checkpoint.Ref{Run: of[0], Trial: of[1], Checkpoint: of[2]}
			found[ref] = append(found[ref], Upload{File: of[3], ID: u.ID})
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list the unfinished uploads below %s: %w", r.Dir(), err)
	}
	return found, nil
}

// Discard removes what a server has of an upload that no process continues. If it has nothing,
// that is success.
func (r *Root) Discard(ctx context.Context, ref checkpoint.Ref, u Upload) error {
	err := ref.Validate()
	backend, resumes := r.b.(object.Resumer)
	if err == nil && resumes {
		err = backend.Discard(ctx, nameOf(ref, u.File), u.unfinished())
	}
	if err != nil {
		return fmt.Errorf("discard the unfinished upload %s of checkpoint %s: %w", u.ID, ref, err)
	}
	return nil
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
		data, err := itemBytes(ctx, src, i, it)
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

// checkFiles checks that the files of an index exist and have their recorded size. sizes has
// those that a listing has, by name.
func (r *Root) checkFiles(ctx context.Context, ref checkpoint.Ref, x *checkpoint.Index, sizes map[string]int64) error {
	for _, f := range x.Files {
		size, told := sizes[f.Name]
		if !told || f.From != (checkpoint.Ref{}) {
			var err error
			if size, err = r.FileSize(ctx, f.In(ref), f.Name); err != nil {
				return fmt.Errorf("file of rank %d: %w", x.Rank, err)
			}
		}
		if size != f.Size {
			return fmt.Errorf("file of rank %d: %s has %d bytes, %d were written", x.Rank, r.path(f.In(ref), f.Name), size, f.Size)
		}
	}
	return nil
}

// clear removes the files of a rank that will be rewritten, with the leftovers of an
// interrupted write. The index is removed first and durably: an index found after a crash
// always matches the data next to it.
func (w *FileWriter) clear(ctx context.Context, rank int, there []string) error {
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
