package bench

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/console"
)

// ageBench is `bench age --json`. Seconds are medians of Rounds rounds unless noted.
// Each round is a separate process, timed from its start or from the kill, to its end
// or its first answer.
type ageBench struct {
	Bench       string `json:"bench"`
	Checkpoints int    `json:"checkpoints"`
	Events      uint64 `json:"events"`
	Runs        int    `json:"runs"`
	Rounds      int    `json:"rounds"`

	Generation float64 `json:"generation_seconds"`
	Filled     float64 `json:"first_open_seconds"` // once, including the build of the views
	LogBytes   int64   `json:"log_bytes"`
	DataBytes  int64   `json:"data_bytes"` // including partly filled blocks of files
	ViewBytes  int64   `json:"views_bytes"`

	Takeover  float64 `json:"takeover_seconds"`             // from SIGKILL of the owner to the answer of the next
	OpenKill  float64 `json:"open_after_kill_seconds"`      // of an owner, without a takeover
	Open      float64 `json:"open_seconds"`                 // of an owner, after a clean end
	Ls        float64 `json:"ls_seconds"`                   // of one run, without an owner
	LsBeside  float64 `json:"ls_beside_owner_seconds"`      // of one run
	Show      float64 `json:"show_seconds"`                 // of one checkpoint, without an owner
	Jobs      float64 `json:"jobs_seconds"`                 // of all runs, without an owner
	GC        float64 `json:"gc_seconds"`                   // dry run of all, without an owner
	GCBeside  float64 `json:"gc_beside_owner_seconds"`      // dry run of all
	GCMemory  int64   `json:"gc_rss_bytes"`                 // peak of the first
	Owner     int64   `json:"owner_rss_bytes"`              // of an idle owner
	OwnerPeak int64   `json:"owner_peak_rss_bytes"`         // since its start
	OwnerGC   int64   `json:"owner_rss_after_gc_bytes"`     // of an owner, after the dry run of another process
	Verify    float64 `json:"verify_log_seconds,omitempty"` // once
	VerifyRSS int64   `json:"verify_log_rss_bytes,omitempty"`
}

// ageOptions are the flags.
type ageOptions struct {
	dir    string
	events int
	spike  int
	keep   bool
	verify bool
}

const benchAgeHelp = `Generate a store with a history, and time operations on it in separate
processes: the takeover of a killed owner's store, opening it after an owner
that ended in order, listing a run, a dry run of gc over all runs, and reading
the whole log. The memory of its owner is measured too.

The functions that trainers use write the events, data directories, manifests,
indexes and receipts, for one rank that saves a small tensor; only syncs are
left out. The first opening builds the views and other cached files, and is
timed too.

The store is in a new directory in --dir, which is removed afterwards. With
--keep it stays, and an existing store of the same size is used again.`

func (a *bench) ageVerb() *cobra.Command {
	b := ageBench{Bench: "age"}
	var o ageOptions
	c := &cobra.Command{
		Use: "age", Short: "Time the commands on a store with a long history", Args: console.Args(cobra.NoArgs), Long: benchAgeHelp,
		Example: "  ckptstore bench age --checkpoints 10000 --events 500000 --runs 100 --dir /data/bench --keep --json",
		RunE: func(c *cobra.Command, _ []string) error {
			if b.Runs < 1 || b.Checkpoints < b.Runs || b.Rounds < 1 {
				return console.Usagef("--runs %d --checkpoints %d --rounds %d: want at least 1 of each, and a checkpoint for each run", b.Runs, b.Checkpoints, b.Rounds)
			}
			if least := b.Runs*eventsOfRun + b.Checkpoints*eventsOfSave; o.events < least {
				return console.Usagef("--events %d: want at least %d for that many checkpoints and runs", o.events, least)
			}
			if err := a.age(c.Context(), &b, o); err != nil {
				return err
			}
			return console.Emit(a.Console, b, []ageBench{b}, func(w *tabwriter.Writer, _ bool) {
				console.Row(w, "CHECKPOINTS", "EVENTS", "RUNS", "TAKE-OVER", "OPEN", "LS", "GC", "OWNER RSS", "VERIFY LOG", "ITS RSS")
				console.Row(w, b.Checkpoints, b.Events, b.Runs, seconds(b.Takeover), seconds(b.Open), seconds(b.Ls), seconds(b.GC), bytesize.Text(b.Owner), seconds(b.Verify), bytesize.Text(b.VerifyRSS))
			})
		},
	}
	f := c.Flags()
	f.IntVar(&b.Checkpoints, "checkpoints", 10_000, "checkpoints of all runs")
	f.IntVar(&o.events, "events", 500_000, "events in the log")
	f.IntVar(&b.Runs, "runs", 100, "runs, each of one attempt")
	f.IntVar(&b.Rounds, "rounds", benchRuns, "number of rounds; the log is read once")
	f.StringVar(&o.dir, "dir", "", "parent of the new directory, which determines the measured disk (default: the system's temporary directory)")
	f.BoolVar(&o.keep, "keep", false, "keep the store in --dir, and use an existing one of the same size")
	f.IntVar(&o.spike, "spike", 0, "iteration whose loss is 1000 in each run, before one whose loss is NaN: charts must show both")
	f.BoolVar(&o.verify, "verify-log", true, "also read the whole log")
	return c
}

func seconds(s float64) string { return fmt.Sprintf("%.3gs", s) }

func (a *bench) age(ctx context.Context, b *ageBench, o ageOptions) error {
	if o.dir == "" {
		if o.keep {
			return console.Usagef("--keep needs --dir, the directory in which the store stays")
		}
		o.dir = os.TempDir()
	}
	if o.keep {
		return a.ageIn(ctx, o.dir, b, o)
	}
	return scratch(o.dir, func(dir string) error { return a.ageIn(ctx, dir, b, o) })
}

func (a *bench) ageIn(ctx context.Context, dir string, b *ageBench, o ageOptions) error {
	said := time.Now()
	aged, err := makeAged(ctx, dir, b.Checkpoints, o.events, b.Runs, o.spike, func(done int) {
		if !a.Quiet && done%1000 == 0 && done < b.Checkpoints {
			fmt.Fprintf(a.Err, "made %d of %d checkpoints in %s\n", done, b.Checkpoints, time.Since(said).Round(time.Second))
		}
	})
	if err != nil {
		return err
	}
	b.Events, b.Generation = aged.Events, aged.Seconds
	m, err := newAgeMeter(aged, a)
	if err != nil {
		return err
	}
	if err := m.measure(ctx, b, o.verify); err != nil {
		return err
	}
	for sub, size := range map[string]*int64{"log": &b.LogBytes, "data": &b.DataBytes, "views": &b.ViewBytes} {
		if *size, err = diskUsage(filepath.Join(aged.dir, sub)); err != nil {
			return err
		}
	}
	return nil
}

// diskUsage returns the disk space of the files below a directory, in bytes.
func diskUsage(dir string) (bytes int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err == nil {
			bytes += blocksOf(info)
		}
		return err
	})
	return bytes, err
}
