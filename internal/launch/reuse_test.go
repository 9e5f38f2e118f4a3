package launch_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// layersOf is a rank's part of 10 layers, each wholly on one rank, of 1 MiB and a
// bit. Those from changed on have other bytes for each seed.
func layersOf(rank, world, changed int, seed uint64) (s client.State) {
	const layers, size = 10, 1<<20 + 4096
	for i := range layers {
		if i*world/layers != rank {
			continue
		}
		own := uint64(0)
		if i >= changed {
			own = seed
		}
		data := make([]byte, size)
		_, _ = rand.NewChaCha8([32]byte{byte(i), byte(own)}).Read(data)
		shape := tensor.Shape{size}
		s.Tensors = append(s.Tensors, client.Tensor{
			Shard: tensor.Shard{FQN: fmt.Sprintf("layers.%d", i), DType: tensor.Uint8, Global: shape, Box: shape.Full()}, Data: data,
		})
	}
	return s
}

// savesLayers saves the layers. Those from CHANGED on are of SEED.
var savesLayers = role("saves layers", func(ctx context.Context, args []string) error {
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	changed, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	seed, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	return saveAll(ctx, c, int64(seed), layersOf(c.Rank, c.WorldSize, changed, uint64(seed)), client.SaveOptions{})
})

func layersJob(t *testing.T, trial string, ranks, changed, seed int) *job {
	command := append([]string{}, savesLayers...)
	j := newJob(t, ranks, append(command, fmt.Sprint(changed), fmt.Sprint(seed))...)
	j.cfg.Trial = trial
	return j
}

// writtenOf is the bytes that a save has written, and reused.
func writtenOf(t *testing.T, run, trial, id string) (written, reused int64) {
	t.Helper()
	for _, r := range logOf(t, run) {
		body, err := r.Body()
		if err != nil {
			t.Fatal(err)
		}
		if w, ok := body.(*events.WriteCompleted); ok && r.Scope.Trial == trial && w.Checkpoint == id {
			written, reused = written+w.BytesWritten, reused+w.BytesReused
		}
	}
	return written, reused
}

// wantWritten checks which part of a save was written, and verifies it.
func wantWritten(t *testing.T, run, trial, id string, most float64) {
	t.Helper()
	written, reused := writtenOf(t, run, trial, id)
	part := float64(written) / float64(written+reused)
	t.Logf("%s/%s@%s: %d bytes written, %d reused: %.1f %%", run, trial, id, written, reused, 100*part)
	if part > most || reused == 0 {
		t.Errorf("%.3f of the bytes were written, want %.3f at most", part, most)
	}
	report, err := home.Data.Verify(t.Context(), checkpoint.RefOf(run, trial, id), checkpoint.Digest{}, nil)
	if err != nil || !report.Clean() {
		t.Errorf("findings %v, %v", report.Findings, err)
	}
}

// A save that is shared out to other ranks than the previous save reuses its
// files nevertheless: half of each is used by all of them together.
func TestReuseOnOtherRanks(t *testing.T) {
	t.Parallel()
	for _, ranks := range [][2]int{{2, 3}, {3, 2}, {1, 4}, {2, 2}} {
		t.Run(fmt.Sprintf("%d to %d", ranks[0], ranks[1]), func(t *testing.T) {
			t.Parallel()
			layersJob(t, projections.DefaultTrial, ranks[0], 9, 1).must()
			layersJob(t, projections.DefaultTrial, ranks[1], 9, 2).must()
			wantWritten(t, runOf(t), projections.DefaultTrial, "step-2.a2", 0.101)
		})
	}
}

// The first save of a trial reuses the checkpoint that it was forked from, of any
// run, and data that other trials of its run have frozen.
func TestReuseOfOtherTrials(t *testing.T) {
	t.Parallel()
	t.Run("forked", func(t *testing.T) {
		t.Parallel()
		layersJob(t, projections.DefaultTrial, 2, 9, 1).must()
		from := runOf(t)
		fork := from + " fork"
		created, err := events.NewDecision((&ghost{t: t}).stamp(), events.Aggregate{Run: fork, Trial: "t1"}, &events.TrialCreated{
			Parent: &events.TrialParent{Run: from, Trial: projections.DefaultTrial, Checkpoint: "step-1.a1"},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := home.Log.Decide(t.Context(), created, 0); err != nil {
			t.Fatal(err)
		}
		j := layersJob(t, "t1", 2, 9, 2)
		j.cfg.Run = fork
		j.must()
		wantWritten(t, fork, "t1", "step-2.a1", 0.101)
	})
	t.Run("second trial", func(t *testing.T) {
		t.Parallel()
		for n := range 3 {
			layersJob(t, fmt.Sprintf("t%d", n), 2, 8, n+1).must()
			id := fmt.Sprintf("step-%d.a1", n+1)
			if n > 0 {
				wantWritten(t, runOf(t), fmt.Sprintf("t%d", n), id, 0.201)
			} else if written, reused := writtenOf(t, runOf(t), "t0", id); reused != 0 {
				t.Errorf("the first trial: %d bytes written, %d reused", written, reused)
			}
		}
	})
}

// A copy of an earlier import is not written again, nor is what a training
// continues to save unchanged.
func TestReuseOfImports(t *testing.T) {
	t.Parallel()
	run := runOf(t)
	layersJob(t, projections.DefaultTrial, 1, 10, 1).must()
	// As a program's own checkpoint, it is one of safetensors.
	path := filepath.Join(t.TempDir(), "model.safetensors")
	data, err := os.ReadFile(filepath.Join(dirOf(t, "step-1.a1"), "r00000.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	from, err := store.OpenForeign(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	const all = 10 * (1<<20 + 4096)
	other := run + " other"
	for n, c := range []struct {
		run, id string
		written int64
	}{{run, "step-5.a2", 0}, {other, "step-5.a1", all}, {other, "step-5.a2", 0}} {
		read := int64(0)
		got, err := importInto(t.Context(), t, c.run, from, func(i *session.ImportConfig) { i.Read = func(n int64) { read += n } })
		if err != nil || got.Checkpoint != c.id || got.Written != c.written || got.Bytes != all || read != all {
			t.Errorf("import %d: %+v, %v, %d bytes read", n, got, err, read)
		}
		written, reused := writtenOf(t, c.run, projections.DefaultTrial, c.id)
		t.Logf("import %d: %d bytes written, %d reused", n, written, reused)
		if written != c.written || written+reused != all {
			t.Errorf("import %d: %d bytes written, %d reused", n, written, reused)
		}
	}
	// A changed copy, and then the earlier import from that path.
	j := layersJob(t, projections.DefaultTrial, 1, 0, 9)
	j.cfg.Run, j.cfg.Resume = other, "none"
	j.must()
	if got, err := importInto(t.Context(), t, other, from, nil); err != nil || got.Written != 0 {
		t.Errorf("imported again after a save: %+v, %v", got, err)
	}
	j = layersJob(t, projections.DefaultTrial, 1, 9, 10)
	j.cfg.Run = other
	j.must()
	wantWritten(t, other, projections.DefaultTrial, "step-10.a5", 0.101)
}

// askedViews answers as the views of another process do: of an error it returns
// only the text and the kind.
type askedViews struct{ session.Views }

func (v askedViews) Resolve(ctx context.Context, ref string) (projections.Checkpoint, error) {
	c, err := v.Views.Resolve(ctx, ref)
	if errors.Is(err, projections.ErrNotFound) {
		err = fmt.Errorf("%w: %s", projections.ErrNotFound, err.Error())
	}
	return c, err
}

// The first save of a run has nothing to reuse, which causes no warning.
func TestFirstSaveWarnsOfNothing(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, saves...)
	j.store.Views = askedViews{j.store.Views}
	j.must()
	if strings.Contains(j.log.String(), "reused") {
		t.Errorf("the trainer logged:\n%s", j.log)
	}
}
