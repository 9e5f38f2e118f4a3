package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// replayBench is `bench replay --json`.
type replayBench struct {
	Bench  string  `json:"bench"`
	Events uint64  `json:"events"` // in the log that was read
	Read   float64 `json:"read_events_per_second"`
	// Rebuild is the rate of reading the log from the disk and folding it into a new
	// view on the disk, including its last sync.
	Rebuild float64 `json:"rebuild_events_per_second"`
}

func (a *bench) replayVerb() *cobra.Command {
	b, count, dir := replayBench{Bench: "replay"}, 0, ""
	c := &cobra.Command{
		Use: "replay", Short: "Time the rebuild of the views from the log", Args: console.Args(cobra.NoArgs),
		Long: `Fill a log with --events events, of which one in a thousand begins a checkpoint
and one commits it, and time how fast views are rebuilt from it on the disk.
Reading the log alone is timed first. Log and views are in a new directory,
which is removed afterwards.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if count < 1 {
				return console.Usagef("--events %d: want at least 1", count)
			}
			err := scratch(dir, func(dir string) error { return b.run(c.Context(), dir, count) })
			if err != nil {
				return err
			}
			return console.Emit(a.Console, b, []replayBench{b}, func(w *tabwriter.Writer, _ bool) {
				console.Row(w, "EVENTS", "READ EVENTS/S", "REBUILD EVENTS/S")
				console.Row(w, b.Events, fmt.Sprintf("%.0f", b.Read), fmt.Sprintf("%.0f", b.Rebuild))
			})
		},
	}
	f := c.Flags()
	f.IntVar(&count, "events", 500_000, "events in the log")
	f.StringVar(&dir, "dir", ".", "parent of the new directory, which determines the measured disk")
	return c
}

func (b *replayBench) run(ctx context.Context, dir string, count int) error {
	return benchLog(ctx, dir, func(log *jetlog.Log, id string) error {
		if err := fillLog(ctx, log, count); err != nil {
			return err
		}
		last, err := log.Last(ctx)
		if err != nil {
			return err
		}
		b.Events = last
		begin := time.Now()
		for _, err := range log.Read(ctx, 1, last) {
			if err != nil {
				return err
			}
		}
		b.Read = float64(last) / time.Since(begin).Seconds()
		begin = time.Now()
		db, err := viewdb.Open(filepath.Join(dir, "views"), viewdb.Options{Store: id})
		if err != nil {
			return err
		}
		if err := db.CatchUp(ctx, log); err != nil {
			return errors.Join(err, db.Close())
		}
		b.Rebuild = float64(last) / time.Since(begin).Seconds()
		return db.Close()
	})
}

// fillLog appends about count events: reports, and with every thousandth a checkpoint.
func fillLog(ctx context.Context, log *jetlog.Log, count int) error {
	const every = 1000
	agg := events.Aggregate{Run: benchRun, Trial: "main"}
	lane := uint64(0)
	decide := func(body events.Body) error {
		d, err := events.NewDecision(store.Stamp("bench"), agg, body)
		if err == nil {
			lane, err = log.Decide(ctx, d, lane)
		}
		return err
	}
	if err := decide(&events.GroupStarted{Attempt: 1, WorldSize: 1}); err != nil {
		return err
	}
	for from := 0; from < count; from += every {
		some := make([]events.Fact, min(every, count-from))
		for i := range some {
			var err error
			if some[i], err = benchReport(0, from+i+1); err != nil {
				return err
			}
		}
		if _, err := log.Append(ctx, some...); err != nil {
			return err
		}
		step := from + len(some)
		name := fmt.Sprintf("step-%d", step)
		save := name + ".a1"
		if err := decide(&events.CheckpointBegun{Attempt: 1, Checkpoint: save, Name: name, Step: int64(step), WorldSize: 1, Participants: []int{0}}); err != nil {
			return err
		}
		if err := decide(&events.CheckpointCommitted{Attempt: 1, Checkpoint: save, Manifest: "m", Bytes: 1 << 30}); err != nil {
			return err
		}
	}
	return nil
}
