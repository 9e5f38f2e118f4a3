// Package digits is a small real model that trains on handwritten digits,
// sharded over ranks the way fully sharded data parallelism does it.
//
//	data      1,797 images of 8 × 8 pixels (see SOURCE.md); every fifth, from
//	          the first on, is the test split, the rest is for training
//	network   64 inputs → 48 tanh → 10 classes, softmax cross-entropy, float32
//	optimizer Adam; its moments are sharded like their parameter
//	batch     128 samples a step over all ranks, drawn by each rank's own
//	          random generator, with noise on the pixels
//
// What a rank holds, as checkpoint tensors:
//
//	model.layer1.weight  float32 [48 64]  sharded on dimension 0
//	model.layer1.bias    float32 [48]     sharded on dimension 0
//	model.layer2.weight  float32 [10 48]  sharded on dimension 0
//	model.layer2.bias    float32 [10]     replicated
//	optim.exp_avg.<parameter>, optim.exp_avg_sq.<parameter>
//	                     like the parameter
//	optim.step           int64 []         replicated
//
// Sharded means ceil(rows/world) rows a rank from rank 0 on; trailing ranks
// get fewer, or an empty box. The random state is a value of each rank's own.
//
// Training is bitwise deterministic for a world size, on one machine with one
// binary: all sums run in a fixed order. So a run that is resumed from tensors
// and random states ends with the same [Model.Digest] as one never stopped.
package digits

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/ckptstore/ckptstore/tensor"
)

const (
	batch  = 128 // samples a step, over all ranks
	hidden = 48

	beta1   = 0.9
	beta2   = 0.999
	epsilon = 1e-8
)

// Defaults of what a search may vary.
const (
	LearningRate = 8e-3
	Noise        = 0.1 // standard deviation of the noise on a pixel, of 1
)

// Exchange lets ranks talk to each other.
//
// AllGather returns every rank's bytes in rank order, on every rank; lengths may
// differ. All ranks call it the same number of times in the same order, each from one
// goroutine at a time. It returns an error when ctx ends. An error is final: no rank
// calls it again. It does not keep own after it returns, and the caller does not write
// to the result.
type Exchange interface {
	AllGather(ctx context.Context, own []byte) ([][]byte, error)
}

// ExchangeFunc makes an [Exchange] of a function.
type ExchangeFunc func(ctx context.Context, own []byte) ([][]byte, error)

var _ Exchange = ExchangeFunc(nil)

// AllGather calls f.
func (f ExchangeFunc) AllGather(ctx context.Context, own []byte) ([][]byte, error) {
	return f(ctx, own)
}

// Model is one rank's part of the model. Its methods are for one goroutine at
// a time; those with an [Exchange] are collective.
type Model struct {
	rank, world int
	params      []*param
	step        []int64 // one element: the memory behind optim.step
	source      *rand.PCG
	data        *images

	rate, noise float32
}

// New returns rank's part of a model that is sharded over world ranks. The full initial
// weights depend on seed alone, the random generator on seed and rank. New panics if
// rank is not in 0..world-1, and on a big-endian machine, whose memory differs from the
// format of a chunk.
func New(rank, world int, seed uint64) *Model {
	if rank < 0 || rank >= world {
		panic(fmt.Sprintf("digits: rank %d is not in 0..%d", rank, world-1))
	}
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		panic("digits: this machine is big-endian, chunks are little-endian")
	}
	m := &Model{
		rank: rank, world: world,
		step:   make([]int64, 1),
		source: rand.NewPCG(seed, uint64(rank)+1),
		data:   embedded(),
		rate:   LearningRate, noise: Noise,
	}
	initial := rand.New(rand.NewPCG(seed, 0)) // ranks use the streams from 1 on
	for _, s := range specs {
		m.params = append(m.params, newParam(s, rank, world, initial))
	}
	return m
}

// Set sets the learning rate and the noise on the pixels.
func (m *Model) Set(rate, noise float32) { m.rate, m.noise = rate, noise }

// Iteration returns the number of steps taken: the value of optim.step, so it also
// follows a load into that tensor.
func (m *Model) Iteration() int64 { return m.step[0] }

// RNG returns the state of the rank's random generator.
func (m *Model) RNG() []byte {
	state, err := m.source.MarshalBinary()
	if err != nil {
		panic(fmt.Sprintf("digits: random state: %v", err)) // documented never to happen
	}
	return state
}

// SetRNG continues from a state that [Model.RNG] returned. After an error the generator
// is unchanged.
func (m *Model) SetRNG(state []byte) error {
	var next rand.PCG
	if err := next.UnmarshalBinary(state); err != nil {
		return fmt.Errorf("set random state of rank %d from %d bytes: %w", m.rank, len(state), err)
	}
	*m.source = next
	return nil
}

// Step trains on one mini-batch: it gathers the parameters, computes this rank's part
// of the gradient, gathers the gradients and updates its own shards. The loss is the
// mean over all ranks' samples, before the update, and the same on every rank. After an
// error the parameters are unchanged; the random generator may have advanced.
func (m *Model) Step(ctx context.Context, x Exchange) (loss float64, err error) {
	full, err := m.gather(ctx, x)
	if err != nil {
		return 0, err
	}
	grad := newWeights()
	sum := 0.0
	random := rand.New(m.source)
	for range share(batch, m.rank, m.world) {
		sample := random.IntN(len(m.data.train))
		var pixels [inputs]float32
		for i, p := range m.data.train[sample].pixels {
			pixels[i] = p + m.noise*float32(random.NormFloat64())
		}
		sum += full.backward(&pixels, m.data.train[sample].label, grad)
	}
	own := m.header(kindGradients, 8+4*len(grad.flat))
	own = binary.LittleEndian.AppendUint64(own, math.Float64bits(sum))
	own = append(own, view(grad.flat)...)
	parts, err := m.allGather(ctx, x, kindGradients, own, func(int) int { return 8 + 4*len(grad.flat) })
	if err != nil {
		return 0, err
	}
	clear(grad.flat)
	for _, part := range parts {
		loss += math.Float64frombits(binary.LittleEndian.Uint64(part))
		addFloats(grad.flat, part[8:])
	}
	m.step[0]++
	for _, p := range m.params {
		p.update(grad.of(p.spec)[p.lo*p.columns:p.hi*p.columns], m.step[0], m.rate)
	}
	return loss / batch, nil
}

// Accuracy returns the part of the test split that the model classifies correctly,
// 0..1, the same on every rank.
func (m *Model) Accuracy(ctx context.Context, x Exchange) (float64, error) {
	full, err := m.gather(ctx, x)
	if err != nil {
		return 0, err
	}
	right := 0
	for i := range m.data.test {
		if full.classify(&m.data.test[i].pixels) == m.data.test[i].label {
			right++
		}
	}
	return float64(right) / float64(len(m.data.test)), nil
}

// Tensor is a shard and its chunk.
type Tensor struct {
	tensor.Shard
	Data []byte // the model's live memory, little-endian: writing to it changes the model
}

// Tensors returns the rank's shards, parameters first, then the optimizer's state, in
// the same order on every rank. A rank without rows of a tensor has an empty box of it.
func (m *Model) Tensors() []Tensor {
	var all []Tensor
	for _, e := range m.entries() {
		all = append(all, e.Tensor)
	}
	return all
}

// share returns how many of n things rank gets when low ranks take the remainder.
func share(n, rank, world int) int {
	part := n / world
	if rank < n%world {
		part++
	}
	return part
}
