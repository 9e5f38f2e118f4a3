package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

const (
	// benchSaves is how often a rank saves. The first benchCold saves do not count:
	// they create the plan and the memory of the slots.
	benchSaves = 7
	benchCold  = 2

	// rankCommand is the hidden command that runs a rank of the benchmark.
	rankCommand = "save-rank"
)

// saveTime is a rank's report of one save, on a separate line.
type saveTime struct {
	Step int           `json:"step"`
	Save time.Duration `json:"save"` // wall time in Save
	Copy time.Duration `json:"copy"` // of the same bytes, into memory that was touched
}

// blocked is the time in Save of the slowest rank, and the time of the slowest copy.
type blocked struct{ save, copy time.Duration }

// measureBlocking runs a job whose ranks save through the trainer's sockets, as any
// training does, in a separate store in dir.
func (b *saveBench) measureBlocking(ctx context.Context, dir string, each int64) (_ blocked, err error) {
	self, err := os.Executable()
	if err != nil {
		return blocked{}, fmt.Errorf("find the program that the ranks run: %w", err)
	}
	dir = filepath.Join(dir, "job")
	if _, err := store.Init(ctx, dir, ""); err != nil {
		return blocked{}, err
	}
	st, err := store.Open(ctx, store.Options{Location: dir})
	if err != nil {
		return blocked{}, err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	policy, err := retention.Parse("last=1")
	if err != nil {
		return blocked{}, err
	}
	var said, complaints transcript
	shared, _ := shm.Dir()
	err = launch.Run(ctx, launch.Config{
		Config: session.Config{
			Run: benchRun, Trial: projections.DefaultTrial, Job: store.NewID(), Nodes: session.OneNode(b.Ranks),
			NewID: store.NewID, Logger: slog.New(slog.DiscardHandler),
		},
		Resume:  "none",
		Command: []string{self, "bench", rankCommand, strconv.Itoa(b.Tensors), strconv.FormatInt(each, 10), strconv.FormatFloat(b.Unchanged, 'g', -1, 64)},
		Stdout:  &said, Stderr: &complaints,
		Collect: func(ctx context.Context) error { // keeps few checkpoints on the disk
			_, err := st.Collect(ctx, collection.Options{Runs: []string{benchRun}, Policy: policy, Apply: true})
			return err
		},
	}, session.Store{
		ID: st.ID, Log: st.Log, Views: store.Queries{From: st.Views()}, Blobs: st.Blobs, Data: st.Data, Foreign: store.OpenForeign,
		Conflict: func(err error) bool { return errors.Is(err, jetlog.ErrConflict) }, Unserved: store.Unserved,
		Runtime: st.Runtime, Shared: shared,
	})
	if err != nil {
		return blocked{}, fmt.Errorf("save through the trainer's sockets: %w\n%s", err, complaints.String())
	}
	return slowest(said.String(), b.Ranks)
}

// slowest returns the median over the counted saves, of the slowest rank in each.
func slowest(said string, ranks int) (blocked, error) {
	var most [benchSaves]blocked
	lines := 0
	for line := range strings.Lines(said) {
		var t saveTime
		_, text, _ := strings.Cut(line, "{") // the trainer's prefix names the rank
		if err := json.Unmarshal([]byte("{"+text), &t); err != nil || t.Step < 0 || t.Step >= benchSaves {
			return blocked{}, fmt.Errorf("a rank's output is not the time of a save: %q: %w", line, err)
		}
		lines++
		most[t.Step].save, most[t.Step].copy = max(most[t.Step].save, t.Save), max(most[t.Step].copy, t.Copy)
	}
	if lines != ranks*benchSaves {
		return blocked{}, fmt.Errorf("%d ranks have timed %d saves, want %d of each", ranks, lines, benchSaves)
	}
	var saves, copies []float64
	for _, m := range most[benchCold:] {
		saves, copies = append(saves, m.save.Seconds()), append(copies, m.copy.Seconds())
	}
	second := float64(time.Second)
	return blocked{time.Duration(middle(saves) * second), time.Duration(middle(copies) * second)}, nil
}

// saveRankVerb returns the command of a rank of `bench save`, started by the measured job.
func (a *bench) saveRankVerb() *cobra.Command {
	return &cobra.Command{
		Use: rankCommand + " TENSORS BYTES UNCHANGED", Hidden: true, Args: console.Args(cobra.ExactArgs(3)),
		RunE: func(c *cobra.Command, given []string) error {
			tensors, err := strconv.Atoi(given[0])
			if err != nil {
				return console.UsageError{Err: err}
			}
			each, err := strconv.ParseInt(given[1], 10, 64)
			if err != nil {
				return console.UsageError{Err: err}
			}
			unchanged, err := strconv.ParseFloat(given[2], 64)
			if err != nil {
				return console.UsageError{Err: err}
			}
			return a.saveRank(c.Context(), tensors, each, 1-unchanged)
		},
	}
}

// saveRank saves again and again in parallel with the other ranks, each time after a
// copy of the same bytes into warm memory.
func (a *bench) saveRank(ctx context.Context, tensors int, each int64, share float64) error {
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	memory, warm := make([]byte, each*int64(tensors)), make([]byte, each*int64(tensors))
	_, _ = rand.NewChaCha8([32]byte{byte(c.Rank), byte(c.Rank >> 8)}).Read(memory) // never fails
	copy(warm, memory)
	var state client.State
	for i := range tensors {
		shape := tensor.Shape{each}
		state.Tensors = append(state.Tensors, client.Tensor{
			Shard: tensor.Shard{FQN: fmt.Sprintf("rank%d.layers.%d.weight", c.Rank, i), DType: tensor.Uint8, Global: shape, Box: shape.Full()},
			Data:  memory[int64(i)*each:][:each:each],
		})
	}
	together := func() error {
		_, err := c.Collectives().AllGather(ctx, []byte{0})
		return err
	}
	out := json.NewEncoder(a.Out)
	for step := range benchSaves {
		for i := range int(share*float64(tensors) + 0.5) {
			memory[int64(i)*each] ^= byte(1 + step)
		}
		if err := together(); err != nil {
			return err
		}
		began := time.Now()
		copy(warm, memory)
		t := saveTime{Step: step, Copy: time.Since(began)}
		if err := together(); err != nil {
			return err
		}
		began = time.Now()
		save, err := c.Save(ctx, int64(step), state, client.SaveOptions{})
		if err != nil {
			return err
		}
		t.Save = time.Since(began)
		if err := save.Wait(ctx, client.Committed); err != nil {
			return err
		}
		if err := out.Encode(t); err != nil {
			return err
		}
	}
	return nil
}

// GuardCommand returns the hidden command with which a job of this program starts its
// guard: see [process.RunGuard].
func GuardCommand() *cobra.Command {
	return &cobra.Command{
		Use: process.GuardCommand + " JOB [NAME=VALUE...]", Hidden: true, Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, given []string) error {
			return process.RunGuard(context.WithoutCancel(c.Context()), os.Stdin, os.Stdout, given[0], given[1:]...)
		},
	}
}
