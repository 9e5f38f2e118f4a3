package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
	"golang.org/x/sync/errgroup"
)

// FileWriter writes one checkpoint as files.
type FileWriter struct {
	root *Root
	ref  checkpoint.Ref

	reusing bool
	bases   []Base
	say     func(error) // why something was not reused
	uses    *Uses       // of all ranks; nil: each is judged alone
}

var _ Writer = (*FileWriter)(nil)

// Writer writes the checkpoint at ref. An invalid ref is an error of each
// step.
func (r *Root) Writer(ref checkpoint.Ref) *FileWriter { return &FileWriter{root: r, ref: ref} }

// wrap says which checkpoint a step was about.
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
	if err == nil {
		err = w.root.free(ctx, w.ref)
	}
	if err == nil {
		err = w.root.b.MakeDir(ctx, nameOf(w.ref))
	}
	return w.wrap("set up the directory", err)
}

// PrepareLocalPlan implements [Writer]. The plan comes back as it is.
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

// PrepareGlobalPlan implements [Writer]. The layout comes back as it is.
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
	err := w.check(ctx)
	if err == nil {
		// What somebody has put there since the writes.
		err = w.root.free(ctx, w.ref)
	}
	if err == nil {
		err = w.checkWritten(ctx, m)
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

// UnrecordedError says that a checkpoint was committed in the log, and that
// its receipt could not be written: it exists, but readers without the log do
// not see it.
type UnrecordedError struct {
	Ref     checkpoint.Ref
	Receipt checkpoint.Receipt // for [Root.WriteReceipt]
	Err     error
}

// Error names the checkpoint and the next step.
func (e *UnrecordedError) Error() string {
	return fmt.Sprintf("checkpoint %s is committed at sequence %d, but its receipt could not be written: %v; "+
		"it is repaired when the store is opened again", e.Ref, e.Receipt.Sequence, e.Err)
}

// Unwrap is the error of the write.
func (e *UnrecordedError) Unwrap() error { return e.Err }

// finishers is how many ranks' indexes are checked at a time.
const finishers = 8

// checkWritten finds every index that m names, and the data that it vouches
// for, in place and of the right size: a file that went away since it was
// written must not be committed.
func (w *FileWriter) checkWritten(ctx context.Context, m checkpoint.Manifest) error {
	items := itemsByRank(m.Layout)
	for rank := range items {
		if !slices.ContainsFunc(m.Ranks, func(r checkpoint.RankIndex) bool { return r.Rank == rank }) {
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
			x, err := w.root.readIndex(ctx, w.ref, r)
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
			return w.root.checkFiles(ctx, w.ref, &x)
		})
	}
	return g.Wait()
}

// itemsByRank is what every rank has to have written.
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

// createManifest makes the manifest durable under the name of its digest. It
// fails if that name is taken by other bytes; the same bytes are success.
func (w *FileWriter) createManifest(ctx context.Context, m checkpoint.Manifest) (checkpoint.Digest, error) {
	data := checkpoint.EncodeManifest(m)
	digest := checkpoint.Sum(data)
	if err := w.root.create(ctx, w.ref, checkpoint.ManifestFile(digest), data); err != nil {
		return digest, err
	}
	return digest, w.root.sync(ctx, w.ref)
}

// create makes a small file whose name nothing else may have: the same bytes
// are success, others a [*CorruptError]. The name is not durable yet.
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
