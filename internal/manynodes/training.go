package main

import (
	"fmt"
	"math"

	"github.com/ckptstore/ckptstore/client"
)

// model is one rank's part of a deterministic training.
type model interface {
	partial(step int64) float64 // of the loss
	update(parts []float64) (loss float64)
	saved() client.Tensor  // what the rank saves
	loaded() client.Tensor // what it loads
	values() []float64     // the weights that it loads
	own() []client.Value   // the rank's own values in each checkpoint
}

// blockSize is the number of weights that each rank holds.
const blockSize = 256

// block is one rank's part of a model. Its training is deterministic, so the losses of a
// run that was interrupted equal those of an unbroken run bit by bit.
type block struct {
	rank, world int
	weights     []float64
}

func newBlock(rank, world int) *block {
	b := &block{rank, world, make([]float64, blockSize)}
	for i := range b.weights {
		b.weights[i] = math.Sin(float64(1 + i + rank*blockSize))
	}
	return b
}

// partial returns this rank's part of the loss of a step.
func (b *block) partial(step int64) (sum float64) {
	for i, w := range b.weights {
		sum += w * math.Cos(float64(int64(i)*31+step*17+int64(b.rank)*7))
	}
	return sum
}

// update trains one step with the parts of all ranks, and returns the loss.
func (b *block) update(parts []float64) (loss float64) {
	for _, p := range parts {
		loss += p
	}
	for i := range b.weights {
		b.weights[i] = 0.9*b.weights[i] + 0.1*math.Sin(loss+float64(i+b.rank))
	}
	return loss
}

func (b *block) saved() client.Tensor {
	return weightsOf(b.weights, int64(b.rank*blockSize), int64(b.world*blockSize))
}

func (b *block) loaded() client.Tensor { return b.saved() }

func (b *block) values() []float64 { return b.weights }

func (b *block) own() []client.Value {
	return []client.Value{{FQN: "own", PerRank: true, Data: fmt.Appendf(nil, "of rank %d", b.rank)}}
}

// unbroken returns the losses of a run of so many ranks that nothing interrupts, from
// step 1.
func unbroken(world int, steps int64) (losses []float64) {
	blocks := make([]*block, world)
	for rank := range blocks {
		blocks[rank] = newBlock(rank, world)
	}
	for step := int64(1); step <= steps; step++ {
		parts := make([]float64, world)
		for rank, b := range blocks {
			parts[rank] = b.partial(step)
		}
		var loss float64
		for _, b := range blocks {
			loss = b.update(parts)
		}
		losses = append(losses, loss)
	}
	return losses
}
