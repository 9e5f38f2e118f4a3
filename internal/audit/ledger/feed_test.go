package ledger

import (
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
)

// fedFrom returns messages of a log as its reader passes them on.
func fedFrom(l *memLog, sequences ...uint64) (list []fed) {
	for _, sequence := range sequences {
		list = append(list, fed{l.list[sequence-1], sequence, time.Unix(1700000000, int64(sequence))}) //nolint:gosec // small
	}
	return list
}

// TestFedLaw feeds a part of the log, some messages more than once and out of order, as two
// readers do: tree, run map and files are those of a keeper that reads the log.
func TestFedLaw(t *testing.T) {
	const size = 600
	_, from := configured(t, nil)
	log := &memLog{}
	log.fill(t, size)
	begun := func() (*Keeper, string) {
		dir, _ := configured(t, &from)
		k := opened(t, options(t, dir, log))
		for i := range byte(3) {
			k.salts.fresh["run-"+string('0'+i)] = make([]byte, 32)
		}
		return k, dir
	}
	clean, cleanDir := begun()
	headAt(t, clean, size)
	want := files(t, cleanDir)
	rapid.Check(t, func(r *rapid.T) {
		k, dir := begun()
		for k.size() < size {
			at := uint64(k.size()) //nolint:gosec // small
			list := rapid.SliceOfN(rapid.Uint64Range(max(1, at), min(size, at+20)), 1, 40).Draw(r, "sequences")
			if rapid.Bool().Draw(r, "in order") {
				slices.Sort(list)
			}
			if err := k.foldFed(t.Context(), fedFrom(log, list...), rapid.Bool().Draw(r, "late")); err != nil {
				r.Fatal(err)
			}
		}
		headAt(t, k, size)
		if k.head != clean.head || !slices.Equal(k.runs.Rows(), clean.runs.Rows()) {
			r.Fatalf("head %v and rows %v, want %v and %v", k.head, k.runs.Rows(), clean.head, clean.runs.Rows())
		}
		if got := files(t, dir); !maps.Equal(got, want) {
			r.Fatalf("files %v, want %v with the same bytes", slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
		}
	})
}

// TestFed: a keeper that is fed reads nothing from the log but what was there before, and
// folds what its reader leaves out.
func TestFed(t *testing.T) {
	dir, _ := configured(t, nil)
	log := &memLog{}
	log.fill(t, 20)
	o := options(t, dir, log)
	o.Fed = true
	k := opened(t, o)
	kept(t, k)
	soon(t, "what the log had", func() bool { return k.Folded() == 20 })
	more := &memLog{}
	more.fill(t, 400)
	for i, m := range more.list[20:] { // before the log has it, so that it is never late
		sequence := uint64(21 + i)                                  //nolint:gosec // small
		k.Feed(m, sequence, time.Unix(1700000000, int64(sequence))) //nolint:gosec // small
		log.add(m)
	}
	soon(t, "what was fed", func() bool { return k.Folded() == 400 })
	if n := k.Reread(); n != 20 {
		t.Errorf("%d events were read from the log, want 20", n)
	}
	log.fill(t, 10) // the reader has stopped
	soon(t, "what was not fed", func() bool { return k.Folded() == 410 })
	if n := k.Reread(); n != 30 {
		t.Errorf("%d events were read from the log, want 30", n)
	}
}

// TestFedBounded: the feed of a keeper that does not fold is bounded, and its reader does
// not wait.
func TestFedBounded(t *testing.T) {
	k := &Keeper{feed: feed{grown: make(chan struct{}, 1)}}
	k.Feed(events.Message{}, 1, time.Time{})
	if list := k.feed.take(nil); len(list) != 0 {
		t.Errorf("a keeper that does not follow keeps %d messages", len(list))
	}
	k.feed.turn(true)
	for i := range uint64(fedMost + 10) {
		k.Feed(events.Message{}, i, time.Time{})
	}
	list := k.feed.take(nil)
	if len(list) != fedMost || list[fedMost-1].sequence != fedMost-1 {
		t.Errorf("%d messages wait, want the first %d", len(list), fedMost)
	}
	body := make([]byte, 1<<20)
	for i := range uint64(100) {
		k.Feed(events.Message{Data: body}, i, time.Time{})
	}
	if list = k.feed.take(list); len(list) != fedBytes>>20 {
		t.Errorf("%d messages of 1 MiB wait, want %d", len(list), fedBytes>>20)
	}
	k.feed.turn(false)
	if list = k.feed.take(list); len(list) != 0 {
		t.Errorf("%d messages wait after the end", len(list))
	}
}

// TestPendingBounded: a log that is folded without a head between does not keep its full
// tiles in memory.
func TestPendingBounded(t *testing.T) {
	dir, _ := configured(t, nil)
	const size = audit.TileWidth * (pendingMost/2 + 2)
	log := &memLog{}
	log.fill(t, size)
	var tiles atomic.Int64
	o := options(t, dir, log)
	o.Step = func(step string, done bool) error {
		if step == stepTiled && done {
			tiles.Add(1)
		}
		return nil
	}
	k := opened(t, o)
	if err := k.walkUntil(t.Context(), size); err != nil {
		t.Fatal(err)
	}
	if n := tiles.Load(); n < pendingMost || len(k.pending) > pendingMost {
		t.Errorf("%d tiles are files, %d wait, want at most %d", n, len(k.pending), pendingMost)
	}
}
