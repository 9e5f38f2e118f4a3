// Package demo is `trainer demo`: it trains a small real model in worker processes,
// kills one of them, and shows what the store does.
package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/place"
	"github.com/ckptstore/ckptstore/projections"
)

const demoHelp = `Train a small real network on handwritten digits and show what the store does:

  1. a reference run of 4 ranks, never interrupted
  2. the same run with rank 2 killed in the middle of a save: the save is
     aborted, the group restarts, and the end is the same to the last bit
  3. that run continued on 3 and then on 2 ranks: every tensor is restored
     to the bits that were saved
  4. the views deleted and rebuilt from the log: the same digest
  5. one flipped bit in a shard file: found and named

The store stays in --dir to be looked at. A demo replaces the store of an
earlier demo there, and nothing else.

With --data s3://BUCKET/PREFIX the checkpoints are in a bucket, as those of
ckptstore init --data: the same five steps, and the bit is flipped in an object.
The prefix must be empty, or that of the earlier demo in --dir.`

// result is the last line of `trainer demo --json`. Every value is computed.
type result struct {
	Accuracy        float64 `json:"accuracy"`
	BitwiseEqual    bool    `json:"bitwise_equal"`
	ReshardedEqual  bool    `json:"resharded_equal"`
	Committed       int     `json:"committed"`
	Aborted         int     `json:"aborted"`
	ReplayEqual     bool    `json:"replay_equal"`
	CorruptionFound bool    `json:"corruption_found"`
	Seconds         float64 `json:"seconds"`
}

func (r result) ok() bool {
	return r.Accuracy >= 0.93 && r.BitwiseEqual && r.ReshardedEqual && r.ReplayEqual && r.CorruptionFound && r.Aborted == 1
}

// JobRunner runs a job in a store that is open.
type JobRunner func(ctx context.Context, st *store.Store, cfg launch.Config) error

// Command returns the verb. run runs its jobs, whose command lines start this program
// as demoWorkerCommand.
func Command(std console.Streams, run JobRunner) *cobra.Command {
	var dir, bucket string
	var asJSON bool
	c := &cobra.Command{
		Use: "demo", Short: "Show everything on a small real model, in under a minute", Long: demoHelp, Args: cobra.NoArgs,
		Example: `  trainer demo
  trainer demo --data 's3://models/demo?region=eu-central-1'`,
		RunE: func(c *cobra.Command, _ []string) error {
			if c.Flags().Changed("data") && !place.IsBucket(bucket) {
				return fmt.Errorf("%w: --data %q is not the URL of a bucket: give s3://BUCKET/PREFIX, or leave it out and choose the directory with --dir", launch.ErrConfig, bucket)
			}
			d := &demo{std: std, runJob: run, dir: dir, data: bucket, began: time.Now()}
			r, err := d.run(c.Context())
			if err != nil {
				return err
			}
			if asJSON {
				err = json.NewEncoder(std.Out).Encode(r)
			}
			if !r.ok() {
				err = errors.Join(err, errors.New("the demo failed: see above"))
			}
			return err
		},
	}
	c.Flags().StringVar(&dir, "dir", "ckptstore-demo", "directory of the demo's store")
	c.Flags().StringVar(&bucket, "data", "", "where the checkpoints are: s3://BUCKET/PREFIX (default: in the store's directory)")
	c.Flags().BoolVar(&asJSON, "json", false, "print the result as one JSON object on the last line")
	return c
}

// demo is one run of the demo.
type demo struct {
	std    console.Streams
	runJob JobRunner
	dir    string
	data   string // URL of the bucket that has the checkpoints; empty: the store's directory has them
	began  time.Time
	log    *slog.Logger
	mark   *os.File      // locked while the demo runs
	bucket *place.Bucket // of data
	store  *store.Store
	out    *progress
}

// Steps of the demo's runs.
const (
	demoSteps = 240
	demoEvery = 40
	demoKill  = 120 // the step in whose save rank 2 dies
	demoMore  = 40  // steps of each continuation
	reference = "reference"
	killed    = "killed"
)

func (d *demo) run(ctx context.Context) (r result, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Minute, errors.New("the demo takes longer than 10 minutes"))
	defer cancel()
	defer func() {
		if d.mark != nil {
			err = errors.Join(err, d.mark.Close())
		}
		if d.bucket != nil {
			err = errors.Join(err, d.bucket.Close())
		}
	}()
	if err := d.prepare(ctx); err != nil {
		return r, err
	}
	defer func() {
		if d.store != nil {
			err = errors.Join(err, d.store.Close())
		}
	}()
	d.out = startProgress(d.std.Err)
	defer d.out.stop()

	o := workerOptions{steps: demoSteps, saveEvery: demoEvery, seed: 1, killRank: -1}
	d.out.phase("1/5 reference run, 4 ranks")
	if err := d.train(ctx, reference, 4, o); err != nil {
		return r, err
	}
	d.out.phase("2/5 the same run, rank 2 killed in the save of step %d", demoKill)
	o.killRank, o.killStep = 2, demoKill
	if err := d.train(ctx, killed, 4, o); err != nil {
		return r, err
	}
	if r.Accuracy, err = d.accuracy(ctx, killed); err != nil {
		return r, err
	}
	if r.BitwiseEqual, err = d.sameEnd(ctx, o); err != nil {
		return r, err
	}
	r.ReshardedEqual = true
	o.killRank = -1
	for _, world := range []int{3, 2} {
		o.steps += demoMore
		d.out.phase("3/5 the run continued on %d ranks", world)
		if err := d.train(ctx, killed, world, o); err != nil {
			return r, err
		}
		same, err := d.restoredEqual(ctx, world)
		if err != nil {
			return r, err
		}
		r.ReshardedEqual = r.ReshardedEqual && same
	}
	d.out.phase("4/5 views deleted and rebuilt from the log")
	if r.ReplayEqual, err = d.rebuild(ctx); err != nil {
		return r, err
	}
	if d.bucket != nil {
		d.out.phase("5/5 one bit flipped in the object of a shard file")
	} else {
		d.out.phase("5/5 one bit flipped in a shard file")
	}
	if r.CorruptionFound, err = d.flip(ctx); err != nil {
		return r, err
	}
	if r.Committed, r.Aborted, err = d.count(ctx); err != nil {
		return r, err
	}
	d.out.stop()
	r.Seconds = time.Since(d.began).Seconds()
	return r, d.conclude(ctx, r)
}

// demoMark is a file that only a demo's directory has.
const demoMark = "this-is-a-demo"

// prepare creates the store, in place of an earlier demo's.
func (d *demo) prepare(ctx context.Context) error {
	d.log = slog.New(slog.DiscardHandler)
	if d.data != "" {
		var err error
		if d.bucket, err = place.Open(d.data, d.log); err != nil {
			return fmt.Errorf("--data: %w", err)
		}
	}
	mark := filepath.Join(d.dir, demoMark)
	entries, err := os.ReadDir(d.dir)
	if err == nil && len(entries) > 0 {
		if _, err := os.Stat(mark); err != nil {
			return fmt.Errorf("%w: %s is not an earlier demo's directory: choose another with --dir", launch.ErrConfig, d.dir)
		}
	}
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return fmt.Errorf("make the demo's directory: %w", err)
	}
	if d.mark, err = os.OpenFile(mark, os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return fmt.Errorf("mark the demo's directory: %w", err)
	}
	// Held until the demo ends: the store's lock is released while the store is
	// replaced and while the views are rebuilt.
	err = unix.Flock(int(d.mark.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("%w: another demo runs in %s: wait for it, or choose another directory with --dir", store.ErrLocked, d.dir)
	}
	if err != nil {
		return fmt.Errorf("lock the demo's directory: %w", err)
	}
	if err := store.Remove(ctx, d.storeDir()); err != nil {
		return fmt.Errorf("remove the earlier demo: %w; or choose another directory with --dir", err)
	}
	if _, err := store.Init(ctx, d.storeDir(), d.data); err != nil {
		return err
	}
	return d.open(ctx)
}

func (d *demo) storeDir() string { return filepath.Join(d.dir, "store") }

func (d *demo) open(ctx context.Context) (err error) {
	d.store, err = store.Open(ctx, store.Options{Location: d.storeDir(), Logger: d.log})
	return err
}

// train runs the model in worker processes, as `trainer run` would.
func (d *demo) train(ctx context.Context, run string, world int, o workerOptions) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	failed := &lastLines{}
	err = d.runJob(ctx, d.store, launch.Config{
		Config: session.Config{
			Run: run, Trial: projections.DefaultTrial, Job: store.NewID(), Nodes: session.OneNode(world),
			Logger: d.log, NewID: store.NewID,
		},
		Command: append([]string{self}, o.args()...), MaxRestarts: 1,
		Stdout: failed, Stderr: failed,
	})
	if err != nil {
		return fmt.Errorf("run %q: %w\n%s", run, err, failed)
	}
	return nil
}

func (d *demo) checkpoints(ctx context.Context, run string) ([]projections.Checkpoint, error) {
	return query.Ask(ctx, d.store.Views(), query.Checkpoints, query.Params{Run: run, All: true})
}

func (d *demo) count(ctx context.Context) (committed, aborted int, err error) {
	for _, run := range []string{reference, killed} {
		list, err := d.checkpoints(ctx, run)
		if err != nil {
			return 0, 0, err
		}
		for _, c := range list {
			switch c.State {
			case projections.Committed:
				committed++
			case projections.Aborted:
				aborted++
			}
		}
	}
	return committed, aborted, nil
}
