package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

// logBench is `bench log --json`. Latencies are of single appends, from the
// call to the acknowledgement that the event is durable.
type logBench struct {
	Bench           string  `json:"bench"`
	Events          int     `json:"events"`
	Writers         int     `json:"writers"`
	Outstanding     int     `json:"outstanding"` // appends of one writer at a time
	Sync            string  `json:"sync"`
	EventsPerSecond float64 `json:"events_per_second"`
	P50             float64 `json:"p50_ms"`
	P99             float64 `json:"p99_ms"`
	FsyncP50        float64 `json:"fsync_p50_ms"` // of 4 KiB in the same directory, before and after
}

func (a *app) benchLogCommand() *cobra.Command {
	b := logBench{Bench: "log", Sync: "always"}
	dir := ""
	c := &cobra.Command{
		Use: "log", Short: "Time durable appends to the log by many writers", Args: args(cobra.NoArgs),
		Long: `Time appends to an embedded log that syncs before it acknowledges. Each writer
keeps --outstanding appends of one event in flight. In the end the log is asked
whether it has them all. The log is made in a new directory, which is removed.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if b.Events < 1 || b.Writers < 1 || b.Outstanding < 1 {
				return usageError{fmt.Errorf("--events %d --writers %d --outstanding %d: want at least 1 of each", b.Events, b.Writers, b.Outstanding)}
			}
			err := scratch(dir, func(dir string) error { return b.run(c.Context(), dir) })
			if err != nil {
				return err
			}
			return emit(a, b, []logBench{b}, func(w *tabwriter.Writer, _ bool) {
				row(w, "EVENTS", "WRITERS", "OUTSTANDING", "SYNC", "EVENTS/S", "P50", "P99", "FSYNC P50")
				row(w, b.Events, b.Writers, b.Outstanding, b.Sync, fmt.Sprintf("%.0f", b.EventsPerSecond), ms(b.P50), ms(b.P99), ms(b.FsyncP50))
			})
		},
	}
	f := c.Flags()
	f.IntVar(&b.Events, "events", 200_000, "events to append")
	f.IntVar(&b.Writers, "writers", 64, "concurrent writers")
	f.IntVar(&b.Outstanding, "outstanding", 4, "appends that a writer keeps in flight")
	f.StringVar(&dir, "dir", ".", "directory in which the new one is made, so that its disk is measured")
	return c
}

func ms(v float64) string { return fmt.Sprintf("%.3gms", v) }

func (b *logBench) run(ctx context.Context, dir string) error {
	return benchLog(ctx, dir, func(log *jetlog.Log, _ string) error {
		const syncs = 50 // on each side of the run: a disk's mood changes
		fsync, err := fsyncs(dir, syncs)
		if err != nil {
			return err
		}
		took := make([]time.Duration, b.Events)
		var next atomic.Int64
		begin := time.Now()
		writers, ctx := errgroup.WithContext(ctx)
		for rank := range b.Writers {
			for range b.Outstanding {
				writers.Go(func() error {
					for i := int(next.Add(1)); i <= b.Events; i = int(next.Add(1)) {
						fact, err := benchReport(rank, i)
						if err != nil {
							return err
						}
						start := time.Now()
						if _, err := log.Append(ctx, fact); err != nil {
							return err
						}
						took[i-1] = time.Since(start)
					}
					return nil
				})
			}
		}
		if err := writers.Wait(); err != nil {
			return err
		}
		b.EventsPerSecond = float64(b.Events) / time.Since(begin).Seconds()
		after, err := fsyncs(dir, syncs)
		if err != nil {
			return err
		}
		last, err := log.Last(context.WithoutCancel(ctx))
		if err != nil {
			return err
		}
		if want := uint64(b.Events) + 1; last != want {
			return fmt.Errorf("the log ends at event %d after %d acknowledged appends, want %d", last, b.Events, want)
		}
		sorted(took)
		b.P50, b.P99 = quantile(took, 0.5), quantile(took, 0.99)
		b.FsyncP50 = quantile(sorted(append(fsync, after...)), 0.5)
		return nil
	})
}
