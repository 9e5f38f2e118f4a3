package data

import (
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// failAt fails the k-th write operation, and all later ones too if forever is
// set. Just before, it calls at.
func failAt(on vfs.FS, k int, forever bool, at func()) (vfs.FS, *int) {
	n := new(int)
	return errorfs.Wrap(on, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() != errorfs.OpIsWrite {
			return nil
		}
		if *n++; *n == k {
			at()
		}
		if *n == k || *n > k && forever {
			return syscall.EIO
		}
		return nil
	})), n
}

// TestSumsCrash crashes the writing of sums at every operation: they are whole
// or missing, and a success of writeSums means that they are durable.
func TestSumsCrash(t *testing.T) {
	x, of := learnedIndex()
	ref := checkpoint.Ref{Run: "run", Trial: "main", Checkpoint: "c"}
	for k := 1; ; k++ {
		mem := vfs.NewCrashableMem()
		root, err := Open(mem, "data")
		if err != nil {
			t.Fatal(err)
		}
		if err := root.b.MakeDir(t.Context(), nameOf(ref)); err != nil {
			t.Fatal(err)
		}
		check := func(on vfs.FS, must bool) {
			t.Helper()
			r, err := Open(on, "data")
			if err != nil {
				t.Fatal(err)
			}
			back := adoptedIndex()
			known, err := r.readSums(t.Context(), ref, &back, of)
			if err != nil || must && !known {
				t.Fatalf("operation %d: the sums are known: %v, %v", k, known, err)
			}
		}
		faulty, n := failAt(mem, k, true, func() {
			for _, percent := range []int{0, 50, 100} {
				check(mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(uint64(k), 2))}), false)
			}
		})
		broken, err := Open(faulty, "data")
		if err != nil {
			t.Fatal(err)
		}
		sums, err := broken.writeSums(t.Context(), ref, &x, of)
		check(mem.CrashClone(vfs.CrashCloneCfg{}), err == nil)
		if *n < k {
			if err != nil || sums.Digest == (checkpoint.Digest{}) {
				t.Fatal(err)
			}
			return
		}
		if err == nil {
			t.Fatalf("operation %d failed without an error", k)
		}
	}
}

// adoptedIndex returns the index of an adopted rank, without sums.
func adoptedIndex() checkpoint.Index {
	s := tensor.Shard{FQN: "w", DType: tensor.Float32, Global: tensor.Shape{3, 40_000}, Box: tensor.Shape{3, 40_000}.Full()}
	return checkpoint.Index{
		Rank: 3, Files: []checkpoint.File{{Name: "/a/__3_0.distcp", Size: 1 << 20}}, Modified: []int64{1},
		Entries: []checkpoint.Entry{
			{Item: checkpoint.Item{Value: true, PerRank: true, Bytes: 7, Shard: tensor.Shard{FQN: "v"}}, Offset: 3},
			{Item: checkpoint.Item{Shard: s, Bytes: s.Bytes()}, Offset: 64},
		},
	}
}

// learnedIndex is adoptedIndex with sums.
func learnedIndex() (checkpoint.Index, checkpoint.Digest) {
	x := adoptedIndex()
	of := checkpoint.Sum(x.Encode())
	for i := range x.Entries {
		e := &x.Entries[i]
		e.Digest, e.Sums = checkpoint.Sum([]byte{byte(i)}), make([]uint32, checkpoint.Blocks(e.Item.Bytes))
	}
	return x, of
}
