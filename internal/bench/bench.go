// Package bench measures this machine: the benchmarks of `ckptstore bench`. Their JSON
// output is an interface, like that of any command.
//
//	plan               the coordinator's plan of a save
//	log, lookup        appends to the log, and reading it
//	replay             views rebuilt from a log
//	save, load         bytes through the trainer's sockets and from the disk
//	bucket             saves to a bucket and loads from it
//	nodes              saves of a job over many nodes
//	age, jobs          stores with a long history, and with many jobs
package bench

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
)

// planBench is `bench plan --json`. Seconds are medians of benchRuns runs,
// independently for each stage and for the total.
type planBench struct {
	Bench         string      `json:"bench"`
	Layout        string      `json:"layout"`
	Ranks         int         `json:"ranks"`
	Tensors       int         `json:"tensors"`
	Items         int         `json:"items"`
	Seconds       planSeconds `json:"seconds"`
	MetadataBytes int         `json:"metadata_bytes"` // of the encoded layout
	Imbalance     float64     `json:"imbalance"`      // bytes of the busiest rank over the mean
	// ImbalanceBound is the imbalance that the largest chunk alone forces, if that is
	// above 1.
	ImbalanceBound float64 `json:"imbalance_bound,omitempty"`
	PeakRSSBytes   int64   `json:"peak_rss_bytes"`
}

type planSeconds struct {
	Decode   float64 `json:"decode"`   // encoded local plans, to plans
	Dedup    float64 `json:"dedup"`    // to offers by tensor, with replicas found
	Global   float64 `json:"global"`   // to a balanced layout
	Validate float64 `json:"validate"` // that it covers each tensor once
	Encode   float64 `json:"encode"`   // to bytes
	Total    float64 `json:"total"`
}

const benchRuns = 5

// bench holds what the benchmarks share.
type bench struct {
	*console.Console
	open OpenStore
}

// OpenStore opens the store that the command line names, and closes it after do.
type OpenStore func(ctx context.Context, do func(*store.Store) error) error

// Command returns the verb with all benchmarks. Some start this program again,
// as hidden commands below it and as [GuardCommand].
func Command(c *console.Console, open OpenStore) *cobra.Command {
	a := &bench{c, open}
	verb := &cobra.Command{
		Use: "bench", Short: "Measure this machine", Args: console.Args(cobra.ArbitraryArgs),
		RunE: func(c *cobra.Command, given []string) error {
			if len(given) == 0 {
				return c.Help()
			}
			return console.Usagef("unknown benchmark %q; see `%s --help`", given[0], c.CommandPath())
		},
	}
	verb.AddCommand(a.planVerb(), a.logVerb(), a.replayVerb(), a.lookupVerb(), a.saveVerb(), a.saveRankVerb(), a.bucketVerb(), a.loadVerb(), a.nodesVerb(), a.nodesAgentsVerb(), a.ageVerb(),
		a.jobsVerb(), a.jobVerb(), a.jobRankVerb())
	return verb
}

func (a *bench) planVerb() *cobra.Command {
	b := planBench{Bench: "plan"}
	c := &cobra.Command{
		Use: "plan", Short: "Time the coordinator: local plans of all ranks in, layout out", Args: console.Args(cobra.NoArgs),
		Long: `Time what the coordinator does between the last local plan of a save and its
global plan: decode all plans, find replicas, balance them, check that every
tensor is covered once, encode the layout. The plans are those of a
transformer, cut according to --layout. Each figure is the median of five runs.`,
		RunE: func(*cobra.Command, []string) error {
			if err := b.run(); err != nil {
				return err
			}
			return console.Emit(a.Console, b, []planBench{b}, func(w *tabwriter.Writer, _ bool) {
				console.Row(w, "RANKS", "TENSORS", "ITEMS", "DECODE", "DEDUP", "GLOBAL", "VALIDATE", "ENCODE", "TOTAL", "METADATA", "IMBALANCE", "PEAK RSS")
				cells := []any{b.Ranks, b.Tensors, b.Items}
				for _, s := range b.Seconds.all() {
					cells = append(cells, fmt.Sprintf("%.4gs", *s))
				}
				console.Row(w, append(cells, bytesize.Text(int64(b.MetadataBytes)), fmt.Sprintf("%.3f", b.Imbalance), bytesize.Text(b.PeakRSSBytes))...)
			})
		},
	}
	f := c.Flags()
	f.IntVar(&b.Ranks, "ranks", 512, "ranks that save")
	f.IntVar(&b.Tensors, "tensors", 500, "tensors of the model")
	f.StringVar(&b.Layout, "layout", "shard0", "shard0, fsdp-tp, hsdp or replicated")
	return c
}

func (s *planSeconds) all() []*float64 {
	return []*float64{&s.Decode, &s.Dedup, &s.Global, &s.Validate, &s.Encode, &s.Total}
}

func (b *planBench) run() error {
	const most = 1 << 24
	if b.Ranks < 1 || b.Tensors < 1 || b.Ranks > most/b.Tensors {
		return console.Usagef("--ranks %d --tensors %d: want at least 1 of each, and at most %d shards", b.Ranks, b.Tensors, most)
	}
	cut, ok := meshes[b.Layout]
	if !ok {
		return console.Usagef("--layout %q: want shard0, fsdp-tp, hsdp or replicated", b.Layout)
	}
	data := make([][]byte, b.Ranks)
	for rank := range data {
		data[rank] = checkpoint.EncodeLocal(modelPlan(rank, b.Ranks, b.Tensors, cut))
	}
	var runs [benchRuns]planSeconds
	for i := range runs {
		runtime.GC() // release the garbage of the run before
		if err := b.once(data, &runs[i]); err != nil {
			return err
		}
	}
	for i, s := range b.Seconds.all() {
		var column []float64
		for _, r := range runs {
			column = append(column, *r.all()[i])
		}
		slices.Sort(column)
		*s = column[len(column)/2]
	}
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return fmt.Errorf("ask for the peak of memory: %w", err)
	}
	b.PeakRSSBytes = usage.Maxrss << 10
	return nil
}

// once runs all stages and times each of them.
func (b *planBench) once(data [][]byte, took *planSeconds) error {
	begin := time.Now()
	lap := begin
	stage := func(seconds *float64) {
		now := time.Now()
		*seconds, lap = now.Sub(lap).Seconds(), now
	}
	locals, err := checkpoint.DecodeLocals(data)
	if err != nil {
		return err
	}
	stage(&took.Decode)
	offers := planner.Dedup(locals)
	stage(&took.Dedup)
	layout := offers.Layout()
	stage(&took.Global)
	if err := offers.Validate(layout); err != nil {
		return err
	}
	stage(&took.Validate)
	encoded := checkpoint.EncodeLayout(layout)
	stage(&took.Encode)
	took.Total = time.Since(begin).Seconds()

	b.Items, b.MetadataBytes = 0, len(encoded)
	for _, l := range locals {
		b.Items += len(l.Items)
	}
	even := planner.BalanceOf(layout, b.Ranks)
	b.Imbalance = float64(even.Busiest) / even.Mean
	if bound := float64(even.Largest) / even.Mean; bound > 1 {
		b.ImbalanceBound = bound
	}
	return nil
}
