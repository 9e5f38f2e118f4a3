package viewdb_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

func TestMain(m *testing.M) {
	// The tests of failing file systems wait more than they compute. A number on the
	// command line takes precedence.
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	if os.Getenv(failingEnv) != "" {
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m)
}

var lane = events.Scope{Run: "demo", Trial: "main", Actor: events.Server}

// story returns a short log: two checkpoints of a run.
func story() []events.Recorded {
	bodies := []events.Body{
		events.GroupStarted{Attempt: 1, Job: "J1", WorldSize: 1, Ranks: []events.RankPlacement{{}}},
		events.CheckpointBegun{Attempt: 1, Checkpoint: "step-1.a1", Name: "step-1", Step: 1, WorldSize: 1, Participants: []int{0}},
		events.CheckpointCommitted{Attempt: 1, Checkpoint: "step-1.a1", Manifest: "m1", Bytes: 1},
		events.CheckpointBegun{Attempt: 1, Checkpoint: "step-2.a1", Name: "step-2", Step: 2, WorldSize: 1, Participants: []int{0}},
		events.CheckpointCommitted{Attempt: 1, Checkpoint: "step-2.a1", Manifest: "m2", Bytes: 1},
	}
	log := []events.Recorded{event(1, events.Scope{Actor: events.Server}, events.StoreCreated{Store: storeID})}
	for _, b := range bodies {
		log = append(log, event(uint64(len(log)+1), lane, b))
	}
	return log
}

func latest(t *testing.T, db *viewdb.DB) string {
	t.Helper()
	var id string
	err := db.View(func(r projections.Reader) error {
		c, err := projections.Resolve(r, "demo")
		id = c.ID
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func follow(t *testing.T, db *viewdb.DB, src viewdb.Source) (stop func() error) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- db.Follow(ctx, src) }()
	return func() error {
		cancel()
		return <-done
	}
}

func TestFollow(t *testing.T) {
	log := story()
	src := newLog(log[:4]...)
	db := open(t, vfs.NewMem(), "views")
	stop := follow(t, db, src)
	await(t, db, 4)
	if got := latest(t, db); got != "step-1.a1" {
		t.Fatalf("latest is %q", got)
	}
	// A view does not change while it is read.
	err := db.ViewAt(func(r projections.Reader, cursor uint64) error {
		src.append(log[4:]...)
		await(t, db, 6)
		if got := digest(t, r); cursor != 4 || got != replayed(t, log, 4) {
			t.Errorf("the view of %d moved", cursor)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := latest(t, db); got != "step-2.a1" {
		t.Fatalf("latest is %q", got)
	}
	if err := db.Follow(t.Context(), src); !errors.Is(err, viewdb.ErrBusy) {
		t.Fatalf("a second Follow returned %v", err)
	}
	if err := stop(); !errors.Is(err, context.Canceled) {
		t.Fatalf("Follow returned %v", err)
	}
	// A cancelled update is no reason for waiters to give up.
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := db.Wait(ctx, 7); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Wait returned %v", err)
	}
	shut(t, db)
	shut(t, db)
	for name, err := range map[string]error{
		"CatchUp": db.CatchUp(t.Context(), src),
		"View":    db.View(func(projections.Reader) error { return nil }),
		"Wait":    db.Wait(t.Context(), 99),
	} {
		if !errors.Is(err, viewdb.ErrClosed) {
			t.Errorf("%s of a closed view returned %v", name, err)
		}
	}
}

func TestCloseEndsFollow(t *testing.T) {
	src := newLog(story()...)
	db := open(t, vfs.NewMem(), "views")
	done := make(chan error, 1)
	go func() { done <- db.Follow(t.Context(), src) }()
	await(t, db, 6)
	shut(t, db)
	if err := <-done; !errors.Is(err, viewdb.ErrClosed) {
		t.Fatalf("Follow returned %v", err)
	}
}

// A view stops before an event that it cannot fold, and waiters get an error.
func TestHalts(t *testing.T) {
	log := story()
	foreign := event(1, events.Scope{Actor: events.Server}, events.StoreCreated{Store: "store-2"})
	short := newLog(log[:3]...)
	short.last = 6 // as of a damaged log: it reports more than it has
	short.broken = errors.New("block 3 is damaged")
	repeated := newLog(log[0], log[1], log[2], log[3], log[3], log[4])
	for _, test := range []struct {
		name string
		src  *fakeLog
		is   error
		says string
		at   uint64 // before; also the highest cursor allowed after
	}{
		{"gap", newLog(log[0], log[1], log[2], log[4], log[5]), viewdb.ErrGap, "event 5 follows event 3", 3},
		{"gap at the cursor", newLog(log[0], log[2], log[3]), viewdb.ErrGap, "event 3 follows event 1", 1},
		{"repetition", repeated, viewdb.ErrGap, "event 4 follows event 4", 4},
		{"foreign log", newLog(foreign), viewdb.ErrForeign, "of store-2, not of store-1", 0},
		{"source fails", short, short.broken, "after event 3", 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, update := range []func(*viewdb.DB, context.Context, viewdb.Source) error{(*viewdb.DB).Follow, (*viewdb.DB).CatchUp} {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				db := open(t, vfs.NewMem(), "views")
				waited := make(chan error, 1)
				go func() { waited <- db.Wait(ctx, 1000) }()
				err := update(db, ctx, test.src)
				if err == nil || !strings.Contains(err.Error(), test.says) || test.is != nil && !errors.Is(err, test.is) {
					t.Fatalf("error is %v", err)
				}
				if waitErr := <-waited; waitErr == nil || !strings.Contains(waitErr.Error(), test.says) {
					t.Errorf("Wait returned %v", waitErr)
				}
				if at := db.Cursor(); at > test.at {
					t.Errorf("the cursor is %d, want at most %d", at, test.at)
				}
				sum, cursor, err := db.Digest()
				if err != nil || sum != replayed(t, log, cursor) {
					t.Errorf("the rows are not those of their cursor %d (%v)", cursor, err)
				}
				shut(t, db)
			}
		})
	}
}

func TestRolledBackLog(t *testing.T) {
	log := story()
	db := open(t, vfs.NewMem(), "views")
	defer shut(t, db)
	if err := db.CatchUp(t.Context(), newLog(log...)); err != nil {
		t.Fatal(err)
	}
	for _, update := range []func(*viewdb.DB, context.Context, viewdb.Source) error{(*viewdb.DB).Follow, (*viewdb.DB).CatchUp} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		err := update(db, ctx, newLog(log[:5]...))
		if !errors.Is(err, viewdb.ErrRolledBack) || !strings.Contains(err.Error(), "ends at 5, the views are at 6") {
			t.Fatalf("error is %v", err)
		}
	}
	// The same log again works, and so does a wait after a cancelled one.
	if err := db.CatchUp(t.Context(), newLog(log...)); err != nil {
		t.Fatal(err)
	}
	await(t, db, 6)
}

func TestForeignView(t *testing.T) {
	fs := vfs.NewMem()
	shut(t, open(t, fs, "views"))
	db, err := viewdb.Open("views", viewdb.Options{FS: fs, Store: "store-2"})
	if db != nil || !errors.Is(err, viewdb.ErrForeign) || !strings.Contains(err.Error(), "of store-1, not of store-2") {
		t.Fatalf("Open returned %v", err)
	}
	// The view is unchanged.
	shut(t, open(t, fs, "views"))
	if _, err := viewdb.Open("views", viewdb.Options{FS: fs}); err == nil {
		t.Fatal("a view was opened without a store")
	}
}

func TestOneProcessAtATime(t *testing.T) {
	dir := t.TempDir()
	db := open(t, nil, dir)
	if _, err := viewdb.Open(dir, viewdb.Options{Store: storeID}); err == nil {
		t.Fatal("a view was opened twice")
	}
	shut(t, db)
	shut(t, open(t, nil, dir))
}

// A view of other folds, or a missing one, is rebuilt to the same state.
func TestRebuild(t *testing.T) {
	log := story()
	want := replayed(t, log, 6)
	rebuilt := func(t *testing.T, dir string) {
		t.Helper()
		db := open(t, nil, dir)
		defer shut(t, db)
		if at := db.Cursor(); at != 0 {
			t.Fatalf("the cursor is %d", at)
		}
		if sum, _, err := db.Digest(); err != nil || sum != replayed(t, nil, 0) {
			t.Fatalf("old rows are left (%v)", err)
		}
		if err := db.CatchUp(t.Context(), newLog(log...)); err != nil {
			t.Fatal(err)
		}
		if sum, at, err := db.Digest(); err != nil || at != 6 || sum != want {
			t.Fatalf("the rows at %d differ from the replay (%v)", at, err)
		}
	}
	t.Run("new, then deleted", func(t *testing.T) {
		dir := t.TempDir()
		rebuilt(t, dir)
		if err := vfs.Default.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		rebuilt(t, dir)
	})
	for name, cursor := range map[string]string{
		"newer version": `{"sequence":3,"reducer":999,"store":"store-1"}`,
		"older version": `{"sequence":3,"reducer":0,"store":"store-1"}`,
		"no cursor":     "",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			p, err := pebble.Open(dir, &pebble.Options{FormatMajorVersion: pebble.FormatNewest, Logger: noLog{}})
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Set([]byte("rold"), []byte("{}"), pebble.Sync); err != nil {
				t.Fatal(err)
			}
			if cursor != "" {
				if err := p.Set([]byte("\x00cursor"), []byte(cursor), pebble.Sync); err != nil {
					t.Fatal(err)
				}
			}
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			rebuilt(t, dir)
		})
	}
}

// Views in a format of a newer database are refused with the next step, and stay as
// they are; views in an older format are taken over.
func TestFormats(t *testing.T) {
	dir := t.TempDir()
	p, err := pebble.Open(dir, &pebble.Options{FormatMajorVersion: pebble.FormatMinSupported, Logger: noLog{}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	db := open(t, nil, dir)
	if err := db.CatchUp(t.Context(), newLog(story()...)); err != nil {
		t.Error(err)
	}
	shut(t, db)
	markers, err := filepath.Glob(filepath.Join(dir, "marker.format-version.*"))
	if err != nil || len(markers) == 0 {
		t.Fatal(markers, err)
	}
	newest := markers[len(markers)-1]
	newer := newest[:strings.LastIndexByte(newest, '.')] + ".999"
	if err := os.Rename(newest, newer); err != nil {
		t.Fatal(err)
	}
	if db, err = viewdb.Open(dir, viewdb.Options{Store: storeID}); err == nil {
		shut(t, db)
	}
	if err == nil || !strings.Contains(err.Error(), "999") || !strings.Contains(err.Error(), "delete the directory, it is rebuilt from the log") {
		t.Errorf("views of a newer format: %v", err)
	}
	if _, err := os.Stat(newer); err != nil {
		t.Error(err)
	}
}

type noLog struct{}

func (noLog) Infof(string, ...any)           {}
func (noLog) Errorf(string, ...any)          {}
func (noLog) Fatalf(format string, _ ...any) { panic(format) }

func TestReplayAsOf(t *testing.T) {
	log := story()
	src := newLog(log...)
	for until, want := range map[uint64]string{4: "step-1.a1", 5: "step-1.a1", 6: "step-2.a1", 0: "step-2.a1"} {
		m, err := viewdb.Replay(t.Context(), src, until)
		if err != nil {
			t.Fatal(err)
		}
		if c, err := projections.Resolve(m, "demo"); err != nil || c.ID != want {
			t.Errorf("as of %d the latest is %q, %v, want %q", until, c.ID, err, want)
		}
	}
	if _, err := viewdb.Replay(t.Context(), src, 7); err == nil || !strings.Contains(err.Error(), "ends at 6") {
		t.Errorf("beyond the end: %v", err)
	}
	if _, err := viewdb.Replay(t.Context(), newLog(log[0], log[2]), 2); !errors.Is(err, viewdb.ErrGap) {
		t.Errorf("with a gap: %v", err)
	}
	if m, err := viewdb.Replay(t.Context(), newLog(), 0); err != nil || m.Len() != 0 {
		t.Errorf("of nothing: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	waiting := newLog(log[:2]...)
	waiting.last = 6
	if _, err := viewdb.Replay(ctx, waiting, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("when stopped: %v", err)
	}
}

// A cancelled opening leaves nothing behind: the directory can be opened again at once.
func TestOpeningGivenUp(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := filepath.Join(t.TempDir(), "views")
	for range 10 {
		db, err := viewdb.OpenContext(ctx, dir, viewdb.Options{Store: storeID})
		if !errors.Is(err, context.Canceled) || errors.Is(err, viewdb.ErrFailed) || db != nil {
			t.Fatalf("%v", err)
		}
	}
	db, err := viewdb.Open(dir, viewdb.Options{Store: storeID})
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Error(err)
	}
}

// TestKnowsMore checks that rows which an earlier version folded without an event known
// to this version are folded again. An event unknown to both is kept.
func TestKnowsMore(t *testing.T) {
	fs := vfs.NewMem()
	log := story()
	src := newLog(log...)
	for kind, again := range map[string]bool{"report.metrics": true, "report.dreams": false} {
		db := open(t, fs, "views")
		if err := db.CatchUp(t.Context(), src); err != nil {
			t.Fatal(err)
		}
		shut(t, db)
		p, err := pebble.Open("views", &pebble.Options{FS: fs, FormatMajorVersion: pebble.FormatNewest})
		if err != nil {
			t.Fatal(err)
		}
		row := fmt.Appendf(nil, `{"run":"a","sequence":3,"kind":%q,"version":1}`, kind)
		if err := errors.Join(p.Set([]byte("n\x01a"), row, pebble.Sync), p.Close()); err != nil {
			t.Fatal(err)
		}
		db = open(t, fs, "views")
		if at := db.Cursor(); (at == 0) != again {
			t.Errorf("%s: the cursor is %d, again: %v", kind, at, again)
		}
		if err := db.View(func(r projections.Reader) error {
			err := projections.Understood(r, "a")
			if (err == nil) != again {
				t.Errorf("%s: %v", kind, err)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		shut(t, db)
	}
}
