// Package content defines what the workers of a kill storm save: bytes that are a
// pure function of the run, the rank and the step, so that a checker can compute
// every bit of a checkpoint without the store.
//
//	frozen   int64    [W × 131072]  sharded, never changes: later saves link it
//	slow     uint8    [W × 1 MiB]   sharded, changes every [SlowEvery] steps
//	moving   float32  [W, 24576]    sharded by rows, changes with every step
//	shared   bfloat16 [4096]        a replica on all ranks, changes with every step
//	rng      a value of each rank, changes with every step
//	step     a value of all ranks
//
// The bytes are SHAKE-128 of a text that names them, which Python's hashlib and
// Go's standard library both have.
package content

import (
	"crypto/sha3"
	"fmt"
)

// SlowEvery is the number of steps for which the tensor slow stays the same.
const SlowEvery = 16

// Tensor is one rank's shard of a tensor. The checker and the worker share it,
// so it depends on no package of the store.
type Tensor struct {
	FQN            string
	DType          string // PyTorch's name
	Safetensors    string // the name that safetensors has for it
	Global         []int64
	Offsets, Sizes []int64
	Replica        bool // all ranks have all of it
	Data           []byte
}

// Value is one rank's value.
type Value struct {
	FQN     string
	PerRank bool
	Data    []byte
}

// State is everything that one rank saves at a step.
type State struct {
	Tensors []Tensor
	Values  []Value
}

const (
	frozenElements = 1 << 17 // of 8 bytes: 1 MiB a rank, from which chunks are linked
	slowBytes      = 1 << 20
	movingElements = 24 << 10 // of 4 bytes
	sharedElements = 4 << 10  // of 2 bytes
	rngBytes       = 48
)

// Of returns the state that a rank of a run saves at a step.
func Of(run string, rank, world int, step int64) State {
	r, w := int64(rank), int64(world)
	return State{
		Tensors: []Tensor{
			{
				FQN: "frozen", DType: "int64", Safetensors: "I64", Global: []int64{w * frozenElements},
				Offsets: []int64{r * frozenElements}, Sizes: []int64{frozenElements},
				Data: stream(8*frozenElements, "frozen", run, rank, 0),
			},
			{
				FQN: "slow", DType: "uint8", Safetensors: "U8", Global: []int64{w * slowBytes},
				Offsets: []int64{r * slowBytes}, Sizes: []int64{slowBytes},
				Data: stream(slowBytes, "slow", run, rank, step/SlowEvery),
			},
			{
				FQN: "moving", DType: "float32", Safetensors: "F32", Global: []int64{w, movingElements},
				Offsets: []int64{r, 0}, Sizes: []int64{1, movingElements},
				Data: stream(4*movingElements, "moving", run, rank, step),
			},
			{
				FQN: "shared", DType: "bfloat16", Safetensors: "BF16", Global: []int64{sharedElements},
				Offsets: []int64{0}, Sizes: []int64{sharedElements}, Replica: true,
				Data: stream(2*sharedElements, "shared", run, 0, step),
			},
		},
		Values: []Value{
			{FQN: "rng", PerRank: true, Data: stream(rngBytes, "rng", run, rank, step)},
			{FQN: "step", Data: fmt.Append(nil, step)},
		},
	}
}

// stream returns n bytes that depend on name, run, rank and step.
func stream(n int, name, run string, rank int, step int64) []byte {
	h := sha3.NewSHAKE128()
	_, _ = fmt.Fprintf(h, "%s|%s|%d|%d", name, run, rank, step) // a hash accepts everything
	data := make([]byte, n)
	_, _ = h.Read(data) // and returns as much as requested
	return data
}
