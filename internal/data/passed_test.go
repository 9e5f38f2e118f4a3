package data

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
)

// passedCheckpoint saves two ranks' rows of a tensor, a large tensor, small ones and a value.
type passedCheckpoint struct {
	root   *Root
	layout checkpoint.Layout
	digest checkpoint.Digest
}

const passedRows, passedColumns = 8, 50_000

func passedBytes(fqn string, n int64) []byte {
	r := rand.New(rand.NewPCG(uint64(len(fqn)), uint64(fqn[0])))
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(r.Uint32())
	}
	return out
}

type passedSource []checkpoint.Item

func (s passedSource) Item(i int) ([]byte, error) {
	if it := s[i]; it.Value {
		return passedBytes(it.Shard.FQN, it.Bytes), nil
	}
	return passedPart(s[i].Shard), nil
}

// passedPart returns the bytes of whole rows.
func passedPart(s tensor.Shard) []byte {
	row := s.Global.Volume() / s.Global[0]
	return passedBytes(s.FQN, s.Global.Volume())[s.Box.Offsets[0]*row:][:s.Box.Volume()]
}

func savePassed(t *testing.T) *passedCheckpoint {
	t.Helper()
	root, err := OpenUnsynced(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	root.OfStore("store-1")
	c := &passedCheckpoint{root: root}
	wide := checkpoint.Tensor{FQN: "wide", DType: tensor.Uint8, Shape: tensor.Shape{passedRows, passedColumns}}
	for rank := range 2 {
		wide.Chunks = append(wide.Chunks, checkpoint.Chunk{Rank: rank, Box: tensor.Box{Offsets: []int64{int64(rank) * passedRows / 2, 0}, Sizes: []int64{passedRows / 2, passedColumns}}})
	}
	c.layout = checkpoint.Layout{Values: []checkpoint.Value{{FQN: "config", Rank: 1, Bytes: 100}}}
	for i, n := range []int64{3_000_000, 1000, 70_000, 10} {
		shape := tensor.Shape{n}
		c.layout.Tensors = append(c.layout.Tensors, checkpoint.Tensor{FQN: fmt.Sprint("t", i), DType: tensor.Uint8, Shape: shape, Chunks: []checkpoint.Chunk{{Rank: i % 2, Box: shape.Full()}}})
	}
	c.layout.Tensors = append(c.layout.Tensors, wide)
	m := checkpoint.Manifest{Store: "store-1", Run: "run", Trial: "main", Checkpoint: "step-1.a1", Name: "step-1", Step: 1, Attempt: 1, WorldSize: 2, Layout: c.layout}
	w := root.Writer(c.ref())
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	for rank := range 2 {
		items := c.layout.Items(rank)
		wrote, err := w.WriteData(t.Context(), rank, items, passedSource(items))
		if err != nil {
			t.Fatal(err)
		}
		m.Ranks = append(m.Ranks, checkpoint.RankIndex{Rank: rank, Index: wrote.Index})
	}
	if _, err := w.Finish(t.Context(), m, func(_ context.Context, d checkpoint.Digest) (checkpoint.Decision, error) {
		c.digest = d
		return checkpoint.Decision{Sequence: 1, Event: "e", Time: time.Unix(0, 0).UTC()}, nil
	}); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *passedCheckpoint) ref() checkpoint.Ref { return checkpoint.RefOf("run", "main", "step-1.a1") }

// fataler is a test, or a case of a law.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// passedNode is one node's load.
type passedNode struct {
	*FileReader
	wants []checkpoint.Want
	reads []checkpoint.Read
	dst   passedTarget
}

type passedTarget [][]byte

func (t passedTarget) Want(i int) []byte { return t[i] }

// node returns a load of rows of the wide tensor, and of the rest.
func (c *passedCheckpoint) node(t fataler, lo, hi int64) *passedNode {
	t.Helper()
	n := &passedNode{FileReader: c.root.Reader(c.ref()).WithManifest(c.digest)}
	ctx := context.Background()
	m, err := n.ReadMetadata(ctx)
	if err == nil {
		err = n.SetUp(ctx, m, false)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, of := range c.layout.Tensors {
		s := tensor.Shard{FQN: of.FQN, DType: of.DType, Global: of.Shape, Box: of.Shape.Full()}
		if of.FQN == "wide" {
			s.Box = tensor.Box{Offsets: []int64{lo, 0}, Sizes: []int64{hi - lo, passedColumns}}
		}
		n.wants = append(n.wants, checkpoint.Want{Shard: s})
		n.dst = append(n.dst, make([]byte, s.Box.Volume()))
	}
	n.wants = append(n.wants, checkpoint.Want{Value: true, Shard: tensor.Shard{FQN: "config"}})
	n.dst = append(n.dst, make([]byte, 100))
	planned, err := planner.NewLoader(m.Layout).LoadWith(n.wants, planner.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n.reads = planned.Reads
	return n
}

// intact compares what was loaded.
func (n *passedNode) intact(t fataler) {
	t.Helper()
	for i, w := range n.wants {
		want := passedBytes("config", 100)
		if !w.Value {
			want = passedPart(w.Shard)
		}
		if !bytes.Equal(n.dst[i], want) {
			t.Fatalf("other bytes of %s", w.Shard.FQN)
		}
	}
}

// wanted returns the blocks of a load, without duplicates.
func (n *passedNode) wanted(t fataler) (all []BlockRange) {
	t.Helper()
	by, err := n.BlocksOf(context.Background(), n.wants, n.reads)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[BlockRange]bool{}
	for _, of := range by {
		for _, r := range of {
			for b := r.Lo; b < r.Hi; b++ {
				if one := (BlockRange{r.Rank, b, b + 1}); !seen[one] {
					seen[one] = true
					all = append(all, one)
				}
			}
		}
	}
	return all
}

// Two nodes want some blocks both. Whichever of them reads which of these blocks, and however many
// of those that are passed on do not come, or come with other bytes, both have every byte. A node
// reads no block that has come.
func TestPassedBlocks(t *testing.T) {
	c := savePassed(t)
	rapid.Check(t, func(rt *rapid.T) {
		rows := func(name string) (lo, hi int64) {
			lo = rapid.Int64Range(0, passedRows-1).Draw(rt, name+" from")
			return lo, rapid.Int64Range(lo+1, passedRows).Draw(rt, name+" to")
		}
		var nodes, alone [2]*passedNode
		for i := range nodes {
			lo, hi := rows(fmt.Sprint("rows of node ", i))
			nodes[i], alone[i] = c.node(rt, lo, hi), c.node(rt, lo, hi)
		}
		wanted := [2][]BlockRange{nodes[0].wanted(rt), nodes[1].wanted(rt)}
		var own [2][]BlockRange
		for _, b := range wanted[0] {
			if slices.Contains(wanted[1], b) {
				reader := rapid.IntRange(0, 1).Draw(rt, "reader")
				own[reader] = append(own[reader], b)
			}
		}
		own = merged(own)
		lost := rapid.IntRange(0, 3).Draw(rt, "every n-th is lost")
		forged := rapid.IntRange(0, 3).Draw(rt, "every n-th is forged")
		var ways [2]chan PassedBlocks // to a node
		for i := range ways {
			ways[i] = make(chan PassedBlocks, 1000)
		}
		var files [2]int64
		var passed [2]int64
		var all sync.WaitGroup
		var mu sync.Mutex
		for i, n := range nodes {
			all.Go(func() {
				count := 0
				var err error
				files[i], passed[i], err = n.ReadPassed(context.Background(), n.wants, n.reads, n.dst, Passing{
					Own: own[i], In: own[1-i],
					Out: func(_ context.Context, b PassedBlocks) error {
						mu.Lock()
						defer mu.Unlock()
						count++
						b.Data = bytes.Clone(b.Data)
						if forged > 0 && count%(forged+1) == 0 {
							b.Data[len(b.Data)/2] ^= 1
						}
						if lost == 0 || count%(lost+1) != 0 {
							ways[1-i] <- b
						}
						return nil
					},
					Read: func() { close(ways[1-i]) },
					Receive: func(_ context.Context, take func(PassedBlocks) error) {
						for b := range ways[i] {
							if err := take(b); err == nil && take(b) == nil {
								panic("the same blocks are taken twice")
							}
						}
					},
				})
				if err != nil {
					panic(err)
				}
			})
		}
		all.Wait()
		for i, n := range nodes {
			n.intact(rt)
			if lost == 0 && forged == 0 && len(own[1-i]) > 0 && passed[i] == 0 {
				rt.Fatalf("nothing was passed on to node %d", i)
			}
			if lost == 0 && forged == 0 {
				of := alone[i]
				read, err := of.ReadData(context.Background(), of.wants, of.reads, of.dst)
				if err != nil || files[i]+passed[i] > read+read/8 {
					rt.Fatalf("node %d read %d bytes and got %d, alone it reads %d: %v", i, files[i], passed[i], read, err)
				}
			}
		}
	})
}

// merged merges blocks next to each other, as a division has them.
func merged(own [2][]BlockRange) (out [2][]BlockRange) {
	for i, of := range own {
		for _, b := range of {
			if last := len(out[i]) - 1; last >= 0 && out[i][last].Rank == b.Rank && out[i][last].Hi == b.Lo {
				out[i][last].Hi = b.Hi
			} else {
				out[i] = append(out[i], b)
			}
		}
	}
	return out
}

// Blocks that are not awaited, or of another size, are refused.
func TestBlocksNotAwaited(t *testing.T) {
	c := savePassed(t)
	n := c.node(t, 0, passedRows)
	wanted := n.wanted(t)
	first := wanted[0]
	_, passed, err := n.ReadPassed(t.Context(), n.wants, n.reads, n.dst, Passing{
		In: []BlockRange{first}, Read: func() {},
		Receive: func(_ context.Context, take func(PassedBlocks) error) {
			whole := make([]byte, checkpoint.BlockSize)
			for _, b := range []PassedBlocks{
				{Rank: first.Rank, Block: first.Lo + 1, Data: whole},
				{Rank: first.Rank, Block: -1, Data: whole},
				{Rank: first.Rank, Block: 1 << 60, Data: whole},
				{Rank: 9, Block: first.Lo, Data: whole},
				{Rank: first.Rank, Block: first.Lo, Data: whole[:5]},
				{Rank: first.Rank, Block: first.Lo},
				{Rank: first.Rank, Block: first.Lo, Data: make([]byte, 2*checkpoint.BlockSize)},
				{Rank: first.Rank, Block: first.Lo, Data: whole}, // other bytes
			} {
				if err := take(b); err == nil {
					t.Errorf("%d bytes at block %d of rank %d are taken", len(b.Data), b.Block, b.Rank)
				}
			}
		},
	})
	if err != nil || passed != 0 {
		t.Errorf("%d bytes: %v", passed, err)
	}
	n.intact(t)
}
