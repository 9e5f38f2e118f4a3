package launch_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/tensor"
)

// saveAll saves, and waits until the checkpoint is committed.
func saveAll(ctx context.Context, c *client.Client, step int64, state client.State, o client.SaveOptions) error {
	s, err := c.Save(ctx, step, state, o)
	if err != nil {
		return err
	}
	return s.Wait(ctx, client.Committed)
}

var savesAgain = workerRole("saves the same plan again", func(ctx context.Context, c *client.Client) error {
	for step := range int64(3) {
		if err := saveAll(ctx, c, step, state(step, c.Rank, c.WorldSize), client.SaveOptions{}); err != nil {
			return err
		}
	}
	grown := state(3, c.Rank, c.WorldSize)
	if c.Rank == 1 {
		grown.Values[1].Data = append(grown.Values[1].Data, " and one more"...)
	}
	if err := saveAll(ctx, c, 3, grown, client.SaveOptions{}); err != nil {
		return err
	}
	for step := range int64(3) {
		if err := load(ctx, c, fmt.Sprintf("step-%d", step), step); err != nil {
			return err
		}
	}
	return nil
})

// An unchanged plan is sent once. If it changes on a rank, that rank sends it
// again, and the work is shared out again.
func TestUnchangedPlan(t *testing.T) {
	t.Parallel()
	newJob(t, 2, savesAgain...).must()
	wantEnded(t, []string{"step-0.a1", "step-1.a1", "step-2.a1", "step-3.a1"}, nil)
	prints := map[int][]string{}
	for _, p := range bodiesOf[events.LocalPlan](t, runOf(t)) {
		prints[p.Rank] = append(prints[p.Rank], p.Fingerprint)
		if full, want := p.Plan.Size > 0, p.Step == 0 || p.Step == 3 && p.Rank == 1; full != want {
			t.Errorf("rank %d at step %d sends its plan in full: %t, want %t", p.Rank, p.Step, full, want)
		}
	}
	for rank, got := range prints {
		if len(got) != 4 || got[0] != got[1] || got[0] != got[2] || (got[0] == got[3]) != (rank == 0) {
			t.Errorf("fingerprints of rank %d: %q", rank, got)
		}
	}
	layouts := bodiesOf[events.GlobalPlan](t, runOf(t))
	if len(layouts) != 4 || !slices.Equal(layouts[0].Layout.Inline, layouts[2].Layout.Inline) || slices.Equal(layouts[0].Layout.Inline, layouts[3].Layout.Inline) {
		t.Errorf("layouts: %v", layouts)
	}
}

var savesUnknown = workerRole("saves what was never planned", func(ctx context.Context, c *client.Client) error {
	mine := state(1, c.Rank, c.WorldSize)
	if c.Rank == 1 { // the plan of the other rank is recorded, and its save aborted
		if err := meet(ctx, c); err != nil {
			return err
		}
		mine.Tensors[0].Global = tensor.Shape{rows + 2, columns}
	}
	s, err := c.Save(ctx, 1, mine, client.SaveOptions{})
	if c.Rank == 0 {
		if err := errors.Join(err, meet(ctx, c)); err != nil {
			return err
		}
	}
	if err == nil {
		err = s.Wait(ctx, client.Committed)
	}
	if err == nil || !strings.Contains(err.Error(), "do not fit together") {
		return fmt.Errorf("plans that do not fit: %w", err)
	}
	return saveAll(ctx, c, 2, state(2, c.Rank, c.WorldSize), client.SaveOptions{})
})

// The coordinator does not know a plan whose only save was aborted: it asks, and
// the rank's trainer sends it in full.
func TestUnknownPlan(t *testing.T) {
	t.Parallel()
	newJob(t, 2, savesUnknown...).must()
	wantEnded(t, []string{"step-2.a1"}, []string{"step-1.a1"})
	var got []bool
	for _, p := range bodiesOf[events.LocalPlan](t, runOf(t)) {
		if p.Step == 2 && p.Rank == 0 {
			got = append(got, p.Plan.Size > 0)
		}
	}
	if !slices.Equal(got, []bool{false, true}) {
		t.Errorf("rank 0 sent its second plan in full: %v, want first not, then, asked, yes", got)
	}
}

var differs = workerRole("has replicas that differ", func(ctx context.Context, c *client.Client) error {
	mine := state(5, c.Rank, c.WorldSize)
	mine.Tensors[1].Data[6] += byte(c.Rank)
	if err := saveAll(ctx, c, 5, mine, client.SaveOptions{}); err != nil {
		emit("%v", err)
		return nil
	}
	return load(ctx, c, "step-5", 5) // rank 0's bytes
})

// Differing copies are reported. The lowest rank's are saved, or none.
func TestReplicasDiffer(t *testing.T) {
	t.Parallel()
	lenient := newJob(t, 2, differs...).must()
	want := []events.Disagreement{{FQN: "bias", Offsets: []int64{0}, Sizes: []int64{7}, Kept: 0, Ranks: []int{1}}}
	if got := one[events.GlobalPlan](t, runOf(t)).Disagreements; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("the global plan lists %v, want %v", got, want)
	}
	wantText(t, lenient.log, "replicas differ between ranks", "fqn=bias")

	strict := newJob(t, 2, differs...)
	strict.cfg.StrictReplicas, strict.cfg.Resume = true, "none"
	strict.loses("step-5.a2")
	for _, rank := range []string{"[rank0] ", "[rank1] "} {
		if got := fmt.Sprint(strict.out.lines(rank)); !strings.Contains(got, "step-5.a2 was aborted: replicas differ between the ranks") || !strings.Contains(got, `"bias"`) {
			t.Errorf("%swas told %s", rank, got)
		}
	}
	wantEnded(t, []string{"step-5.a1"}, []string{"step-5.a2"})
}

var driftsApart = workerRole("has replicas that differ later", func(ctx context.Context, c *client.Client) error {
	mine := state(5, c.Rank, c.WorldSize)
	for step := int64(1); step <= 3; step++ {
		if step == 2 {
			mine.Tensors[1].Data[6] += byte(c.Rank)
		}
		if err := saveAll(ctx, c, step, mine, client.SaveOptions{}); err != nil {
			emit("%v", err)
		}
	}
	return nil
})

// StrictReplicas compares the replicas of every save, also after a save that was
// aborted.
func TestReplicasDifferLater(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, driftsApart...)
	j.cfg.StrictReplicas = true
	j.loses("step-3.a1")
	wantEnded(t, []string{"step-1.a1"}, []string{"step-2.a1", "step-3.a1"})
}

var converts = workerRole("loads as other types", func(ctx context.Context, c *client.Client) error {
	scale := func(dtype tensor.DType, data []byte) client.State {
		full := tensor.Shape{2}
		return client.State{Tensors: []client.Tensor{{Shard: tensor.Shard{FQN: "scale", DType: dtype, Global: full, Box: full.Full()}, Data: data}}}
	}
	single := binary.LittleEndian.AppendUint32(nil, math.Float32bits(1.5))
	single = binary.LittleEndian.AppendUint32(single, math.Float32bits(-3.0078125))
	if err := saveAll(ctx, c, 1, scale(tensor.Float32, single), client.SaveOptions{}); err != nil {
		return err
	}
	ref := client.LoadOptions{Ref: "step-1"}
	brain := scale(tensor.BFloat16, make([]byte, 4))
	if _, err := c.Load(ctx, &brain, ref); err != nil {
		return err
	}
	if want := []byte{0xC0, 0x3F, 0x40, 0xC0}; !slices.Equal(brain.Tensors[0].Data, want) {
		return fmt.Errorf("loaded as bfloat16: %x, want %x", brain.Tensors[0].Data, want)
	}
	strict := ref
	strict.StrictDType = true
	if _, err := c.Load(ctx, &brain, strict); err == nil || !strings.Contains(err.Error(), "float32") {
		return fmt.Errorf("another dtype in a strict load: %w", err)
	}
	boolean := scale(tensor.Bool, make([]byte, 2))
	if _, err := c.Load(ctx, &boolean, ref); err == nil || !strings.Contains(err.Error(), "cannot be converted to bool") {
		return fmt.Errorf("as bool: %w", err)
	}

	more := scale(tensor.Float32, make([]byte, 8))
	fresh := scale(tensor.Float32, []byte("as it is")).Tensors[0]
	fresh.FQN = "fresh"
	more.Tensors = append(more.Tensors, fresh)
	more.Values = []client.Value{{FQN: "epoch", Data: []byte("7")}}
	_, err := c.Load(ctx, &more, ref)
	if err == nil || !strings.Contains(err.Error(), `missing key "fresh"`) || !strings.Contains(err.Error(), `missing key "epoch"`) {
		return fmt.Errorf("with keys that are missing: %w", err)
	}
	partial := ref
	partial.Partial = true
	got, err := c.Load(ctx, &more, partial)
	if err != nil {
		return err
	}
	if !slices.Equal(got.Absent, []string{"fresh", "epoch"}) || string(fresh.Data) != "as it is" ||
		string(more.Values[0].Data) != "7" || !slices.Equal(more.Tensors[0].Data, single) {
		return fmt.Errorf("a partial load gave %+v and %+v", got, more)
	}
	return nil
})

// Elements are converted, and keys that were not saved left out, as the load
// requests.
func TestLoadConvertsAndLeavesOut(t *testing.T) {
	t.Parallel()
	newJob(t, 1, converts...).must()
}

var loadsPath = workerRole("loads a PyTorch checkpoint", func(ctx context.Context, c *client.Client) error {
	emit("resumes %s", c.Resume)
	shape := tensor.Shape{8, 4}
	half := tensor.Box{Offsets: []int64{int64(c.Rank) * 4, 0}, Sizes: []int64{4, 4}}
	got := client.State{Tensors: []client.Tensor{{
		Shard: tensor.Shard{FQN: "hsdp", DType: tensor.Float32, Global: shape, Box: half}, Data: make([]byte, half.Volume()*4),
	}}}
	loaded, err := c.Load(ctx, &got, client.LoadOptions{})
	if err != nil {
		return err
	}
	emit("%s at %d, %d others", filepath.Base(loaded.Checkpoint), loaded.Step, len(loaded.Unread))
	return saveAll(ctx, c, 1, got, client.SaveOptions{})
})

// A job starts from a directory that PyTorch wrote, which stays as it is.
func TestResumeFromPath(t *testing.T) {
	t.Parallel()
	path := filepath.Join("..", "format", "dcp", "testdata", "torch-2.14", "mesh2x2")
	j := newJob(t, 2, loadsPath...)
	j.cfg.Resume = path
	j.must()
	full, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	wantText(t, j.out, "resumes "+full, "mesh2x2 at -1, ")
	if got := one[events.RestoreBegun](t, runOf(t)); got.Checkpoint != full {
		t.Errorf("restore.begun names %q", got.Checkpoint)
	}
	if got := trialOf(t); got.Head != "step-1.a1" {
		t.Errorf("the line's head is %q", got.Head)
	}

	j = newJob(t, 2, loadsPath...)
	j.cfg.Resume = "./nothing"
	if err := j.run(); err == nil || !strings.Contains(err.Error(), "nothing") {
		t.Errorf("resume from nothing: %v", err)
	}
}
