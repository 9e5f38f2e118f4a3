package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

const catHelp = `Write the bytes of a tensor or value of a checkpoint to stdout: of a tensor its
elements, row-major and little-endian; of a value the bytes that were saved, for
PyTorch those of torch.save. Without FQN, list what there is.

` + pathHelp + `

Exit codes: 0 ok, 1 failed, 2 usage, 4 no such checkpoint, tensor or value,
6 bytes are damaged.`

func (a *app) catCommand() *cobra.Command {
	var force bool
	rank := -1
	c := &cobra.Command{
		Use: "cat REF [FQN]", Short: "Write the bytes of a tensor or value to stdout", Long: catHelp, Args: args(cobra.RangeArgs(1, 2)),
		Example: `  ckptstore cat bert@step-2000
  ckptstore cat bert model.embed.weight > embed.bin
  ckptstore cat out/checkpoint-2000 model.embed.weight | sha256sum`,
		RunE: func(c *cobra.Command, given []string) error {
			return a.withSource(c.Context(), given[0], func(s source) error {
				if len(given) == 1 {
					return a.list(s)
				}
				return a.cat(c.Context(), s, given[1], rank, force)
			})
		},
	}
	c.Flags().BoolVar(&force, "force", false, "write bytes to a terminal too")
	c.Flags().IntVar(&rank, "rank", -1, "whose value, where each rank has its own (default: the lowest that has one)")
	return c
}

// held is one row of `cat REF`.
type held struct {
	FQN   string       `json:"fqn"`
	Kind  string       `json:"kind"` // tensor or value
	DType string       `json:"dtype,omitempty"`
	Shape tensor.Shape `json:"shape,omitempty"`
	Rank  int          `json:"rank"` // of a value, whose; of a tensor 0
	Bytes int64        `json:"bytes"`
}

func (a *app) list(s source) error {
	out := struct {
		Checkpoint string `json:"checkpoint"`
		Items      []held `json:"items"`
	}{s.name, []held{}}
	for _, t := range s.manifest.Layout.Tensors {
		out.Items = append(out.Items, held{
			FQN: t.FQN, Kind: "tensor", DType: t.DType.String(), Shape: t.Shape, Bytes: t.Shape.Volume() * int64(t.DType.Size()),
		})
	}
	for _, v := range s.manifest.Layout.Values {
		out.Items = append(out.Items, held{FQN: v.FQN, Kind: "value", Rank: v.Rank, Bytes: v.Bytes})
	}
	return emit(a, out, out.Items, func(w *tabwriter.Writer, _ bool) {
		row(w, "FQN", "KIND", "DTYPE", "SHAPE", "SIZE")
		for _, h := range out.Items {
			shape := ""
			if h.Kind == "tensor" {
				shape = fmt.Sprint([]int64(h.Shape))
			}
			row(w, h.FQN, h.Kind, h.DType, shape, size(h.Bytes))
		}
	})
}

func (a *app) cat(ctx context.Context, s source, fqn string, rank int, force bool) error {
	if f, ok := a.out.(*os.File); ok && !force {
		if info, err := f.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 && info.Mode()&os.ModeDevice != 0 && f.Name() != os.DevNull {
			return usageError{errors.New("stdout is a terminal: send the bytes elsewhere, or give --force")}
		}
	}
	want, err := s.want(fqn, rank)
	if err != nil {
		return err
	}
	loader := planner.NewLoader(s.manifest.Layout)
	if want.Value {
		return a.catPart(ctx, s, loader, want, make(single, loader.Size(want)))
	}
	if _, err := loader.Load([]plan.Want{want}); err != nil {
		return err // before anything is written: a window might lie before what is missing
	}
	var buf single
	for box := range windows(want.Shard.Box, catWindow/int64(want.Shard.DType.Size())) {
		part := want
		part.Shard.Box = box
		n := loader.Size(part)
		if buf == nil {
			buf = make(single, n) // the first is the largest
		}
		if err := a.catPart(ctx, s, loader, part, buf[:n]); err != nil {
			return err
		}
	}
	return nil
}

// catPart reads what fits into buf and writes it.
func (a *app) catPart(ctx context.Context, s source, loader *planner.Loader, want plan.Want, buf single) error {
	wants := []plan.Want{want}
	reads, err := loader.Load(wants)
	if err != nil {
		return err
	}
	if _, err := s.reader.ReadData(ctx, wants, reads, buf); err != nil {
		return err
	}
	_, err = a.out.Write(buf)
	return err
}

// catWindow is how many bytes of a tensor are in memory at a time.
const catWindow = 64 << 20

// windows cuts a box into boxes of at most limit elements, which follow each
// other in row-major order. An empty box has none.
func windows(box tensor.Box, limit int64) iter.Seq[tensor.Box] {
	return func(yield func(tensor.Box) bool) { cut(box, 0, limit, yield) }
}

// cut cuts a box from a dimension on; those before have one index.
func cut(box tensor.Box, dim int, limit int64, yield func(tensor.Box) bool) bool {
	if box.Empty() {
		return true
	}
	row := int64(1) // elements behind one index, counted as far as the limit
	for d := len(box.Sizes) - 1; d > dim; d-- {
		if row > limit/box.Sizes[d] {
			row = limit + 1
			break
		}
		row *= box.Sizes[d]
	}
	if dim >= len(box.Sizes) || box.Sizes[dim] <= limit/row {
		return yield(box)
	}
	step := max(limit/row, 1)
	for at := int64(0); at < box.Sizes[dim]; at += step {
		part := tensor.Box{Offsets: slices.Clone(box.Offsets), Sizes: slices.Clone(box.Sizes)}
		part.Offsets[dim] += at
		part.Sizes[dim] = min(step, box.Sizes[dim]-at)
		if row > limit && !cut(part, dim+1, limit, yield) || row <= limit && !yield(part) {
			return false
		}
	}
	return true
}

// want is the whole tensor or value of a name.
func (s source) want(fqn string, rank int) (plan.Want, error) {
	for _, t := range s.manifest.Layout.Tensors {
		if t.FQN == fqn {
			return plan.Want{Shard: tensor.Shard{FQN: fqn, DType: t.DType, Global: t.Shape, Box: t.Shape.Full()}}, nil
		}
	}
	for _, v := range s.manifest.Layout.Values {
		if v.FQN == fqn && (rank < 0 || rank == v.Rank || !v.PerRank) {
			return plan.Want{Value: true, Shard: tensor.Shard{FQN: fqn}, Rank: v.Rank}, nil
		}
	}
	who := ""
	if rank >= 0 {
		who = fmt.Sprintf(" of rank %d", rank)
	}
	return plan.Want{}, fmt.Errorf("%w: %s has no tensor or value %q%s: `ckptstore cat %s` lists them", projections.ErrNotFound, s.name, fqn, who, s.name)
}

// single is the destination of one want.
type single []byte

// Want implements storage.Destination.
func (b single) Want(int) []byte { return b }
