package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/reuse"
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
	uses    *reuse.Uses // of all ranks; nil: each rank is judged alone
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
		_, _, _, err = layOut(local.Rank, local.Items, reuse.Plan{})
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
