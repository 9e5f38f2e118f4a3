package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/client/collective"
	"github.com/ckptstore/ckptstore/client/function"
	"github.com/ckptstore/ckptstore/client/rpc"
	"github.com/ckptstore/ckptstore/tensor"
)

// elements is the size of the only tensor, which is sharded over the ranks. In step n,
// element i is i*n.
const elements = 1 << 10

// train is the training function of each worker. The trial's configuration may
// set "steps" (6), and "fail_at", a step in which rank 1 fails in the first
// attempt.
func train(ctx context.Context, config function.Config, ckpt function.Checkpoint) (err error) {
	c := ckpt.Client()
	if c == nil {
		return client.ErrNoTrainer
	}
	ring, err := openRing(ctx, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ring.agent.Close()) }()
	m := newModel(c.Rank, c.WorldSize)
	if ckpt.Resume != "" {
		if err := m.load(ctx, ckpt); err != nil {
			return err
		}
	}
	for m.step < number(config, "steps", 6) {
		m.train()
		if err := ring.ask(ctx, m); err != nil {
			return err
		}
		sums, err := collective.AllGather(ctx, ring.group, m.sum())
		if err != nil {
			return err
		}
		if want := sums[ring.next]; ring.answer != want {
			return fmt.Errorf("rank %d answered a call with the sum %d, but gathered %d", ring.next, ring.answer, want)
		}
		if c.Attempt == 1 && c.Rank == 1 && m.step == number(config, "fail_at", 0) {
			return errors.New("a failure on purpose")
		}
		if err := m.save(ctx, ckpt); err != nil {
			return err
		}
		if err := function.Report(ctx, function.Result{"step": m.step, "sum": m.sum(), "next": ring.answer}); err != nil {
			return err
		}
	}
	fmt.Printf("step %d: rank %d has the sum %d\n", m.step, ring.next, ring.answer)
	return ring.agent.Shutdown(ctx)
}

func number(config function.Config, name string, otherwise int64) int64 {
	if v, ok := config[name].(float64); ok {
		return int64(v)
	}
	return otherwise
}

// ring calls the next rank.
type ring struct {
	agent  rpc.Agent
	group  *collective.Group
	next   int
	answer int64      // the latest
	sums   chan int64 // answers to the previous rank, one for each step
}

// openRing opens the agent of the RPC backend that the environment names.
func openRing(ctx context.Context, c *client.Client) (*ring, error) {
	registry, err := register()
	if err != nil {
		return nil, err
	}
	r := &ring{group: collective.Of(c, collective.Options{}), sums: make(chan int64, 1)}
	if r.next, err = strconv.Atoi(os.Getenv(envNext)); err != nil {
		return nil, fmt.Errorf("%s: %w; run this with --backend mesh", envNext, err)
	}
	if r.agent, err = rpc.Open(ctx, c, registry, os.Getenv(envRPC), nil); err != nil {
		return nil, err
	}
	err = r.agent.Handle("sum", func(ctx context.Context, _ []byte) ([]byte, error) {
		select {
		case sum := <-r.sums:
			return binary.LittleEndian.AppendUint64(nil, uint64(sum)), nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	})
	if err != nil {
		return nil, errors.Join(err, r.agent.Close())
	}
	return r, nil
}

// ask asks the next rank for its sum of this step.
func (r *ring) ask(ctx context.Context, m *model) error {
	r.sums <- m.sum()
	// A rank has registered its function before it enters the collective.
	if _, err := r.group.AllGatherBytes(ctx, nil); err != nil {
		return err
	}
	answer, err := r.agent.Call(ctx, client.AgentName(r.next), "sum", nil)
	if err != nil {
		return err
	}
	if len(answer) != 8 {
		return fmt.Errorf("rank %d answers %d bytes", r.next, len(answer))
	}
	r.answer = int64(binary.LittleEndian.Uint64(answer))
	return nil
}

// model is one rank's part of the tensor.
type model struct {
	step  int64
	shard tensor.Shard
	data  []byte
}

func newModel(rank, world int) *model {
	lo, hi := int64(elements*rank/world), int64(elements*(rank+1)/world)
	return &model{
		shard: tensor.Shard{FQN: "weights", DType: tensor.Int64, Global: tensor.Shape{elements}, Box: tensor.Box{Offsets: []int64{lo}, Sizes: []int64{hi - lo}}},
		data:  make([]byte, 8*(hi-lo)),
	}
}

// at returns an element, by its number in the whole tensor.
func (m *model) at(i int64) int64 {
	return int64(binary.LittleEndian.Uint64(m.data[8*(i-m.shard.Box.Offsets[0]):]))
}

// each calls f with the number of each element.
func (m *model) each(f func(i int64)) {
	for i := range m.shard.Box.Sizes[0] {
		f(m.shard.Box.Offsets[0] + i)
	}
}

// train makes one step.
func (m *model) train() {
	m.step++
	m.each(func(i int64) {
		binary.LittleEndian.PutUint64(m.data[8*(i-m.shard.Box.Offsets[0]):], uint64(m.at(i)+i))
	})
}

func (m *model) sum() (sum int64) {
	m.each(func(i int64) { sum += m.at(i) })
	return sum
}

func (m *model) state() client.State {
	return client.State{
		Tensors: []client.Tensor{{Shard: m.shard, Data: m.data}},
		Values:  []client.Value{{FQN: "step", Data: binary.LittleEndian.AppendUint64(nil, uint64(m.step))}},
	}
}

// save returns when the checkpoint is committed.
func (m *model) save(ctx context.Context, ckpt function.Checkpoint) error {
	s, err := ckpt.Save(ctx, m.step, m.state(), client.SaveOptions{})
	if err != nil {
		return err
	}
	return s.Wait(ctx, client.Committed)
}

// load restores the checkpoint to resume from and compares every element.
func (m *model) load(ctx context.Context, ckpt function.Checkpoint) error {
	state := m.state()
	loaded, err := ckpt.Load(ctx, &state, client.LoadOptions{Strict: true})
	if err != nil {
		return err
	}
	m.step = int64(binary.LittleEndian.Uint64(state.Values[0].Data))
	if m.step != loaded.Step {
		return fmt.Errorf("%s has the step %d, its manifest %d", loaded.Checkpoint, m.step, loaded.Step)
	}
	m.each(func(i int64) {
		if got, want := m.at(i), i*m.step; got != want && err == nil {
			err = fmt.Errorf("%s: element %d is %d, want %d", loaded.Checkpoint, i, got, want)
		}
	})
	if err == nil {
		fmt.Printf("loaded %s: %d elements unchanged\n", loaded.Checkpoint, m.shard.Box.Sizes[0])
	}
	return err
}
