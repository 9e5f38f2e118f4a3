package data_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// progress holds the results that callers received before a crash.
type progress struct {
	setUp     bool
	written   map[int]data.Written
	committed checkpoint.Digest // acknowledged by the log
	finished  bool
}

// script saves a checkpoint the way that a retrying caller does, and stops at
// the first error: rank 0 writes twice, as if its first answer was lost.
func script(ctx context.Context, m *model, root *data.Root, told *progress) error {
	w := root.Writer(ref)
	if err := w.SetUp(ctx, true); err != nil {
		return err
	}
	told.setUp = true
	told.written = map[int]data.Written{}
	for _, rank := range append(m.ranks(), 0) {
		written, err := w.WriteData(ctx, rank, m.layout.Items(rank), m.source(rank))
		if err != nil {
			return err
		}
		told.written[rank] = written
	}
	_, err := w.Finish(ctx, m.manifest(told.written), func(ctx context.Context, digest checkpoint.Digest) (checkpoint.Decision, error) {
		told.committed = digest
		return commit(ctx, digest)
	})
	told.finished = err == nil
	return err
}

// afterwards checks everything that must hold of a filesystem found after a
// crash.
func afterwards(t *testing.T, m *model, fs vfs.FS, told *progress) {
	t.Helper()
	root := open(t, fs)
	receipts, err := listed(t, root)
	if err != nil {
		t.Fatal(err)
	}
	if len(receipts) > 0 && told.committed == (checkpoint.Digest{}) {
		t.Fatal("listed before the commit")
	}
	if len(receipts) == 0 && told.finished {
		t.Fatal("not listed after Finish returned")
	}
	if len(receipts) > 0 {
		if report := verify(t, root, told.committed); !report.Clean() {
			t.Fatalf("listed, but damaged: %v", report.Findings)
		}
	} else if _, err := root.Reader(ref).ReadMetadata(t.Context()); !errors.Is(err, data.ErrNotCommitted) {
		t.Fatalf("not listed, but its manifest reads with error %v", err)
	}
	if told.setUp {
		if _, err := fs.List("store/data/run/t0/" + ref.Checkpoint); err != nil {
			t.Fatalf("SetUp returned: %v", err)
		}
	}
	if told.committed != (checkpoint.Digest{}) {
		// The log has the commit: the bytes must load, and the receipt must be
		// repairable.
		m.check(t, root.Reader(ref).WithManifest(told.committed), m.wantAll())
		receipt := receiptOf(m, told)
		if err := root.WriteReceipt(t.Context(), ref, receipt); err != nil {
			t.Fatal(err)
		}
	} else if len(told.written) == len(m.ranks()) {
		// Every rank knows that its data is durable: a successor commits the files
		// that it finds.
		if _, err := root.Writer(ref).Finish(t.Context(), m.manifest(told.written), commit); err != nil {
			t.Fatalf("WriteData returned for all ranks: %v", err)
		}
	} else {
		// A successor starts over in the same directory.
		if err := script(t.Context(), m, root, &progress{}); err != nil {
			t.Fatal(err)
		}
	}
	if report := verify(t, root, checkpoint.Digest{}); !report.Clean() {
		t.Fatalf("after recovery: %v", report.Findings)
	}
	m.check(t, root.Reader(ref), m.wantAll())
	if receipts, err = listed(t, root); err != nil || len(receipts) != 1 {
		t.Fatalf("after recovery: listed %v, %v", receipts, err)
	}
}

func receiptOf(m *model, told *progress) checkpoint.Receipt {
	return checkpoint.Receipt{
		Store: "store-1", Run: "run", Trial: "t0", Checkpoint: ref.Checkpoint, Name: "step-100", Step: 100, Attempt: 1,
		Sequence: decision.Sequence, Event: decision.Event, CommittedAt: decision.Time,
		Manifest: checkpoint.Sum(checkpoint.EncodeManifest(m.manifest(told.written))),
	}
}

// snapshot is one possible state of the disk at one moment.
type snapshot struct {
	name string
	fs   *vfs.MemFS
}

// snapshots is the state with nothing that was not synced, some with a part of
// it, and the one of a killed process, whose disk has it all.
func snapshots(fs *vfs.MemFS, k int) []snapshot {
	out := []snapshot{{fmt.Sprintf("op %d, synced only", k), fs.CrashClone(vfs.CrashCloneCfg{})}}
	for _, percent := range []int{30, 70, 100} {
		seed := uint64(1000*k + percent)
		clone := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(seed, 0))})
		out = append(out, snapshot{fmt.Sprintf("op %d, seed %d", k, seed), clone})
	}
	return out
}

// faulty fails the k-th write operation with err, and all later ones too if
// forever is set. Just before, it calls at.
func faulty(fs vfs.FS, k int, forever bool, err error, at func()) (vfs.FS, *int) {
	n := new(int)
	return errorfs.Wrap(fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() != errorfs.OpIsWrite {
			return nil
		}
		*n++
		if *n == k {
			at()
		}
		if *n == k || *n > k && forever {
			return err
		}
		return nil
	})), n
}

// TestCrash crashes a save at every write operation until none is left.
func TestCrash(t *testing.T) {
	m := tiny()
	for k := 1; ; k++ {
		fs := memory(t)
		var crashed []snapshot
		var told progress
		injected, _ := faulty(fs, k, true, errorfs.ErrInjected, func() { crashed = snapshots(fs, k) })
		err := script(t.Context(), m, open(t, injected), &told)
		if (err == nil) != (len(crashed) == 0) {
			t.Fatalf("op %d: error %v with %d crashes", k, err, len(crashed))
		}
		if err == nil {
			crashed = snapshots(fs, k) // at rest
		}
		for _, s := range crashed {
			t.Run(s.name, func(t *testing.T) { afterwards(t, m, s.fs, &told) })
		}
		if err == nil {
			if k < 30 {
				t.Errorf("a save has only %d write operations", k)
			}
			return
		}
	}
}

// TestCrashInRemove crashes a removal at every write operation: either the
// checkpoint is whole or it is not listed, and a second call ends the removal.
func TestCrashInRemove(t *testing.T) {
	m := tiny()
	for k, done := 1, false; !done; k++ {
		fs := memory(t)
		receipt := m.save(t, open(t, fs))
		var crashed []snapshot
		injected, _ := faulty(fs, k, true, errorfs.ErrInjected, func() { crashed = snapshots(fs, k) })
		if err := open(t, injected).RemoveCommitted(t.Context(), ref); err == nil {
			crashed, done = snapshots(fs, k), true
		}
		for _, s := range crashed {
			t.Run(s.name, func(t *testing.T) {
				root := open(t, s.fs)
				receipts, err := listed(t, root)
				if err != nil {
					t.Fatal(err)
				}
				if names, err := s.fs.List("store/data/run/t0"); err != nil || done && len(names) > 0 {
					t.Errorf("Remove returned and left %v, %v", names, err)
				}
				if len(receipts) > 0 && !verify(t, root, receipt.Manifest).Clean() {
					t.Error("listed, but damaged")
				}
				if err := root.RemoveCommitted(t.Context(), ref); err != nil {
					t.Fatal(err)
				}
				if names, err := s.fs.List("store/data/run/t0"); err != nil || len(names) > 0 {
					t.Errorf("left %v, %v", names, err)
				}
			})
		}
	}
}

// TestFullDisk fails every write operation of a save with ENOSPC, once and for
// good: the error names the path, and nothing is listed that
// is not committed.
func TestFullDisk(t *testing.T) {
	m := tiny()
	for _, forever := range []bool{false, true} {
		for k, done := 1, false; !done; k++ {
			fs := memory(t)
			var told progress
			injected, n := faulty(fs, k, forever, syscall.ENOSPC, func() {})
			err := script(t.Context(), m, open(t, injected), &told)
			if done = *n < k; done {
				if err != nil {
					t.Fatal(err)
				}
				break
			}
			if !errors.Is(err, syscall.ENOSPC) {
				t.Fatalf("op %d: error %v", k, err)
			}
			if !strings.Contains(err.Error(), " store") {
				t.Errorf("op %d: error names no path: %v", k, err)
			}
			var unrecorded *data.UnrecordedError
			if errors.As(err, &unrecorded) != (told.committed != checkpoint.Digest{}) {
				t.Errorf("op %d: error %v, committed %v", k, err, told.committed)
			}
			// Once the disk has space again, every interrupted operation can continue.
			afterwards(t, m, fs, &told)
		}
	}
}
