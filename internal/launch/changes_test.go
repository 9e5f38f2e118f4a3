package launch_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// changes are ways in which a state may change between two saves. All keep as
// many FQNs and bytes as possible, so that an old plan seems to fit.
var changes = []func(s *client.State, rank int){
	func(*client.State, int) {},
	reshaped,
	func(s *client.State, _ int) { s.Tensors[1].DType = tensor.Int8 },
	func(s *client.State, rank int) { // the ranks swap places
		s.Tensors[0].Box.Offsets[0] = int64(1-rank) * rows / 2
	},
	func(s *client.State, _ int) { // one key more
		s.Tensors = append(s.Tensors, s.Tensors[1])
		s.Tensors[2].FQN = "bias.ema"
	},
	func(s *client.State, rank int) { // one key less, on one rank
		if rank == 1 {
			s.Tensors = s.Tensors[:1]
		}
	},
	func(s *client.State, _ int) { slices.Reverse(s.Tensors) },
	func(s *client.State, _ int) { s.Values[1].PerRank = false },
	func(s *client.State, _ int) { s.Tensors[1].FQN = "scale" },
	// Back and forth, by plans that are known from then on.
	func(*client.State, int) {}, reshaped, func(*client.State, int) {}, reshaped, func(*client.State, int) {},
}

// reshaped gives a tensor another shape of as many bytes.
func reshaped(s *client.State, _ int) {
	bias := &s.Tensors[1]
	bias.Global, bias.Box = tensor.Shape{7, 1}, tensor.Shape{7, 1}.Full()
}

func changed(step int64, rank int) client.State {
	s := state(step, rank, 2)
	changes[step](&s, rank)
	return s
}

var changesState = workerRole("changes its state", func(ctx context.Context, c *client.Client) error {
	for step := range int64(len(changes)) {
		if err := saveAll(ctx, c, step, changed(step, c.Rank), client.SaveOptions{}); err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
	}
	// One rank uses a known plan; the other's does not fit it.
	mine := state(99, c.Rank, 2)
	if c.Rank == 1 {
		mine.Tensors[0].Box.Offsets[0]--
	}
	err := saveAll(ctx, c, 99, mine, client.SaveOptions{})
	if err == nil || !strings.Contains(err.Error(), "step-99.a1 was aborted: the plans of the ranks do not fit together: tensor \"layer.weight\"") {
		return fmt.Errorf("plans that do not fit: %w", err)
	}
	for step := range int64(len(changes)) {
		want, got := changed(step, c.Rank), changed(step, c.Rank)
		overwrite(got)
		if _, err := c.Load(ctx, &got, client.LoadOptions{Ref: fmt.Sprintf("step-%d", step), Strict: step != 5 || c.Rank == 0, StrictDType: true}); err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
		if step == 7 { // shared now: the lowest rank's
			want.Values[1] = changed(step, 0).Values[1]
		}
		if err := same(got, want); err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
	}
	return nil
})

// A state whose structure has changed since the last save is never written by the
// old plan: it is planned again, or, if the ranks do not agree, not saved.
func TestStructureChanges(t *testing.T) {
	t.Parallel()
	newJob(t, 2, changesState...).loses("step-99.a1")
	committed, aborted := ended(t, runOf(t))
	if len(committed) != len(changes) || !slices.Equal(aborted, []string{"step-99.a1"}) {
		t.Errorf("committed %q, aborted %q", committed, aborted)
	}
}

var stepsOn = workerRole("steps on while it is saved", func(ctx context.Context, c *client.Client) error {
	var saves []*client.Save
	for i, name := range []string{"first", "second"} {
		s, err := c.Save(ctx, int64(i+3), state(int64(i+3), 0, 1), client.SaveOptions{Name: name})
		if err != nil {
			return err
		}
		saves = append(saves, s)
		for step := range int64(3) {
			if err := c.Report(ctx, 10*int64(i+1)+step, map[string]any{"loss": 1.0}); err != nil {
				return err
			}
		}
	}
	emit("at step 22")
	for i, s := range saves {
		if err := s.Wait(ctx, client.Committed); err != nil {
			return err
		}
		if err := load(ctx, c, s.Checkpoint, int64(i+3)); err != nil {
			return err
		}
	}
	return nil
})

// The step of a checkpoint is that of the save call, however far the training is
// when its files are written: in the log, in the files, and in loads.
func TestStepIsThatOfTheCall(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, stepsOn...)
	g := j.gated("r00000.safetensors")
	j.start()
	g.await(t)
	j.out.await(t, 1, "at step 22")
	close(g.open)
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
	for id, step := range map[string]int64{"first.a1": 3, "second.a1": 4} {
		row, err := views{home.Views()}.Resolve(t.Context(), j.cfg.Run+"@"+id)
		if err != nil {
			t.Fatal(err)
		}
		m, err := home.Data.Reader(checkpoint.RefOf(j.cfg.Run, projections.DefaultTrial, id)).ReadMetadata(t.Context())
		if err != nil || m.Step != step || row.Step != step {
			t.Errorf("%s: step %d in the manifest and %d in the log, want %d: %v", id, m.Step, row.Step, step, err)
		}
	}
}

var scribbles = role("scribbles into its sealed slots", func(ctx context.Context, args []string) error {
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	large := func(step int64) client.State {
		var s client.State
		for i := range int64(3) {
			data := bytes.Repeat([]byte{7}, 2<<20)
			if step%2 == 0 { // otherwise they are equal, and written once
				data[0] = byte(i)
			}
			shape := tensor.Shape{int64(len(data))}
			s.Tensors = append(s.Tensors, client.Tensor{Shard: tensor.Shard{FQN: fmt.Sprint("w", i), DType: tensor.Uint8, Global: shape, Box: shape.Full()}, Data: data})
		}
		return s
	}
	for step := range int64(7) { // the last save of a job must not be lost
		s, err := c.Save(ctx, step, large(step), client.SaveOptions{})
		if err != nil {
			return err
		}
		stop, done := make(chan struct{}), make(chan error, 1)
		go func() { done <- scribble(args[0], stop) }()
		err = s.Wait(ctx, client.Committed)
		close(stop)
		if step%2 == 1 && err != nil && strings.Contains(err.Error(), "changed while they were saved") {
			err = nil
		}
		if err := errors.Join(err, <-done); err != nil {
			return err
		}
	}
	return nil
})

// scribble modifies the slots of a directory until stop.
func scribble(dir string, stop <-chan struct{}) error {
	paths, err := filepath.Glob(filepath.Join(dir, "*", "*", "r00000.save.*"))
	if err != nil || len(paths) == 0 {
		return fmt.Errorf("slots %q: %w", paths, err)
	}
	var slots [][]byte
	for _, path := range paths {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		info, err := f.Stat()
		if err != nil {
			return err
		}
		data, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
		slots = append(slots, data)
	}
	for n := byte(0); ; n++ {
		for _, data := range slots {
			for at := 1<<20 + 100; at < len(data); at += 4096 { // not the first byte of a tensor
				data[at] = n
			}
		}
		select {
		case <-stop:
			for _, data := range slots {
				err = errors.Join(err, unix.Munmap(data))
			}
			return err
		default:
		}
	}
}

// A worker that writes into sealed memory cannot make a checkpoint differ from
// its own checksums: they are of the written bytes. Tensors that were equal, and
// written only once, must stay equal to the end.
func TestScribbledSlots(t *testing.T) {
	t.Parallel()
	shared := ownMemory(t)
	j := newJob(t, 1, append(slices.Clone(scribbles), shared)...)
	j.store.Shared = shared
	j.must()
	committed, _ := ended(t, runOf(t))
	for _, id := range []string{"step-0.a1", "step-2.a1", "step-4.a1", "step-6.a1"} {
		if !slices.Contains(committed, id) {
			t.Errorf("%s is not committed", id)
		}
	}
	for _, id := range committed {
		report, err := home.Data.Verify(t.Context(), checkpoint.RefOf(j.cfg.Run, projections.DefaultTrial, id), checkpoint.Digest{}, nil)
		if err != nil || !report.Clean() {
			t.Errorf("%s: findings %v, %v", id, report.Findings, err)
		}
	}
}
