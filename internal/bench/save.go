package bench

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/tensor"
)

// saveBench is `bench save --json`. Seconds and bytes written are medians of benchRuns
// saves.
type saveBench struct {
	Bench        string  `json:"bench"`
	Ranks        int     `json:"ranks"`
	Tensors      int     `json:"tensors"` // of each rank
	Unchanged    float64 `json:"unchanged"`
	Bytes        int64   `json:"bytes"`
	BytesWritten int64   `json:"bytes_written"`
	Seconds      float64 `json:"seconds"` // from staged to committed
	Rate         float64 `json:"bytes_per_second"`
	RawRate      float64 `json:"raw_bytes_per_second"`
	Ratio        float64 `json:"ratio"`
	Direct       bool    `json:"raw_direct"` // whether the raw writes bypassed the page cache
	Blocking     float64 `json:"blocking_seconds_per_gb"`
	Copy         float64 `json:"copy_seconds_per_gb"`
}

func (a *bench) saveVerb() *cobra.Command {
	b := saveBench{Bench: "save"}
	dir, text := "", ""
	c := &cobra.Command{
		Use: "save", Short: "Time a save, from staged to committed, compared with raw writes", Args: console.Args(cobra.NoArgs),
		Long: `Save --size bytes of --ranks ranks with --tensors tensors each, and time it from
staged to committed: all ranks are digested and written in parallel, and the
checkpoint gets its manifest and receipt. The log, which may be on another disk,
is not used. The share --unchanged of the tensors stays as in the first save.

After each save the same bytes are written raw and synced, from the slots and
past the page cache if the filesystem supports that, two writes of 4 MiB at a
time for each rank. Ratio is the rate of the save over the rate of these writes,
where reused bytes count as saved. Both are repeated five times after a first
save, in alternating order, and each figure is the median. The last save is read
and compared.

Blocking is the wall time in Save of the slowest rank. One process for each rank
saves its tensors seven times through the sockets of a trainer, into its slots
in shared memory. Each save comes after a copy of the same bytes into warm
memory, and after the previous checkpoint was committed. Blocking is the median
of the saves 3 to 7, and copy the median of their copies. The files are in a new
directory in --dir, which is removed afterwards.`,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if b.Bytes, err = console.ParseSize(text); err != nil {
				return console.Usagef("--size: %w", err)
			}
			if b.Ranks < 1 || b.Tensors < 1 || b.Bytes < int64(b.Ranks)*int64(b.Tensors) || b.Unchanged < 0 || b.Unchanged > 1 {
				return console.Usagef("--ranks %d --tensors %d --size %s --unchanged %v: want at least one of each, a byte a tensor, and a share from 0 to 1", b.Ranks, b.Tensors, text, b.Unchanged)
			}
			if err := scratch(dir, func(dir string) error { return b.run(c.Context(), dir) }); err != nil {
				return err
			}
			return console.Emit(a.Console, b, []saveBench{b}, func(w *tabwriter.Writer, _ bool) {
				console.Row(w, "RANKS", "TENSORS", "BYTES", "WRITTEN", "SECONDS", "BYTES/S", "RAW BYTES/S", "RATIO", "BLOCKING S/GB", "COPY S/GB")
				console.Row(w, b.Ranks, b.Tensors, bytesize.Text(b.Bytes), bytesize.Text(b.BytesWritten), fmt.Sprintf("%.3f", b.Seconds), fmt.Sprintf("%.4g", b.Rate),
					fmt.Sprintf("%.4g", b.RawRate), fmt.Sprintf("%.3f", b.Ratio), fmt.Sprintf("%.4f", b.Blocking), fmt.Sprintf("%.4f", b.Copy))
			})
		},
	}
	f := c.Flags()
	f.StringVar(&dir, "dir", ".", "directory for the data, on the disk to measure")
	f.IntVar(&b.Ranks, "ranks", 2, "ranks that save")
	f.IntVar(&b.Tensors, "tensors", 64, "tensors of each rank")
	f.StringVar(&text, "size", "2GB", "bytes of all ranks together")
	f.Float64Var(&b.Unchanged, "unchanged", 0, "share of the tensors that do not change after the first save")
	return c
}

// run computes the figures.
func (b *saveBench) run(ctx context.Context, dir string) error {
	each := b.Bytes / int64(b.Ranks) / int64(b.Tensors)
	b.Bytes = each * int64(b.Ranks) * int64(b.Tensors)
	if err := os.Mkdir(filepath.Join(dir, "data"), 0o700); err != nil {
		return err
	}
	block, err := b.measureBlocking(ctx, dir, each)
	if err != nil {
		return err
	}
	root, err := store.OpenData(dir)
	if err != nil {
		return err
	}
	root.OfStore("bench")
	s := &benchSaver{root: root, dir: dir}
	defer s.close()
	for rank := range b.Ranks {
		if err := s.addRank(rank, b.Tensors, each); err != nil {
			return err
		}
	}
	var seconds, raw, written []float64
	for n := range benchRuns + 1 {
		if err := ctx.Err(); err != nil {
			return err
		}
		s.change(n, 1-b.Unchanged)
		s.stage()
		var took, alone time.Duration
		var fresh int64 // bytes that were written
		save := func() (err error) { took, fresh, err = s.save(ctx, n); return err }
		write := func() (err error) { alone, b.Direct, err = s.raw(ctx); return err }
		turn := []func() error{save, write}
		if n%2 == 0 { // alternate the order, so that neither always pays for the other's pending disk work
			turn[0], turn[1] = write, save
		}
		for _, do := range turn {
			if err := do(); err != nil {
				return err
			}
		}
		if n == 0 {
			continue // the first run touches memory and disk, and provides data to reuse
		}
		seconds, written = append(seconds, took.Seconds()), append(written, float64(fresh))
		raw = append(raw, alone.Seconds())
	}
	if err := s.verify(ctx); err != nil {
		return err
	}
	gb := float64(b.Bytes) / float64(b.Ranks) / 1e9
	b.Seconds, b.BytesWritten = middle(seconds), int64(middle(written))
	b.Rate, b.RawRate = float64(b.Bytes)/b.Seconds, float64(b.Bytes)/middle(raw)
	b.Ratio, b.Blocking, b.Copy = b.Rate/b.RawRate, block.save.Seconds()/gb, block.copy.Seconds()/gb
	return nil
}

// middle returns the median.
func middle(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}

// benchSaver saves its ranks' memory repeatedly.
type benchSaver struct {
	root  *data.Root
	dir   string
	ranks []*benchRank
	base  []data.Base
}

// benchRank is one rank: its memory, and its slot in shared memory.
type benchRank struct {
	memory, slot []byte
	each         int64 // bytes of a tensor
	items        []checkpoint.Item
}

// Item implements [data.Source].
func (r *benchRank) Item(i int) ([]byte, error) {
	return r.slot[int64(i)*r.each:][:r.each], nil
}

// Lasts implements [data.Lasting], as a slot of the trainer does.
func (r *benchRank) Lasts() {}

func (s *benchSaver) addRank(rank, tensors int, each int64) error {
	slot, err := sharedMemory(each * int64(tensors))
	if err != nil {
		return err
	}
	r := &benchRank{memory: make([]byte, each*int64(tensors)), slot: slot, each: each}
	s.ranks = append(s.ranks, r)
	_, _ = rand.NewChaCha8([32]byte{byte(rank), byte(rank >> 8)}).Read(r.memory) // never fails
	for i := range tensors {
		shape := tensor.Shape{each}
		shard := tensor.Shard{FQN: fmt.Sprintf("rank%d.layers.%d.weight", rank, i), DType: tensor.Uint8, Global: shape, Box: shape.Full()}
		r.items = append(r.items, checkpoint.Item{Shard: shard, Bytes: each})
	}
	return nil
}

// change gives new bytes to a share of each rank's tensors.
func (s *benchSaver) change(n int, share float64) {
	for _, r := range s.ranks {
		for i := range int(share*float64(len(r.items)) + 0.5) {
			r.memory[int64(i)*r.each] ^= byte(1 + n)
		}
	}
}

// stage copies all ranks' memory to their slots.
func (s *benchSaver) stage() {
	for _, r := range s.ranks {
		copy(r.slot, r.memory)
	}
}

// save writes and commits the staged bytes, and removes the checkpoint before the last.
func (s *benchSaver) save(ctx context.Context, n int) (took time.Duration, written int64, err error) {
	m := checkpoint.Manifest{
		Store: "bench", Run: "bench", Trial: "main", Checkpoint: fmt.Sprintf("step-%d.a1", n), Name: fmt.Sprintf("step-%d", n),
		Step: int64(n), Attempt: 1, WorldSize: len(s.ranks), Ranks: make([]checkpoint.RankIndex, len(s.ranks)),
	}
	for rank, r := range s.ranks {
		for _, it := range r.items {
			m.Layout.Tensors = append(m.Layout.Tensors, checkpoint.Tensor{
				FQN: it.Shard.FQN, DType: it.Shard.DType, Shape: it.Shard.Global, Chunks: []checkpoint.Chunk{{Rank: rank, Box: it.Shard.Box}},
			})
		}
	}
	ref := checkpoint.RefOf(m.Run, m.Trial, m.Checkpoint)
	began := time.Now()
	bytes := make([]int64, len(s.ranks))
	g, inner := errgroup.WithContext(ctx)
	for rank, r := range s.ranks {
		g.Go(func() error {
			w := s.root.Writer(ref).Reusing(nil, s.base...)
			if err := w.SetUp(inner, rank == 0); err != nil {
				return err
			}
			done, err := w.WriteData(inner, rank, r.items, r)
			m.Ranks[rank], bytes[rank] = checkpoint.RankIndex{Rank: rank, Index: done.Index}, done.BytesWritten
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return 0, 0, err
	}
	receipt, err := s.root.Writer(ref).Finish(ctx, m, func(context.Context, checkpoint.Digest) (checkpoint.Decision, error) {
		return checkpoint.Decision{Sequence: uint64(n + 1), Event: "bench", Time: began}, nil
	})
	took = time.Since(began)
	if err != nil {
		return 0, 0, err
	}
	for _, old := range s.base {
		err = s.root.RemoveCommitted(ctx, old.Ref)
	}
	s.base = []data.Base{{Ref: ref, Manifest: receipt.Manifest}}
	for _, n := range bytes {
		written += n
	}
	return took, written, err
}

// verify reads the last save and compares it: a fast save of wrong bytes does not
// count.
func (s *benchSaver) verify(ctx context.Context) error {
	last := s.base[0]
	report, err := s.root.Verify(ctx, last.Ref, last.Manifest, nil)
	if err == nil && len(report.Findings) > 0 {
		err = fmt.Errorf("the saved checkpoint is damaged: %v", report.Findings[0])
	}
	if err != nil {
		return err
	}
	m, err := s.root.Reader(last.Ref).ReadMetadata(ctx)
	if err != nil {
		return err
	}
	for rank, r := range s.ranks {
		reader := s.root.Reader(last.Ref)
		if err := reader.SetUp(ctx, m, rank == 0); err != nil {
			return err
		}
		items := data.NewCopySource(ctx, reader, rank, r.items, nil)
		for i := range r.items {
			got, err := items.Item(i)
			if err != nil {
				return err
			}
			if want, _ := r.Item(i); !bytes.Equal(got, want) {
				return fmt.Errorf("%q of rank %d was saved with different bytes than were staged", r.items[i].Shard.FQN, rank)
			}
		}
	}
	return nil
}
