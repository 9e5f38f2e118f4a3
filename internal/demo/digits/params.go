package digits

import (
	"math"
	"math/rand/v2"
	"slices"
	"unsafe"

	"github.com/ckptstore/ckptstore/tensor"
)

// spec is one parameter of the network. A bias has one column.
type spec struct {
	name          string
	rows, columns int
	shape         tensor.Shape
	replicated    bool
	offset        int // of its first element in weights.flat
}

var (
	layer1Weight = spec{name: "layer1.weight", rows: hidden, columns: inputs, shape: tensor.Shape{hidden, inputs}}
	layer1Bias   = spec{name: "layer1.bias", rows: hidden, columns: 1, shape: tensor.Shape{hidden}, offset: hidden * inputs}
	layer2Weight = spec{
		name: "layer2.weight", rows: classes, columns: hidden, shape: tensor.Shape{classes, hidden},
		offset: hidden*inputs + hidden,
	}
	layer2Bias = spec{
		name: "layer2.bias", rows: classes, columns: 1, shape: tensor.Shape{classes}, replicated: true,
		offset: hidden*inputs + hidden + classes*hidden,
	}

	specs = []spec{layer1Weight, layer1Bias, layer2Weight, layer2Bias}
)

const weightCount = hidden*inputs + hidden + classes*hidden + classes

// size returns the number of elements of the whole parameter.
func (s spec) size() int { return s.rows * s.columns }

// bounds returns the rows that rank has.
func (s spec) bounds(rank, world int) (lo, hi int) {
	if s.replicated {
		return 0, s.rows
	}
	chunk := (s.rows + world - 1) / world
	lo = min(rank*chunk, s.rows)
	return lo, min(lo+chunk, s.rows)
}

// param is a rank's rows of one parameter, with Adam's moments.
type param struct {
	spec
	lo, hi                 int // own rows
	value, average, square []float32
}

// newParam draws the whole parameter, so that every world size starts equal, and keeps
// its own rows. Weights are uniform in ±sqrt(6/(in+out)), biases 0.
func newParam(s spec, rank, world int, random *rand.Rand) *param {
	p := &param{spec: s}
	p.lo, p.hi = s.bounds(rank, world)
	count := (p.hi - p.lo) * s.columns
	p.value, p.average, p.square = make([]float32, count), make([]float32, count), make([]float32, count)
	if len(s.shape) == 1 {
		return p
	}
	limit := float32(math.Sqrt(6 / float64(s.rows+s.columns)))
	for i := range s.size() {
		v := (2*random.Float32() - 1) * limit
		if at := i - p.lo*s.columns; at >= 0 && at < count {
			p.value[at] = v
		}
	}
	return p
}

// update is one step of Adam with the sum of the gradients over the batch.
func (p *param) update(grad []float32, step int64, rate float32) {
	correct1 := float32(1 - math.Pow(beta1, float64(step)))
	correct2 := float32(1 - math.Pow(beta2, float64(step)))
	for i, sum := range grad {
		g := sum / batch
		p.average[i] = beta1*p.average[i] + (1-beta1)*g
		p.square[i] = beta2*p.square[i] + (1-beta2)*g*g
		root := float32(math.Sqrt(float64(p.square[i] / correct2)))
		p.value[i] -= rate * (p.average[i] / correct1) / (root + epsilon)
	}
}

// bytes returns the size of rank's rows with elements of size bytes.
func (s spec) bytes(rank, world, size int) int {
	lo, hi := s.bounds(rank, world)
	return (hi - lo) * s.columns * size
}

// entry is a tensor of the rank, with its sharding.
type entry struct {
	spec
	Tensor
}

// entries returns the rank's tensors in their fixed order.
func (m *Model) entries() []entry {
	var all []entry
	for _, p := range m.params {
		all = append(all, p.entry("model.", p.value))
	}
	for _, p := range m.params {
		all = append(all,
			p.entry("optim.exp_avg.model.", p.average),
			p.entry("optim.exp_avg_sq.model.", p.square))
	}
	scalar := tensor.Shape{}
	return append(all, entry{
		spec: spec{rows: 1, columns: 1, replicated: true},
		Tensor: Tensor{
			Shard: tensor.Shard{FQN: "optim.step", DType: tensor.Int64, Global: scalar, Box: scalar.Full()},
			Data:  view(m.step),
		},
	})
}

// entry returns the entry of values, which are p's rows, under prefix and p's name.
func (p *param) entry(prefix string, values []float32) entry {
	box := p.shape.Full()
	box.Offsets[0], box.Sizes[0] = int64(p.lo), int64(p.hi-p.lo)
	return entry{
		spec: p.spec,
		Tensor: Tensor{
			Shard: tensor.Shard{FQN: prefix + p.name, DType: tensor.Float32, Global: slices.Clone(p.shape), Box: box},
			Data:  view(values),
		},
	}
}

// view returns the memory of values as bytes. New has checked the byte order.
func view[T float32 | int64](values []T) []byte {
	var element T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(values))), len(values)*int(unsafe.Sizeof(element)))
}
