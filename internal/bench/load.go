package bench

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
)

// loadBench is `bench load --json`. Seconds and rates are medians of benchRuns loads.
type loadBench struct {
	Bench     string  `json:"bench"`
	Ranks     int     `json:"ranks"`    // that saved
	ToRanks   int     `json:"to_ranks"` // that load
	Tensors   int     `json:"tensors"`
	Bytes     int64   `json:"bytes"`      // that all ranks want together
	BytesRead int64   `json:"bytes_read"` // from files, without indexes
	OverRead  float64 `json:"over_read"`  // bytes read over bytes wanted
	Seconds   float64 `json:"seconds"`
	Rate      float64 `json:"bytes_per_second"`
	RawRate   float64 `json:"raw_bytes_per_second"` // of parallel reads into the same memory, without checks
	Ratio     float64 `json:"ratio"`
}

func (a *bench) loadVerb() *cobra.Command {
	b := loadBench{Bench: "load"}
	dir, text := "", ""
	c := &cobra.Command{
		Use: "load", Short: "Time a load onto another number of ranks, compared with raw reads", Args: console.Args(cobra.NoArgs),
		Long: `Save --size bytes in --tensors tensors, each cut along its first dimension over
--ranks ranks, and load them on --to-ranks ranks, cut the same way. All ranks of
the node load in one call, so a block that two of them need is read once. Every
block is compared with its checksum. The memory was touched before, and the
files are in the page cache.

After each load the same bytes are read raw, in parallel reads of 4 MiB into the
same memory, without checks: ratio is the rate of the load over the rate of
these reads. Both are repeated five times after a first load, and each figure is
the median. Every byte of each load is compared with the saved one. The times
exclude the plan and the index, which are read before, and a worker's shared
memory and the copy out of it. The files are in a new directory in --dir, which
is removed afterwards.`,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if b.Bytes, err = console.ParseSize(text); err != nil {
				return console.Usagef("--size: %w", err)
			}
			if b.Ranks < 1 || b.ToRanks < 1 || b.Tensors < 1 || b.Bytes/benchColumns < int64(b.Tensors) {
				return console.Usagef("--ranks %d --to-ranks %d --tensors %d --size %s: want at least one of each, and %d bytes a tensor", b.Ranks, b.ToRanks, b.Tensors, text, benchColumns)
			}
			if err := scratch(dir, func(dir string) error { return b.run(c.Context(), dir) }); err != nil {
				return err
			}
			return console.Emit(a.Console, b, []loadBench{b}, func(w *tabwriter.Writer, _ bool) {
				console.Row(w, "RANKS", "TO RANKS", "TENSORS", "BYTES", "READ", "OVER-READ", "SECONDS", "BYTES/S", "RAW BYTES/S", "RATIO")
				console.Row(w, b.Ranks, b.ToRanks, b.Tensors, bytesize.Text(b.Bytes), bytesize.Text(b.BytesRead), fmt.Sprintf("%.3f", b.OverRead), fmt.Sprintf("%.3f", b.Seconds),
					fmt.Sprintf("%.4g", b.Rate), fmt.Sprintf("%.4g", b.RawRate), fmt.Sprintf("%.3f", b.Ratio))
			})
		},
	}
	f := c.Flags()
	f.StringVar(&dir, "dir", ".", "directory for the data, on the disk to measure")
	f.IntVar(&b.Ranks, "ranks", 2, "ranks that save")
	f.IntVar(&b.ToRanks, "to-ranks", 3, "ranks that load")
	f.IntVar(&b.Tensors, "tensors", 64, "tensors of the model")
	f.StringVar(&text, "size", "2GB", "bytes of all ranks together")
	return c
}

// benchColumns is the length of a row of each tensor, in bytes.
const benchColumns = 1024

// run computes the figures.
func (b *loadBench) run(ctx context.Context, dir string) error {
	shape := tensor.Shape{b.Bytes / int64(b.Tensors) / benchColumns, benchColumns}
	b.Bytes = int64(b.Tensors) * shape.Volume()
	if err := os.Mkdir(filepath.Join(dir, "data"), 0o700); err != nil {
		return err
	}
	root, err := store.OpenData(dir)
	if err != nil {
		return err
	}
	root.OfStore("bench")
	m, err := saveRows(ctx, root, b.Ranks, b.Tensors, shape)
	if err != nil {
		return err
	}
	ref := checkpoint.RefOf(m.Run, m.Trial, m.Checkpoint)
	l := &benchLoader{reader: root.Reader(ref), wants: rowWants(b.ToRanks, b.Tensors, shape)}
	if err := l.prepare(ctx, m); err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(root.Dir(), ref.String(), "*.safetensors"))
	if err != nil {
		return err
	}
	var seconds, raw []float64
	for n := range benchRuns + 1 {
		began := time.Now()
		if b.BytesRead, err = l.reader.ReadData(ctx, l.wants, l.reads, l); err != nil {
			return err
		}
		took := time.Since(began)
		if err := l.check(shape); err != nil {
			return err
		}
		alone, err := l.raw(ctx, files)
		if err != nil {
			return err
		}
		if n > 0 { // memory, cache and index are warm
			seconds, raw = append(seconds, took.Seconds()), append(raw, alone.Seconds())
		}
	}
	b.Seconds, b.OverRead = middle(seconds), float64(b.BytesRead)/float64(b.Bytes)
	b.Rate, b.RawRate = float64(b.Bytes)/b.Seconds, float64(b.Bytes)/middle(raw)
	b.Ratio = b.Rate / b.RawRate
	return nil
}

// rowsOf returns the box of a rank's rows, as FSDP cuts them.
func rowsOf(rank, ranks int, shape tensor.Shape) tensor.Box {
	each := (shape[0] + int64(ranks) - 1) / int64(ranks)
	from := min(int64(rank)*each, shape[0])
	return tensor.Box{Offsets: []int64{from, 0}, Sizes: []int64{min(each, shape[0]-from), shape[1]}}
}

func rowShard(i int, shape tensor.Shape, box tensor.Box) tensor.Shard {
	return tensor.Shard{FQN: fmt.Sprintf("layers.%d.weight", i), DType: tensor.Uint8, Global: shape, Box: box}
}

// rowBytes fills buf with a tensor's bytes from a row on, so that any part can be
// computed again for comparison.
func rowBytes(buf []byte, i int, first int64) {
	for at := 0; at < len(buf); at += benchColumns {
		row := uint64(first) + uint64(at/benchColumns)
		r := rand.NewPCG(uint64(i), row)
		for k := 0; k+8 <= benchColumns; k += 8 {
			v := r.Uint64()
			for j := range 8 {
				buf[at+k+j] = byte(v >> (8 * j))
			}
		}
	}
}

// rowSource provides one rank's rows of each tensor to a writer.
type rowSource struct {
	items []checkpoint.Item
	buf   []byte
}

// Item implements [data.Source].
func (s *rowSource) Item(i int) ([]byte, error) {
	if n := s.items[i].Bytes; int64(len(s.buf)) < n {
		s.buf = make([]byte, n)
	}
	buf := s.buf[:s.items[i].Bytes]
	rowBytes(buf, i, s.items[i].Shard.Box.Offsets[0])
	return buf, nil
}

// saveRows writes and commits the checkpoint that is loaded.
func saveRows(ctx context.Context, root *data.Root, ranks, tensors int, shape tensor.Shape) (checkpoint.Manifest, error) {
	m := checkpoint.Manifest{Store: "bench", Run: "bench", Trial: "main", Checkpoint: "step-1.a1", Name: "step-1", Step: 1, Attempt: 1, WorldSize: ranks}
	for i := range tensors {
		t := checkpoint.Tensor{FQN: rowShard(i, shape, tensor.Box{}).FQN, DType: tensor.Uint8, Shape: shape}
		for rank := range ranks {
			if box := rowsOf(rank, ranks, shape); !box.Empty() {
				t.Chunks = append(t.Chunks, checkpoint.Chunk{Rank: rank, Box: box})
			}
		}
		m.Layout.Tensors = append(m.Layout.Tensors, t)
	}
	ref := checkpoint.RefOf(m.Run, m.Trial, m.Checkpoint)
	w := root.Writer(ref)
	if err := w.SetUp(ctx, true); err != nil {
		return m, err
	}
	for rank := range ranks {
		src := &rowSource{}
		for i := range tensors {
			if box := rowsOf(rank, ranks, shape); !box.Empty() {
				src.items = append(src.items, checkpoint.Item{Shard: rowShard(i, shape, box), Bytes: box.Volume()})
			}
		}
		done, err := w.WriteData(ctx, rank, src.items, src)
		if err != nil {
			return m, err
		}
		m.Ranks = append(m.Ranks, checkpoint.RankIndex{Rank: rank, Index: done.Index})
	}
	_, err := w.Finish(ctx, m, func(context.Context, checkpoint.Digest) (checkpoint.Decision, error) {
		return checkpoint.Decision{Sequence: 1, Event: "bench", Time: time.Now()}, nil
	})
	return m, err
}

// rowWants returns the wants of all ranks of the node together.
func rowWants(ranks, tensors int, shape tensor.Shape) (wants []checkpoint.Want) {
	for rank := range ranks {
		for i := range tensors {
			if box := rowsOf(rank, ranks, shape); !box.Empty() {
				wants = append(wants, checkpoint.Want{Shard: rowShard(i, shape, box), Rank: rank})
			}
		}
	}
	return wants
}

// benchLoader is the ranks that load, and their memory.
type benchLoader struct {
	reader *data.FileReader
	wants  []checkpoint.Want
	reads  []checkpoint.Read
	memory []byte
	parts  [][]byte // of memory, by want
}

// Want implements [data.Destination].
func (l *benchLoader) Want(i int) []byte { return l.parts[i] }

// prepare plans the load and touches the memory that it fills.
func (l *benchLoader) prepare(ctx context.Context, m checkpoint.Manifest) (err error) {
	if err := l.reader.SetUp(ctx, m, true); err != nil {
		return err
	}
	if l.reads, err = planner.NewLoader(m.Layout).Load(l.wants); err != nil {
		return err
	}
	if l.reads, err = l.reader.PrepareLocalPlan(ctx, l.reads); err != nil {
		return err
	}
	total := int64(0)
	for _, w := range l.wants {
		total += w.Shard.Bytes()
	}
	l.memory = make([]byte, total)
	for at := 0; at < len(l.memory); at += os.Getpagesize() {
		l.memory[at] = 1
	}
	rest := l.memory
	for _, w := range l.wants {
		n := w.Shard.Bytes()
		l.parts, rest = append(l.parts, rest[:n:n]), rest[n:]
	}
	return nil
}

// check compares everything loaded with what was saved.
func (l *benchLoader) check(shape tensor.Shape) error {
	tensors := map[string]int{}
	var want []byte
	for n, w := range l.wants {
		if _, ok := tensors[w.Shard.FQN]; !ok {
			tensors[w.Shard.FQN] = len(tensors)
		}
		if int64(cap(want)) < w.Shard.Bytes() {
			want = make([]byte, w.Shard.Bytes())
		}
		want = want[:w.Shard.Bytes()]
		rowBytes(want, tensors[w.Shard.FQN], w.Shard.Box.Offsets[0])
		if !bytes.Equal(want, l.parts[n]) {
			return fmt.Errorf("%q %v of shape %v was loaded with different bytes than were saved", w.Shard.FQN, w.Shard.Box, shape)
		}
	}
	return nil
}
