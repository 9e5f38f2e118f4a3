package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/tensor"
)

// bulkVerb is the first argument of this program as a rank that saves or loads many bytes, and
// trains nothing.
const bulkVerb = "bulk"

// bulk is a rank of such a run.
type bulk struct {
	c      *client.Client
	record *recorder
	start  int64 // of the process
	state  client.State
	work   int           // operations of a step
	device time.Duration // of a step, in which the rank's CPU is idle
}

// runBulk saves the state if there is nothing to resume from. Otherwise it loads it, compares
// every byte, and records how long the load took. With steps it computes and saves, and records
// how long that took.
func runBulk(ctx context.Context, args []string) (err error) {
	start := monotonic()
	flags := flag.NewFlagSet("bulk", flag.ContinueOnError)
	dir := flags.String("lives", "", "directory of the ranks' records")
	size := flags.Int64("bytes", 64<<20, "bytes of the state")
	own := flags.Bool("own", false, "each rank has tensors of its own, instead of the same")
	stay := flags.Bool("stay", false, "after the save, wait for the end of the group")
	steps := flags.Int("steps", 0, "steps to compute; 0: save or load only")
	warm := flags.Int("warm", 0, "steps before those whose time is recorded")
	every := flags.Int("every", 50, "steps between two saves")
	b := &bulk{start: start}
	flags.IntVar(&b.work, "work", 0, "operations of a step")
	flags.DurationVar(&b.device, "device", 0, "time of a step in which a device works and the CPU is idle")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.record, err = newRecorder(*dir, identify(start)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.record.close()) }()
	if b.c, err = client.Connect(ctx); err != nil {
		return err
	}
	defer b.c.Close()
	prefix := ""
	if *own {
		prefix = fmt.Sprintf("rank%d.", b.c.Rank)
	}
	b.state = bulkState(prefix, *size)
	switch {
	case *steps > 0:
		return b.train(ctx, *warm, *steps, *every)
	case b.c.Resume != "":
		return b.load(ctx)
	}
	if err := b.save(ctx, 1); err != nil || !*stay {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

// bulkState has one large tensor, some of the usual size, and many small ones.
func bulkState(prefix string, size int64) (s client.State) {
	add := func(n int64) {
		t := client.Tensor{Shard: tensor.Shard{
			FQN: fmt.Sprintf("%st%03d", prefix, len(s.Tensors)), DType: tensor.Uint8, Global: tensor.Shape{n}, Box: tensor.Shape{n}.Full(),
		}}
		t.Data = bulkContent(uint64(len(s.Tensors)), n)
		s.Tensors = append(s.Tensors, t)
	}
	add(size / 4)
	for range 24 {
		add(size / 32)
	}
	for range 200 {
		add(1000)
	}
	return s
}

// bulkContent returns bytes that no other tensor has.
func bulkContent(seed uint64, n int64) []byte {
	out := make([]byte, 0, n+8)
	for x := seed << 40; int64(len(out)) < n; x++ {
		z := (x + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9
		out = binary.LittleEndian.AppendUint64(out, z^z>>27)
	}
	return out[:n]
}

func (b *bulk) save(ctx context.Context, step int64) error {
	save, err := b.c.Save(ctx, step, b.state, client.SaveOptions{})
	if err != nil {
		return err
	}
	return b.committed(ctx, step, save)
}

func (b *bulk) committed(ctx context.Context, step int64, save *client.Save) error {
	if save == nil {
		return nil
	}
	if err := save.Wait(ctx, client.Committed); err != nil {
		return err
	}
	return b.record.record(line{What: whatSaved, Step: step, Saved: save.Checkpoint})
}

// train computes in steps of equal work, after each of which the ranks meet. Saves are written
// while the next steps are computed. The time that is recorded begins after the warm steps.
func (b *bulk) train(ctx context.Context, warm, steps, every int) error {
	var under *client.Save
	x := uint64(1)
	var began time.Time
	for step := range warm + steps {
		if _, err := b.c.Collectives().AllGather(ctx, []byte{byte(x)}); err != nil {
			return err
		}
		if step == warm {
			began = time.Now()
		}
		if err := wait(ctx, b.device); err != nil {
			return err
		}
		for range b.work {
			x = x*6364136223846793005 + 1442695040888963407
		}
		if step%every != every-1 {
			continue
		}
		if err := b.committed(ctx, int64(step), under); err != nil {
			return err
		}
		var err error
		if under, err = b.c.Save(ctx, int64(step), b.state, client.SaveOptions{}); err != nil {
			return err
		}
	}
	took := time.Since(began)
	if err := b.committed(ctx, int64(warm+steps), under); err != nil {
		return err
	}
	return b.record.record(line{What: whatEnd, Step: int64(steps), Took: took.Seconds()})
}

func (b *bulk) load(ctx context.Context) error {
	into := b.state
	into.Tensors = nil
	for _, t := range b.state.Tensors {
		t.Data = make([]byte, len(t.Data))
		for i := 0; i < len(t.Data); i += 4096 {
			t.Data[i] = 1 // the memory of the ranks is there before the load
		}
		into.Tensors = append(into.Tensors, t)
	}
	began, asked := time.Now(), float64(monotonic()-b.start)/1e9
	loaded, err := b.c.Load(ctx, &into, client.LoadOptions{Strict: true})
	if err != nil {
		return err
	}
	took := time.Since(began)
	for i, t := range into.Tensors {
		if !bytes.Equal(t.Data, b.state.Tensors[i].Data) {
			return fmt.Errorf("rank %d loaded other bytes of %s", b.c.Rank, t.FQN)
		}
	}
	return b.record.record(line{What: whatLoaded, Step: loaded.Step, Saved: loaded.Checkpoint, Took: took.Seconds(), Asked: asked})
}
