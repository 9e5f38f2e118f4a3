package launch_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/projections"
)

// wilful is a storage that acts as the store's own, except where a test overrides
// it.
type wilful struct {
	local  func(checkpoint.Local) checkpoint.Local
	global func(checkpoint.Layout) checkpoint.Layout
	plan   func(context.Context) error // before the plan of all ranks is prepared
	wrote  func(*data.Written)
	finish func(ctx context.Context, at data.Location, m checkpoint.Manifest, commit data.Commit) error
}

var _ data.Storage = wilful{}

// Writer implements data.Storage.
func (w wilful) Writer(at data.Location) data.Writer { return wilfulWriter{at.Writer, at, w} }

// Reader implements data.Storage.
func (w wilful) Reader(at data.Location) data.Reader { return at.Reader }

type wilfulWriter struct {
	data.Writer
	at data.Location
	wilful
}

// PrepareLocalPlan implements data.Writer.
func (w wilfulWriter) PrepareLocalPlan(ctx context.Context, local checkpoint.Local) (checkpoint.Local, error) {
	if w.local != nil {
		local = w.local(local)
	}
	return w.Writer.PrepareLocalPlan(ctx, local)
}

// PrepareGlobalPlan implements data.Writer.
func (w wilfulWriter) PrepareGlobalPlan(ctx context.Context, layout checkpoint.Layout) (checkpoint.Layout, error) {
	if w.plan != nil {
		if err := w.plan(ctx); err != nil {
			return checkpoint.Layout{}, err
		}
	}
	if w.global != nil {
		layout = w.global(layout)
	}
	return w.Writer.PrepareGlobalPlan(ctx, layout)
}

// WriteData implements data.Writer.
func (w wilfulWriter) WriteData(ctx context.Context, rank int, items []checkpoint.Item, src data.Source) (data.Written, error) {
	written, err := w.Writer.WriteData(ctx, rank, items, src)
	if w.wrote != nil {
		w.wrote(&written)
	}
	return written, err
}

// Finish implements data.Writer.
func (w wilfulWriter) Finish(ctx context.Context, m checkpoint.Manifest, commit data.Commit) (checkpoint.Receipt, error) {
	if w.finish == nil {
		return w.Writer.Finish(ctx, m, commit)
	}
	return checkpoint.Receipt{}, w.finish(ctx, w.at, m, commit)
}

var saysSave = workerRole("prints the result of a save", func(ctx context.Context, c *client.Client) error {
	emit("save: %v", save(ctx, c, 1))
	return nil
})

// A rank's plan that the storage changes is rejected: the worker copies its items
// in the order in which it has sent them.
func TestStorageChangesLocalPlan(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*checkpoint.Local){
		"rank":    func(l *checkpoint.Local) { l.Rank++ },
		"order":   func(l *checkpoint.Local) { slices.Reverse(l.Items) },
		"fewer":   func(l *checkpoint.Local) { l.Items = l.Items[1:] },
		"name":    func(l *checkpoint.Local) { l.Items[0].Shard.FQN = "other" },
		"size":    func(l *checkpoint.Local) { l.Items[len(l.Items)-1].Bytes++ },
		"nothing": func(*checkpoint.Local) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 1, saysSave...)
			j.store.Storage = wilful{local: func(l checkpoint.Local) checkpoint.Local {
				change(&l)
				return l
			}}
			j.must()
			if name == "nothing" {
				wantText(t, j.out, "save: <nil>")
				wantEnded(t, []string{"step-1.a1"}, nil)
				return
			}
			wantText(t, j.out, "the storage changed the plan of rank 0", "must return the plan as it was given")
			wantEnded(t, nil, nil)
		})
	}
}

// A plan of all ranks that the storage changes aborts the save.
func TestStorageChangesGlobalPlan(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*checkpoint.Layout){
		"tensor": func(l *checkpoint.Layout) { l.Tensors = l.Tensors[1:] },
		"value":  func(l *checkpoint.Layout) { l.Values = l.Values[1:] },
		"dtype":  func(l *checkpoint.Layout) { l.Tensors[0].DType++ },
		"box":    func(l *checkpoint.Layout) { l.Tensors[1].Chunks[0].Box.Sizes[0]-- },
		"rank":   func(l *checkpoint.Layout) { l.Tensors[0].Chunks[0].Rank ^= 1 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, saysSave...)
			j.store.Storage = wilful{global: func(l checkpoint.Layout) checkpoint.Layout {
				change(&l)
				return l
			}}
			j.loses("step-1.a1")
			wantText(t, j.out, "the storage changed the plan of all ranks", "must return the layout as it was given")
			wantEnded(t, nil, []string{"step-1.a1"})
		})
	}
}

// A save whose storage returns no digest of what it wrote is aborted.
func TestStorageGivesNoDigest(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, saysSave...)
	j.store.Storage = wilful{wrote: func(w *data.Written) { w.Index = checkpoint.Digest{} }}
	j.loses("step-1.a1")
	wantText(t, j.out, "the storage gave no digest of what it wrote of rank 0", "must return in Written.Index")
	wantEnded(t, nil, []string{"step-1.a1"})
}

// A storage commits the given manifest, in place, or nothing: then the save is
// aborted, and no caller waits for it.
func TestStorageFinish(t *testing.T) {
	t.Parallel()
	for name, of := range map[string]struct {
		finish func(ctx context.Context, at data.Location, m checkpoint.Manifest, commit data.Commit) error
		says   string // "": it is committed
	}{
		"committed": {func(ctx context.Context, at data.Location, m checkpoint.Manifest, commit data.Commit) error {
			_, err := at.Commit(ctx, m, commit)
			return err
		}, ""},
		"not committed": {func(context.Context, data.Location, checkpoint.Manifest, data.Commit) error {
			return nil
		}, "without a commit: its Finish must call Location.Commit"},
		"other manifest": {func(ctx context.Context, at data.Location, m checkpoint.Manifest, commit data.Commit) error {
			m.Step++
			_, err := at.Commit(ctx, m, commit)
			return err
		}, "the storage commits the manifest"},
		"manifest not there": {func(ctx context.Context, _ data.Location, m checkpoint.Manifest, commit data.Commit) error {
			_, err := commit(ctx, checkpoint.Sum(checkpoint.EncodeManifest(m)))
			return err
		}, "without its manifest"},
		"refusal not passed on": {func(ctx context.Context, _ data.Location, _ checkpoint.Manifest, commit data.Commit) error {
			_, _ = commit(ctx, checkpoint.Sum(nil))
			return nil
		}, "the storage commits the manifest"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 1, saysSave...)
			j.store.Storage = wilful{finish: of.finish}
			if of.says == "" {
				j.must()
				wantEnded(t, []string{"step-1.a1"}, nil)
				return
			}
			j.loses("step-1.a1")
			wantText(t, j.out, of.says)
			wantEnded(t, nil, []string{"step-1.a1"})
		})
	}
}

// A step of the storage for which all saves wait has as much time as a save.
func TestStorageHangs(t *testing.T) {
	t.Parallel()
	hang := func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}
	for step, storage := range map[string]wilful{
		"PrepareGlobalPlan": {plan: hang},
		"Finish": {finish: func(ctx context.Context, _ data.Location, _ checkpoint.Manifest, _ data.Commit) error {
			return hang(ctx)
		}},
	} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 1, saysSave...)
			j.cfg.SaveTimeout = saveEnds
			j.store.Storage = storage
			j.loses("step-1.a1")
			wantEnded(t, nil, []string{"step-1.a1"})
			wantText(t, j.log, step+" of the storage did not end", fmt.Sprint("within ", saveEnds))
		})
	}
}

// sealed is a checkpoint in files of another format, with a value of one byte a rank.
func sealed(t *testing.T, layout checkpoint.Layout) *data.Sealed {
	t.Helper()
	files, err := home.Data.NewPending(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = files.Remove(context.Background()) })
	var parts []data.Part
	for rank := range 2 {
		name := fmt.Sprintf("rank-%d.bin", rank)
		f, err := files.Create(t.Context(), name)
		if err == nil {
			err = errors.Join(f.Write(t.Context(), []byte{byte(rank)}, nil, func() {}), f.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
		parts = append(parts, data.Part{
			Rank:   rank,
			Files:  []data.PlacedFile{{Path: filepath.Join(files.Path(), name), Size: 1, Modified: 1}},
			Chunks: []data.Place{{Item: layout.Items(rank)[0]}},
		})
	}
	from, err := data.NewForeign(files.Files(), files.Path(), "test", layout, parts)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := files.Seal(t.Context(), from)
	if err != nil {
		t.Fatal(err)
	}
	return whole
}

// A save of whole files that a dead trainer has written is committed by the store's own
// writer, also in a job with a storage, which has no files of it. What the store's own
// writer wrote for the storage is committed by the storage.
func TestTakeOverWithStorage(t *testing.T) {
	t.Parallel()
	for name, whole := range map[string]bool{"whole files": true, "the storage's": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := &ghost{t: t}
			g.starts()
			var id string
			if whole {
				id = g.savesBy(func(w *data.FileWriter, rank int, layout checkpoint.Layout) (data.Written, error) {
					return w.KeepData(t.Context(), rank, layout.Items(rank), sealed(t, layout))
				}, 5, true, 0, 1)
			} else {
				id = g.saves(5, true, 0, 1)
			}
			j := newJob(t, 1, resumesFrom...)
			j.store.Storage = wilful{finish: func(context.Context, data.Location, checkpoint.Manifest, data.Commit) error {
				return errors.New("the storage has no file of it")
			}}
			j.must()
			if !whole {
				wantEnded(t, nil, []string{id})
				return
			}
			wantEnded(t, []string{id}, nil)
			wantText(t, j.out, "resumes "+id+"\n")
			report, err := home.Data.Verify(t.Context(), checkpoint.RefOf(runOf(t), projections.DefaultTrial, id), checkpoint.Digest{}, nil)
			if err != nil || !report.Clean() {
				t.Errorf("the checkpoint is not whole: %+v, %v", report, err)
			}
		})
	}
}

// A panic in a step of the storage loses the save or the load, but not the
// trainer.
func TestStoragePanics(t *testing.T) {
	t.Parallel()
	for name, storage := range map[string]wilful{
		"PrepareLocalPlan":  {local: func(checkpoint.Local) checkpoint.Local { panic("no plan") }},
		"PrepareGlobalPlan": {plan: func(context.Context) error { panic("no plan") }},
		"WriteData":         {wrote: func(*data.Written) { panic("no file") }},
		"Finish": {finish: func(context.Context, data.Location, checkpoint.Manifest, data.Commit) error {
			panic("no end")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 1, saysSave...)
			j.store.Storage = storage
			err := j.run()
			if lost := name != "PrepareLocalPlan"; lost != (err != nil) { // the rank learns of it before there is a save
				t.Errorf("the job ended with %v", err)
			}
			wantText(t, j.out, name+" of the storage panicked")
		})
	}
}
