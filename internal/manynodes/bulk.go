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

// bulk is what all ranks of such a run have: equal tensors on each rank.
type bulk struct {
	c      *client.Client
	record *recorder
	state  client.State
}

// runBulk saves the state if there is nothing to resume from. Otherwise it loads it, compares
// every byte, and records how long the load took.
func runBulk(ctx context.Context, args []string) (err error) {
	start := monotonic()
	flags := flag.NewFlagSet("bulk", flag.ContinueOnError)
	dir := flags.String("lives", "", "directory of the ranks' records")
	size := flags.Int64("bytes", 64<<20, "bytes of the state")
	loads := flags.Int("loads", 1, "loads, one after the other")
	if err := flags.Parse(args); err != nil {
		return err
	}
	b := &bulk{state: bulkState(*size)}
	if b.record, err = newRecorder(*dir, identify(start)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.record.close()) }()
	if b.c, err = client.Connect(ctx); err != nil {
		return err
	}
	defer b.c.Close()
	if b.c.Resume == "" {
		return b.save(ctx)
	}
	for range *loads {
		if err := b.load(ctx); err != nil {
			return err
		}
	}
	return b.record.record(line{What: whatEnd})
}

// bulkState has one large tensor, some of the usual size, and many small ones.
func bulkState(size int64) (s client.State) {
	add := func(n int64) {
		t := client.Tensor{Shard: tensor.Shard{
			FQN: fmt.Sprintf("t%03d", len(s.Tensors)), DType: tensor.Uint8, Global: tensor.Shape{n}, Box: tensor.Shape{n}.Full(),
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

func (b *bulk) save(ctx context.Context) error {
	save, err := b.c.Save(ctx, 1, b.state, client.SaveOptions{})
	if err != nil {
		return err
	}
	if err := save.Wait(ctx, client.Committed); err != nil {
		return err
	}
	return b.record.record(line{What: whatSaved, Step: 1, Saved: save.Checkpoint})
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
	began := time.Now()
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
	return b.record.record(line{What: whatLoaded, Step: loaded.Step, Saved: loaded.Checkpoint, Took: took.Seconds()})
}
