package launch_test

import (
	"context"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
)

// wilful is a storage that does as the store's own, but where a test says otherwise.
type wilful struct {
	local  func(checkpoint.Local) checkpoint.Local
	global func(checkpoint.Layout) checkpoint.Layout
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
	if w.global != nil {
		layout = w.global(layout)
	}
	return w.Writer.PrepareGlobalPlan(ctx, layout)
}

var saysSave = workerRole("says what becomes of a save", func(ctx context.Context, c *client.Client) error {
	say("save: %v", save(ctx, c, 1))
	return nil
})

// A rank's plan that the storage gives back otherwise is refused: the worker copies
// its items in the order in which it has sent them.
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

// A plan of all ranks that the storage gives back otherwise aborts the save.
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
