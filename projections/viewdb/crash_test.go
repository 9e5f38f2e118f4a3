package viewdb_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// crashing is a file system that keeps images of itself, as a crash just before its
// k-th write could leave it.
type crashing struct {
	vfs.FS
	mem     *vfs.MemFS
	durable atomic.Uint64 // cursor that must survive

	mu     sync.Mutex
	at     int // index of the write
	seen   int
	images map[int]*vfs.MemFS // by the percentage of unsynced data that survives
	floor  uint64
}

func newCrashing(k int) *crashing {
	c := &crashing{mem: vfs.NewCrashableMem(), at: k}
	c.FS = errorfs.Wrap(c.mem, errorfs.InjectorFunc(c.operation))
	return c
}

func (c *crashing) operation(op errorfs.Op) error {
	if op.Kind.ReadOrWrite() != errorfs.OpIsWrite {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.seen++; c.seen == c.at {
		c.take()
	}
	return nil
}

// crash simulates a crash now.
func (c *crashing) crash() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.take()
}

// take records the images.
func (c *crashing) take() {
	// Everything promised before an image is taken must be in it.
	c.floor = c.durable.Load()
	c.images = map[int]*vfs.MemFS{}
	for _, keep := range []int{0, 40, 100} {
		c.images[keep] = c.mem.CrashClone(vfs.CrashCloneCfg{
			UnsyncedDataPercent: keep, RNG: rand.New(rand.NewPCG(uint64(c.at), uint64(keep))),
		})
	}
}

func (c *crashing) crashed() (images map[int]*vfs.MemFS, floor uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.images, c.floor
}

// life folds the log event by event, closing and opening in between. Each event is a
// separate batch that is not synced.
func life(t *testing.T, fs *crashing, log []events.Recorded) {
	src := newLog()
	for half := range 2 {
		db := open(t, fs, "views")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- db.Follow(ctx, src) }()
		part := log[:len(log)/2]
		if half == 1 {
			part = log[len(log)/2:]
		}
		for _, r := range part {
			src.append(r)
			await(t, db, r.Sequence)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		shut(t, db)
		fs.durable.Store(db.Cursor())
	}
}

func await(t *testing.T, db *viewdb.DB, seq uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := db.Wait(ctx, seq); err != nil {
		t.Fatal(err)
	}
}

// After a crash before any write, the rows are those of the cursor, nothing from before
// a close is lost, and further folding gives the rows of a replay.
func TestCrashBeforeEachWrite(t *testing.T) {
	log := rapid.Custom(func(t *rapid.T) []events.Recorded {
		h := drawHistory(t, 0)
		for len(h.log) < 16 {
			h.step()
		}
		return h.log
	}).Example(7)
	var want [][32]byte // by cursor
	for n := range len(log) + 1 {
		want = append(want, replayed(t, log, uint64(n)))
	}
	// Syncs are writes. Their number varies by a few from life to life, so the end is
	// several lives in a row that no crash has hit; in each of those the crash comes
	// after the last acknowledgement.
	k := 1
	for ended := 0; ended < 5; k++ {
		fs := newCrashing(k)
		life(t, fs, log)
		images, floor := fs.crashed()
		if images == nil {
			ended++
			fs.crash()
			if images, floor = fs.crashed(); floor != uint64(len(log)) {
				t.Errorf("at the end of a life %d of %d events are durable", floor, len(log))
			}
		} else {
			ended = 0
		}
		for keep, image := range images {
			db := open(t, image, "views")
			sum, cursor, err := db.Digest()
			if err != nil {
				t.Fatal(err)
			}
			if cursor < floor {
				t.Errorf("write %d, %d%% kept: the cursor is %d, %d was durable", k, keep, cursor, floor)
			}
			if sum != want[cursor] {
				t.Errorf("write %d, %d%% kept: the rows are not those of their cursor %d", k, keep, cursor)
			}
			if err := db.CatchUp(t.Context(), newLog(log...)); err != nil {
				t.Fatal(err)
			}
			if sum, _, err := db.Digest(); err != nil || sum != want[len(log)] {
				t.Errorf("write %d, %d%% kept: caught up from %d, the rows differ from the replay (%v)", k, keep, cursor, err)
			}
			shut(t, db)
		}
	}
	if k < 40 {
		t.Errorf("only %d writes were seen", k)
	}
}

func TestCatchUpIsDurable(t *testing.T) {
	mem := vfs.NewCrashableMem()
	db := open(t, mem, "views")
	defer shut(t, db)
	if err := db.CatchUp(t.Context(), newLog(story()...)); err != nil {
		t.Fatal(err)
	}
	image := open(t, mem.CrashClone(vfs.CrashCloneCfg{}), "views")
	defer shut(t, image)
	if at := image.Cursor(); at != 6 {
		t.Fatalf("after a crash the cursor is %d, want 6", at)
	}
}

// A view that is followed and otherwise left alone becomes durable by itself.
func TestFollowSyncsEachSecond(t *testing.T) {
	mem := vfs.NewCrashableMem()
	synced := make(chan struct{}, 1)
	fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		switch op.Kind {
		case errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo:
			select {
			case synced <- struct{}{}:
			default:
			}
		}
		return nil
	}))
	src := newLog(event(1, events.Scope{Actor: events.Server}, events.StoreCreated{Store: storeID}))
	db := open(t, fs, "views")
	defer shut(t, db)
	stop := follow(t, db, src)
	defer func() {
		if err := stop(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}()
	await(t, db, 1)
	deadline := time.After(10 * time.Second)
	for {
		image := open(t, mem.CrashClone(vfs.CrashCloneCfg{}), "views")
		at := image.Cursor()
		shut(t, image)
		if at == 1 {
			return
		}
		select {
		case <-synced: // about to be; look again
		case <-time.After(50 * time.Millisecond):
		case <-deadline:
			t.Fatal("ten seconds after an event the view is not durable")
		}
	}
}
