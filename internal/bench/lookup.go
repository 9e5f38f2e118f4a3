package bench

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// lookupBench is `bench lookup --json`.
type lookupBench struct {
	Bench       string  `json:"bench"`
	Checkpoints int     `json:"checkpoints"`
	Tensors     int     `json:"tensors"`
	P50         float64 `json:"p50_ms"`  // of a lookup
	P99         float64 `json:"p99_ms"`  // of a lookup
	List        float64 `json:"list_ms"` // median of benchRuns listings of all
	Best        float64 `json:"best_ms"` // median of benchRuns references RUN@best:loss:min
}

// lookupRanks is the number of ranks that save the checkpoints.
const lookupRanks = 8

func (a *bench) lookupVerb() *cobra.Command {
	b, dir := lookupBench{Bench: "lookup"}, ""
	c := &cobra.Command{
		Use: "lookup", Short: "Time looking up checkpoints among many", Args: console.Args(cobra.NoArgs),
		Long: `Fill views and a data directory with --checkpoints checkpoints of --tensors
tensors, saved by 8 ranks, and time 2000 lookups and the listing of all. A
lookup goes from a reference to the place of one tensor's chunks: the reference
is resolved in the views, and the manifest that they name is read from its file
and decoded. Views and manifests are in a new directory, which is removed
afterwards.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if b.Checkpoints < 1 || b.Tensors < 1 {
				return console.Usagef("--checkpoints %d --tensors %d: want at least 1 of each", b.Checkpoints, b.Tensors)
			}
			err := scratch(dir, func(dir string) error { return b.run(c.Context(), dir) })
			if err != nil {
				return err
			}
			return console.Emit(a.Console, b, []lookupBench{b}, func(w *tabwriter.Writer, _ bool) {
				console.Row(w, "CHECKPOINTS", "TENSORS", "P50", "P99", "LIST", "BEST")
				console.Row(w, b.Checkpoints, b.Tensors, ms(b.P50), ms(b.P99), ms(b.List), ms(b.Best))
			})
		},
	}
	f := c.Flags()
	f.IntVar(&b.Checkpoints, "checkpoints", 10_000, "checkpoints in the views")
	f.IntVar(&b.Tensors, "tensors", 500, "tensors of each")
	f.StringVar(&dir, "dir", ".", "parent of the new directory, which determines the measured disk")
	return c
}

func (b *lookupBench) run(ctx context.Context, dir string) (err error) {
	history := savedLog{store: store.NewID()}
	if err := b.fill(&history, dir); err != nil {
		return err
	}
	data, err := store.OpenData(dir)
	if err != nil {
		return err
	}
	db, err := viewdb.Open(filepath.Join(dir, "views"), viewdb.Options{Store: history.store})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := db.CatchUp(ctx, history); err != nil {
		return err
	}
	views := &query.Local{Views: db, Last: history.Last}

	const lookups = 2000
	random := rand.New(rand.NewPCG(1, 2))
	took := make([]time.Duration, lookups)
	for i := range took {
		step, fqn := 1+random.IntN(b.Checkpoints), tensorName(random.IntN(b.Tensors))
		begin := time.Now()
		if err := lookup(ctx, views, data, fmt.Sprintf("%s@step-%d", benchRun, step), fqn); err != nil {
			return err
		}
		took[i] = time.Since(begin)
	}
	sorted(took)
	b.P50, b.P99 = quantile(took, 0.5), quantile(took, 0.99)
	if b.List, err = median(func() error {
		rows, err := query.Ask(ctx, views, query.Checkpoints, query.Params{Run: benchRun})
		if err == nil && len(rows) != b.Checkpoints {
			err = fmt.Errorf("the listing has %d checkpoints, want %d", len(rows), b.Checkpoints)
		}
		return err
	}); err != nil {
		return err
	}
	b.Best, err = median(func() error {
		c, err := query.Ask(ctx, views, query.Resolve, query.Params{Ref: benchRun + "@best:loss:min"})
		if err == nil && c.Step != int64(b.Checkpoints) {
			err = fmt.Errorf("the best checkpoint is that of step %d, want the last", c.Step)
		}
		return err
	})
	return err
}

// lookup resolves a reference to the place of a tensor.
func lookup(ctx context.Context, views query.Source, data *data.Root, ref, fqn string) error {
	c, err := query.Ask(ctx, views, query.Resolve, query.Params{Ref: ref})
	if err != nil {
		return err
	}
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return err
	}
	m, err := data.Reader(store.RefOf(c)).WithManifest(digest).Only(fqn).ReadMetadata(ctx)
	if err != nil {
		return err
	}
	i, found := slices.BinarySearchFunc(m.Layout.Tensors, fqn, func(t checkpoint.Tensor, fqn string) int { return strings.Compare(t.FQN, fqn) })
	if !found || len(m.Layout.Tensors[i].Chunks) == 0 {
		return fmt.Errorf("%s has no tensor %q", ref, fqn)
	}
	return nil
}

func median(do func() error) (float64, error) {
	took := make([]time.Duration, benchRuns)
	for i := range took {
		begin := time.Now()
		if err := do(); err != nil {
			return 0, err
		}
		took[i] = time.Since(begin)
	}
	return quantile(sorted(took), 0.5), nil
}

// fill writes the manifests and records their commits in the log.
func (b *lookupBench) fill(l *savedLog, dir string) error {
	locals := make([]checkpoint.Local, lookupRanks)
	for rank := range locals {
		locals[rank] = modelPlan(rank, lookupRanks, b.Tensors, meshes["shard0"])
	}
	m := checkpoint.Manifest{Store: l.store, Run: benchRun, Trial: projections.DefaultTrial, Attempt: 1, WorldSize: lookupRanks, Layout: planner.Dedup(locals).Layout()}
	for rank := range lookupRanks {
		m.Ranks = append(m.Ranks, checkpoint.RankIndex{Rank: rank, Index: checkpoint.Sum([]byte{byte(rank)})})
	}
	agg := events.Aggregate{Run: m.Run, Trial: m.Trial}
	if err := errors.Join(
		l.decide(events.Aggregate{}, &events.StoreCreated{Store: l.store, Format: store.Format, Data: "data"}),
		l.decide(agg, &events.GroupStarted{Attempt: 1, WorldSize: lookupRanks})); err != nil {
		return err
	}
	for step := 1; step <= b.Checkpoints; step++ {
		m.Step, m.Name = int64(step), fmt.Sprintf("step-%d", step)
		m.Checkpoint = m.Name + ".a1"
		encoded := checkpoint.EncodeManifest(m)
		digest := checkpoint.Sum(encoded)
		place := filepath.Join(dir, "data", checkpoint.RefOf(m.Run, m.Trial, m.Checkpoint).String())
		if err := os.MkdirAll(place, 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(place, "manifest-"+digest.String()), encoded, 0o600); err != nil {
			return err
		}
		report, err := benchReport(0, step)
		if err != nil {
			return err
		}
		l.record(report.Event)
		if err := errors.Join(
			l.decide(agg, &events.CheckpointBegun{Attempt: 1, Checkpoint: m.Checkpoint, Name: m.Name, Step: m.Step, WorldSize: lookupRanks, Participants: []int{0, 1, 2, 3, 4, 5, 6, 7}}),
			l.decide(agg, &events.CheckpointCommitted{Attempt: 1, Checkpoint: m.Checkpoint, Manifest: digest.String(), Bytes: m.Layout.Bytes()})); err != nil {
			return err
		}
	}
	return nil
}

// savedLog is a log in memory: tens of thousands of decisions would take minutes on a
// disk, and the timed code does not read them.
type savedLog struct {
	store  string
	events []events.Recorded
}

var _ viewdb.Source = savedLog{}

func (l *savedLog) record(e events.Event) {
	l.events = append(l.events, events.Recorded{Event: e, Sequence: uint64(len(l.events) + 1), Stored: e.Time})
}

func (l *savedLog) decide(agg events.Aggregate, body events.Body) error {
	d, err := events.NewDecision(store.Stamp("bench"), agg, body)
	if err == nil {
		l.record(d.Event)
	}
	return err
}

// Last implements [viewdb.Source].
func (l savedLog) Last(context.Context) (uint64, error) { return uint64(len(l.events)), nil }

// Read implements [viewdb.Source]. It does not follow: no event is appended.
func (l savedLog) Read(_ context.Context, from, _ uint64) iter.Seq2[events.Recorded, error] {
	return func(yield func(events.Recorded, error) bool) {
		for _, r := range l.events[from-1:] {
			if !yield(r, nil) {
				return
			}
		}
	}
}
