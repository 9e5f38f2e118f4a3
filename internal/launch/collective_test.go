package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/tensor"
)

// wide is a state of tensors of many blocks: a tensor whose rows the ranks share,
// or that all have whole if replicated, and a tensor that every rank has.
func wide(step int64, rank, world int, replicated bool) client.State {
	const columns = 150_000
	share := int64(rows / world)
	box := tensor.Box{Offsets: []int64{int64(rank) * share, 0}, Sizes: []int64{share, columns}}
	if replicated {
		box = tensor.Shape{rows, columns}.Full()
	}
	weight := client.Tensor{Shard: tensor.Shard{FQN: "weight", DType: tensor.Uint8, Global: tensor.Shape{rows, columns}, Box: box}}
	weight.Data = make([]byte, box.Volume())
	for i := range weight.Data {
		weight.Data[i] = byte((box.Offsets[0]*columns + int64(i)) * (step + 7) % 251)
	}
	bias := client.Tensor{Shard: tensor.Shard{FQN: "bias", DType: tensor.Uint8, Global: tensor.Shape{200_000}, Box: tensor.Shape{200_000}.Full()}}
	bias.Data = slices.Repeat([]byte{byte(step), 5}, 100_000)
	return client.State{Tensors: []client.Tensor{weight, bias}, Values: []client.Value{{FQN: "config", Data: []byte("same for all")}}}
}

// sameWide compares wide states, with a short error.
func sameWide(got, want client.State) error {
	for i, t := range want.Tensors {
		for k := range t.Data {
			if got.Tensors[i].Data[k] != t.Data[k] {
				return fmt.Errorf("byte %d of tensor %q is %d, want %d", k, t.FQN, got.Tensors[i].Data[k], t.Data[k])
			}
		}
	}
	got.Tensors, want.Tensors = nil, nil
	return same(got, want)
}

const wideBytes = rows*150_000 + 200_000 + 12

// savesWide saves and loads a wide state: whether it is REPLICATED.
var savesWide = role("saves or loads a wide state", func(ctx context.Context, args []string) error {
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	replicated := args[0] == "true"
	want := wide(1, c.Rank, c.WorldSize, replicated)
	if c.Resume == "" {
		return saveAll(ctx, c, 1, want, client.SaveOptions{})
	}
	got := wide(0, c.Rank, c.WorldSize, replicated)
	if _, err := c.Load(ctx, &got, client.LoadOptions{Strict: true}); err != nil {
		return err
	}
	return sameWide(got, want)
})

// A byte that several ranks want is read once, and hardly more is read than they
// want.
func TestLoadReadsOnce(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		saved, loaded int
		replicated    bool
	}{{2, 3, false}, {3, 2, false}, {2, 2, true}, {1, 3, true}} {
		t.Run(fmt.Sprintf("%d to %d, replicated %t", c.saved, c.loaded, c.replicated), func(t *testing.T) {
			t.Parallel()
			command := append(slices.Clone(savesWide), fmt.Sprint(c.replicated))
			newJob(t, c.saved, command...).must()
			newJob(t, c.loaded, command...).must()
			done := one[events.RestoreCompleted](t, runOf(t))
			if done.Wanted != wideBytes || float64(done.Bytes) > 1.1*float64(done.Wanted) || done.Bytes < done.Wanted {
				t.Errorf("%d bytes read, %d wanted, want %d", done.Bytes, done.Wanted, wideBytes)
			}
			each := int64(200_000 + 12 + rows*150_000/c.loaded)
			if c.replicated {
				each = wideBytes
			}
			plans := bodiesOf[events.LoadPlan](t, runOf(t))
			for _, p := range plans {
				if p.Bytes != each {
					t.Errorf("plan.load of rank %d has %d bytes, want %d", p.Rank, p.Bytes, each)
				}
			}
			if len(plans) != c.loaded {
				t.Errorf("%d events plan.load", len(plans))
			}
		})
	}
}

var asksForNothing = workerRole("one rank asks for what is not there", func(ctx context.Context, c *client.Client) error {
	if c.Resume == "" {
		return save(ctx, c, 1)
	}
	got := state(1, c.Rank, c.WorldSize)
	overwrite(got)
	status := 409
	if c.Rank == 1 {
		got.Tensors[1].FQN, status = "absent", 400
	}
	_, err := c.Load(ctx, &got, client.LoadOptions{Ref: "step-1"})
	if err := refused(err, status); err != nil {
		return err
	}
	return load(ctx, c, "step-1", 1)
})

// If one rank requests missing data, no rank is served and nothing is read. Its
// error names the data, the others' errors name the rank.
func TestLoadOfOneFails(t *testing.T) {
	t.Parallel()
	newJob(t, 3, asksForNothing...).must()
	j := newJob(t, 3, asksForNothing...)
	g := j.gated("read:r00001.safetensors") // the second load reads from it
	j.start()
	j.out.await(t, 1, "[rank0] refused ")
	select {
	case <-g.reached:
		// The second load may have begun.
		if len(bodiesOf[events.RestoreBegun](t, runOf(t))) < 2 {
			t.Error("a load is read that cannot be served")
		}
	default:
	}
	close(g.open)
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
	for rank := range 3 {
		got := j.out.lines(fmt.Sprintf("[rank%d] refused ", rank))
		if len(got) != 1 || !strings.Contains(got[0], `rank 1: load step-1.a1: missing key "absent"`) || strings.HasPrefix(got[0], "load 1 is a collective") == (rank == 1) {
			t.Errorf("rank %d got %q", rank, got)
		}
	}
	if got := one[events.RestoreFailed](t, runOf(t)); got.Load != 1 || strings.Count(got.Error, "absent") != 2 {
		t.Errorf("restore.failed: %+v", got)
	}
}

// leavesLoad has rank 1 give up its load, and waits for the test: PIPE.
var leavesLoad = role("one rank leaves the load", func(ctx context.Context, args []string) error {
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if c.Resume == "" {
		return save(ctx, c, 1)
	}
	if c.Rank == 1 {
		short, cancel := context.WithTimeout(ctx, shortly)
		defer cancel()
		if err := load(short, c, "step-1", 1); !errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("the load that was left: %w", err)
		}
		emit("left")
	} else {
		if err := load(ctx, c, "step-1", 1); err != nil {
			return err
		}
		emit("loaded")
		pipe, err := os.Open(args[0])
		if err != nil || pipe.Close() != nil {
			return err
		}
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	return load(ctx, c, "step-1", 1)
})

// If a rank leaves in the middle of a load, the others keep theirs, and its
// memory is freed once no process writes to it any more.
func TestRankLeavesLoad(t *testing.T) {
	t.Parallel()
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	newJob(t, 2, append(slices.Clone(leavesLoad), pipe)...).must()
	j := newJob(t, 2, append(slices.Clone(leavesLoad), pipe)...)
	g := j.gated("read:.safetensors")
	j.start()
	g.await(t)
	j.out.await(t, 1, "[rank1] left")
	close(g.open)
	j.out.await(t, 1, "[rank0] loaded")
	if left := slices.DeleteFunc(slots(t, j), func(path string) bool { return !strings.HasPrefix(filepath.Base(path), "r00001.load.") }); len(left) > 0 {
		t.Errorf("the memory of the load that was left: %q", left)
	}
	if f, err := os.OpenFile(pipe, os.O_WRONLY, 0); err != nil || f.Close() != nil {
		t.Fatal(err)
	}
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
}

var diesInLoad = workerRole("one rank dies in the load", func(ctx context.Context, c *client.Client) error {
	if c.Resume == "" {
		return save(ctx, c, 1)
	}
	if c.Attempt > 2 {
		return load(ctx, c, "", 1)
	}
	emit("pid %d", os.Getpid())
	return load(ctx, c, "step-1", 1)
})

// An attempt that ends during a load waits for the reader before it frees the
// destination memory.
func TestRankDiesInLoad(t *testing.T) {
	t.Parallel()
	newJob(t, 2, diesInLoad...).must()
	j := newJob(t, 2, diesInLoad...)
	j.cfg.MaxRestarts, j.cfg.Grace = 1, time.Second
	g := j.gated("read:.safetensors")
	j.start()
	g.await(t)
	pid, err := strconv.Atoi(j.out.await(t, 1, "[rank1] pid ")[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-j.done:
		j.ended = true
		t.Errorf("the job ends in the middle of a read: %v", err)
	case <-time.After(3 * shortly): // all that could go wrong has
	}
	if len(bodiesOf[events.GroupStopped](t, runOf(t))) > 1 {
		t.Error("the attempt has ended in the middle of a read")
	}
	close(g.open)
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
}
