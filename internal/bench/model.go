package bench

import (
	"fmt"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// weight is one tensor of a transformer layer. Tensor parallelism cuts dimension split,
// or nothing if split is -1; the fully sharded mesh cuts dimension 0.
type weight struct {
	name  string
	shape tensor.Shape
	split int
}

const hidden, wide = 8192, 28672

var layer = []weight{
	{"self_attn.q_proj.weight", tensor.Shape{hidden, hidden}, 0},
	{"self_attn.k_proj.weight", tensor.Shape{hidden / 8, hidden}, 0},
	{"self_attn.v_proj.weight", tensor.Shape{hidden / 8, hidden}, 0},
	{"self_attn.o_proj.weight", tensor.Shape{hidden, hidden}, 1},
	{"mlp.gate_proj.weight", tensor.Shape{wide, hidden}, 0},
	{"mlp.up_proj.weight", tensor.Shape{wide, hidden}, 0},
	{"mlp.down_proj.weight", tensor.Shape{hidden, wide}, 1},
	{"input_layernorm.weight", tensor.Shape{hidden}, -1},
	{"post_attention_layernorm.weight", tensor.Shape{hidden}, -1},
}

func tensorName(i int) string {
	return fmt.Sprintf("model.layers.%d.%s", i/len(layer), layer[i%len(layer)].name)
}

// modelPlan returns the plan of one rank for a model.
func modelPlan(rank, ranks, tensors int, cut func(w weight, rank, ranks int) tensor.Box) checkpoint.Local {
	l := checkpoint.Local{Rank: rank, Items: make([]checkpoint.Item, tensors)}
	for i := range l.Items {
		w := layer[i%len(layer)]
		s := tensor.Shard{FQN: tensorName(i), DType: tensor.BFloat16, Global: w.shape, Box: cut(w, rank, ranks)}
		l.Items[i] = checkpoint.Item{Shard: s, Bytes: s.Bytes()}
	}
	return l
}

// meshes are the layouts. Each returns a rank's part of a tensor.
var meshes = map[string]func(w weight, rank, ranks int) tensor.Box{
	"replicated": func(w weight, _, _ int) tensor.Box { return w.shape.Full() },
	"shard0": func(w weight, rank, ranks int) tensor.Box {
		return part(w.shape.Full(), 0, rank, ranks)
	},
	// The ranks of a group share the tensor, every group has all of it.
	"hsdp": func(w weight, rank, ranks int) tensor.Box {
		group := ranks / groups(ranks)
		return part(w.shape.Full(), 0, rank%group, group)
	},
	// Neighbours form a group of tensor parallelism. Across groups, dimension 0 of each
	// part is fully sharded.
	"fsdp-tp": func(w weight, rank, ranks int) tensor.Box {
		group, b := groups(ranks), w.shape.Full()
		if w.split >= 0 {
			b = part(b, w.split, rank%group, group)
		}
		return part(b, 0, rank/group, ranks/group)
	},
}

// groups returns the size of the smaller of two meshes: 8 if that divides ranks.
func groups(ranks int) int {
	for n := 8; ; n /= 2 {
		if ranks%n == 0 {
			return n
		}
	}
}

// part returns the i-th of n parts of a box, cut in one dimension as PyTorch does: all
// are equal except the last, and parts after it are empty.
func part(b tensor.Box, d, i, n int) tensor.Box {
	size := (b.Sizes[d] + int64(n) - 1) / int64(n)
	low := min(int64(i)*size, b.Sizes[d])
	b.Offsets[d], b.Sizes[d] = b.Offsets[d]+low, min(size, b.Sizes[d]-low)
	return b
}
