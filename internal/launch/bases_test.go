package launch_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/tensor"
)

const frozenBytes = 3 << 20

// freezing is a state whose large tensor never changes.
func freezing(step int64) client.State {
	tensorOf := func(fqn string, data []byte) client.Tensor {
		shape := tensor.Shape{int64(len(data))}
		return client.Tensor{Shard: tensor.Shard{FQN: fqn, DType: tensor.Uint8, Global: shape, Box: shape.Full()}, Data: data}
	}
	return client.State{Tensors: []client.Tensor{
		tensorOf("frozen", bytes.Repeat([]byte("frozen!!"), frozenBytes/8)),
		tensorOf("moving", bytes.Repeat([]byte{byte(step)}, 1<<20)),
	}}
}

var freezes = workerRole("saves what does not change", func(ctx context.Context, c *client.Client) error {
	first := int64(1)
	if c.Resume != "" {
		first = 3
		got := freezing(0)
		if _, err := c.Load(ctx, &got, client.LoadOptions{Strict: true}); err != nil {
			return err
		}
		if err := same(got, freezing(2)); err != nil {
			return errors.New("the resumed state is another")
		}
	}
	for step := first; step < first+2; step++ {
		s, err := c.Save(ctx, step, freezing(step), client.SaveOptions{})
		if err == nil {
			err = s.Wait(ctx, client.Committed)
		}
		if err != nil {
			return err
		}
	}
	return nil
})

// Unchanged data is written only by the first save, of an attempt and of the
// attempt that resumes from it. Each checkpoint is complete without the others.
func TestUnchangedIsWrittenOnce(t *testing.T) {
	t.Parallel()
	newJob(t, 1, freezes...).must()
	newJob(t, 1, freezes...).must()
	wantEnded(t, []string{"step-1.a1", "step-2.a1", "step-3.a2", "step-4.a2"}, nil)
	for i, w := range bodiesOf[events.WriteCompleted](t, runOf(t)) {
		want := int64(frozenBytes)
		if i == 0 {
			want = 0
		}
		if w.BytesReused != want || w.BytesWritten+w.BytesReused != frozenBytes+1<<20 {
			t.Errorf("%s: %d bytes written and %d reused, want %d reused", w.Checkpoint, w.BytesWritten, w.BytesReused, want)
		}
		if linked := strings.HasSuffix(w.Files[min(1, len(w.Files)-1)].Name, ".link"); linked != (i > 0) {
			t.Errorf("%s: files %v", w.Checkpoint, w.Files)
		}
	}
	for _, gone := range []string{"step-1.a1", "step-2.a1", "step-3.a2"} {
		if err := os.RemoveAll(dirOf(t, gone)); err != nil {
			t.Fatal(err)
		}
	}
	report, err := home.Data.Verify(t.Context(), checkpoint.RefOf(runOf(t), trialOf(t).Name, "step-4.a2"), checkpoint.Digest{}, nil)
	if err != nil || !report.Clean() {
		t.Errorf("findings %v, %v", report.Findings, err)
	}
}

// Where files have no links, unchanged data is named where the first save wrote it. Each save
// lists in its begin which checkpoints it may name.
func TestUnchangedIsNamed(t *testing.T) {
	t.Parallel()
	root := data.OpenBackend(objecttest.NewBucket(), vfs.Default)
	root.OfStore(home.ID)
	for range 2 {
		j := newJob(t, 1, freezes...)
		j.store.Data = root
		j.must()
	}
	wantEnded(t, []string{"step-1.a1", "step-2.a1", "step-3.a2", "step-4.a2"}, nil)
	at := func(id string) events.CheckpointRef {
		return events.CheckpointRef{Run: runOf(t), Trial: trialOf(t).Name, Checkpoint: id}
	}
	last := ""
	for _, b := range bodiesOf[events.CheckpointBegun](t, runOf(t)) {
		if last == "" && len(b.Bases) > 0 || last != "" && !slices.Contains(b.Bases, at(last)) {
			t.Errorf("%s begins with bases %v", b.Checkpoint, b.Bases)
		}
		last = b.Checkpoint
	}
	for i, w := range bodiesOf[events.WriteCompleted](t, runOf(t)) {
		if i > 0 && (w.BytesReused != frozenBytes || len(w.Files) != 3 || w.Files[1].From != at("step-1.a1")) {
			t.Errorf("%s: %d bytes reused, files %+v", w.Checkpoint, w.BytesReused, w.Files)
		}
	}
	report, err := root.Verify(t.Context(), checkpoint.RefOf(runOf(t), trialOf(t).Name, "step-4.a2"), checkpoint.Digest{}, nil)
	if err != nil || !report.Clean() {
		t.Errorf("findings %v, %v", report.Findings, err)
	}
}
