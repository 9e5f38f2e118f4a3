package launch_test

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/tensor"
)

// passedBytes is the size of the tensor that all nodes load.
const passedBytes = 20<<20 + 12345

// passedState has a tensor that all ranks have, and the rest of [state].
func passedState(step int64, rank, world int) client.State {
	s := state(step, rank, world)
	all := client.Tensor{Shard: tensor.Shard{FQN: "all", DType: tensor.Uint8, Global: tensor.Shape{passedBytes}, Box: tensor.Shape{passedBytes}.Full()}}
	all.Data = make([]byte, passedBytes)
	_, _ = rand.NewChaCha8([32]byte{byte(step)}).Read(all.Data)
	s.Tensors = append(s.Tensors, all)
	return s
}

// savesOrPasses has each rank commit a save, and the next life load it.
var savesOrPasses = workerRole("saves or loads what others load", func(ctx context.Context, c *client.Client) error {
	if c.Resume == "" {
		s, err := c.Save(ctx, 1, passedState(1, c.Rank, c.WorldSize), client.SaveOptions{})
		if err != nil {
			return err
		}
		return s.Wait(ctx, client.Committed)
	}
	got := passedState(0, c.Rank, c.WorldSize)
	if _, err := c.Load(ctx, &got, client.LoadOptions{Strict: true}); err != nil {
		return err
	}
	return same(got, passedState(1, c.Rank, c.WorldSize))
})

// broadcasts makes the nodes of a job pass on what they read, except those in without.
func (j *job) broadcasts(without ...int) {
	t := j.t
	j.differs = func(index int, cfg *launch.Config, _ *session.Store) {
		peers, err := nodes.ListenPeers(t.Context(), "127.0.0.1", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = peers.Close() })
		cfg.Peers, cfg.Broadcast = peers, true
		for _, node := range without {
			if node == index {
				cfg.Broadcast = false
			}
		}
	}
}

// What all nodes load is read once, and passed on. Each rank has every byte. A node that does not
// take part reads for itself.
func TestPassedOnBetweenNodes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		procs   []int
		without []int
		passed  float64 // nodes that get the tensor from others
	}{
		"two nodes":                {[]int{1, 2}, nil, 1},
		"three nodes":              {[]int{1, 1, 1}, nil, 2},
		"three, one of them not":   {[]int{1, 1, 1}, []int{1}, 1},
		"two, the coordinator not": {[]int{1, 1}, []int{0}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			world := 0
			for _, n := range c.procs {
				world += n
			}
			first := newJob(t, world, savesOrPasses...)
			first.must()
			j := newJob(t, world, savesOrPasses...)
			j.cfg.Run = first.cfg.Run
			j.broadcasts(c.without...)
			j.spread(c.procs...)
			j.start()
			if err := j.wait(); err != nil {
				t.Fatal(err)
			}
			done := one[events.RestoreCompleted](t, runOf(t))
			if low, high := c.passed*passedBytes, c.passed*passedBytes*1.02; float64(done.Passed) < 0.98*low || float64(done.Passed) > high {
				t.Errorf("restored %+v, want that %v to %v bytes were passed on", *done, low, high)
			}
			if rest := done.Bytes - done.Passed; float64(rest) < passedBytes || done.Tier != "files" {
				t.Errorf("%d bytes of files, tier %s", rest, done.Tier)
			}
		})
	}
}

// A file is damaged. The node that reads it for the others finds that, passes nothing wrong on,
// and the load fails for all with the name of the file.
func TestDamageIsNotPassedOn(t *testing.T) {
	t.Parallel()
	first := newJob(t, 2, savesOrPasses...)
	first.must()
	names, err := filepath.Glob(filepath.Join(home.Data.Dir(), events.EncodeName(first.cfg.Run), "*", "step-1.a1", "*.safetensors"))
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	for _, name := range names {
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		info, err := f.Stat()
		if err == nil && info.Size() > passedBytes {
			_, err = f.WriteAt([]byte("damage"), passedBytes/2)
		}
		if err != nil || f.Close() != nil {
			t.Fatal(err)
		}
	}
	j := newJob(t, 2, savesOrPasses...)
	j.cfg.Run = first.cfg.Run
	j.broadcasts()
	j.spread(1, 1)
	j.start()
	if err := j.wait(); err == nil {
		t.Error("no error")
	}
	if done := bodiesOf[events.RestoreCompleted](t, runOf(t)); len(done) > 0 {
		t.Errorf("restored %+v", *done[0])
	}
	failed := bodiesOf[events.RestoreFailed](t, runOf(t))
	if len(failed) == 0 {
		t.Fatal("no load has failed")
	}
	for _, text := range []string{"checksum of the block", ".safetensors"} {
		if !strings.Contains(failed[0].Error, text) {
			t.Errorf("%q, want %q in it", failed[0].Error, text)
		}
	}
}
