package store

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/tensor"
)

// large is a tensor that is large enough to be reused.
type large struct{}

func (large) Item(int) ([]byte, error) { return bytes.Repeat([]byte{7}, data.MinReuse), nil }

// largeSave begins a checkpoint of one large tensor. write writes its files, reusing those of
// bases; commit commits it. Where files have no links, named are the bases of its begin.
func largeSave(t *testing.T, s *Store, step int64, named ...events.CheckpointRef) (write func(bases ...data.Base) data.Written, commit func()) {
	t.Helper()
	b := begun(fmt.Sprintf("step-%d", step))
	b.Step, b.Bases = step, named
	must(t, s, "run", b)
	layout := checkpoint.Layout{Tensors: []checkpoint.Tensor{{
		FQN: "w", DType: tensor.Uint8, Shape: tensor.Shape{data.MinReuse},
		Chunks: []checkpoint.Chunk{{Rank: 0, Box: tensor.Shape{data.MinReuse}.Full()}},
	}}}
	w := s.Data.Writer(refOf("run", b.Checkpoint))
	var got data.Written
	write = func(bases ...data.Base) data.Written {
		t.Helper()
		err := w.SetUp(t.Context(), true)
		if err == nil {
			got, err = w.Reusing(nil, bases...).WriteData(t.Context(), 0, layout.Items(0), large{})
		}
		if err != nil {
			t.Fatal(err)
		}
		done := events.WriteCompleted{Attempt: 1, Checkpoint: b.Checkpoint, IndexDigest: got.Index.String(), BytesWritten: got.BytesWritten}
		for _, f := range got.Files {
			done.Files = append(done.Files, events.File{Name: f.Name, Size: f.Size, From: fromName(f.From)})
		}
		say(t, s, "run", done)
		return got
	}
	commit = func() {
		t.Helper()
		m := checkpoint.Manifest{
			Store: s.ID, Run: "run", Trial: trialName, Checkpoint: b.Checkpoint, Name: b.Name, Step: step, Attempt: 1, WorldSize: 1,
			Ranks: []checkpoint.RankIndex{{Rank: 0, Index: got.Index}}, Layout: layout,
		}
		if _, err := w.Finish(t.Context(), m, decision(s, m)); err != nil {
			t.Fatal(err)
		}
	}
	return write, commit
}

// TestCollectReused: a collection deletes the checkpoint whose chunk a save reuses, after or
// before the chunk was linked. The save is intact either way.
func TestCollectReused(t *testing.T) {
	t.Parallel()
	for _, linked := range []bool{true, false} {
		s := open(t, made(t))
		write, commit := largeSave(t, s, 1)
		write()
		commit()
		base := ask(t, s, query.Resolve, query.Params{Ref: "run@step-1.a1"})
		digest, err := checkpoint.ParseDigest(base.Manifest)
		if err != nil {
			t.Fatal(err)
		}
		committed(t, s, "run", 2)
		bases := data.Base{Ref: RefOf(base), Manifest: digest}
		write, commit = largeSave(t, s, 3)
		var got data.Written
		if linked {
			got = write(bases)
		}
		out := collect(t, s, "last=1")
		if went(out) != "delete step-1.a1" || linked != (out.Freed < data.MinReuse) {
			t.Errorf("linked %t: it did %s and freed %d", linked, went(out), out.Freed)
		}
		if !linked {
			got = write(bases)
		}
		if linked != (got.BytesWritten < data.MinReuse) {
			t.Errorf("linked %t: %d bytes were written", linked, got.BytesWritten)
		}
		commit()
		if list := visible(t, s, "run"); list != "step-2.a1 step-3.a1" {
			t.Errorf("linked %t: left are %s", linked, list)
		}
		// The successor needs the linked file.
		if err := os.Remove(filepath.Join(s.Data.Dir(), "run", trialName, "step-3.a1", got.Files[0].Name)); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Collect(t.Context(), collection.Options{Policy: policy(t, "last=1"), Apply: true}); err == nil {
			t.Errorf("linked %t: step-2.a1 was deleted though %s of step-3.a1 is gone", linked, got.Files[0].Name)
		}
	}
}
