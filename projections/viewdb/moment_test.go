package viewdb_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
)

// A reader never sees rows that differ from those of the cursor: both are one batch.
func TestRowsAreOfTheCursorAtEachMoment(t *testing.T) {
	log := rapid.Custom(func(t *rapid.T) []events.Recorded {
		h := drawHistory(t, 0)
		for len(h.log) < 80 {
			h.step()
		}
		return h.log
	}).Example(7)
	want := make([][32]byte, len(log)+1) // by cursor
	for n := range want {
		want[n] = replayed(t, log, uint64(n))
	}
	src := newLog()
	db := open(t, vfs.NewMem(), "views")
	defer shut(t, db)
	stop := follow(t, db, src)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for ctx.Err() == nil {
				sum, cursor, err := db.Digest()
				if err != nil || sum != want[cursor] {
					t.Errorf("the rows are not those of their cursor %d: %v", cursor, err)
					return
				}
			}
		})
	}
	for _, r := range log {
		src.append(r)
		await(t, db, r.Sequence)
	}
	cancel()
	wg.Wait()
	if err := stop(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
