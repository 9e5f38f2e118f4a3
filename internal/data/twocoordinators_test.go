package data_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/tensor"
)

// decider is a log with one decision: the first wins.
type decider struct {
	mu    sync.Mutex
	taken checkpoint.Digest
}

func (d *decider) commit(_ context.Context, manifest checkpoint.Digest) (checkpoint.Decision, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.taken != (checkpoint.Digest{}) {
		return checkpoint.Decision{}, errors.New("the log has a decision")
	}
	d.taken = manifest
	return decision, nil
}

// TestTwoCoordinators lets two coordinators save and commit the same checkpoint in one bucket at
// the same time, with different bytes. At most one commits, and what is read is all its own.
func TestTwoCoordinators(t *testing.T) {
	outcomes := map[int]int{}
	for range 200 {
		bucket := objecttest.NewBucket()
		var log decider
		var sides [2]*model
		var receipts [2]checkpoint.Receipt
		var errs [2]error
		var both sync.WaitGroup
		for i := range sides {
			m := newModel()
			m.full(0, "w", tensor.Float32, 3000)
			m.full(1, "v", tensor.Float32, 2000)
			m.value("step", 1, 9, false)
			for _, of := range m.tensors {
				of[0] = byte(i)
			}
			sides[i] = m
			root := data.OpenBackend(bucket, vfs.NewMem())
			root.OfStore("store-1")
			both.Go(func() {
				var written map[int]data.Written
				if written, errs[i] = m.write(t.Context(), root); errs[i] == nil {
					receipts[i], errs[i] = root.Writer(ref).Finish(t.Context(), m.manifest(written), log.commit)
				}
			})
		}
		both.Wait()
		root := data.OpenBackend(bucket, vfs.NewMem())
		root.OfStore("store-1")
		committed := 0
		for i, m := range sides {
			if errs[i] != nil {
				continue
			}
			committed++
			if report := verify(t, root, receipts[i].Manifest); !report.Clean() || receipts[i].Manifest != log.taken {
				t.Errorf("the committed checkpoint: %+v", report)
			}
			m.check(t, root.Reader(ref), m.wantAll())
		}
		list, err := listed(t, root)
		if committed > 1 || err != nil || len(list) != committed {
			t.Fatalf("%d commits, %d receipts: %v, %v, %v", committed, len(list), errs[0], errs[1], err)
		}
		outcomes[committed]++
	}
	t.Logf("commits: %v", outcomes)
	if outcomes[1] == 0 {
		t.Error("no coordinator ever committed")
	}
}
