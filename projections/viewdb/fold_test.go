package viewdb_test

import (
	"context"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// However a log is cut into batches, and wherever the database is closed and reopened,
// its rows are those of a replay in memory.
func TestIncrementalEqualsReplay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t, 60)
		fs := vfs.NewMem()
		db := open(t, fs, "views")
		defer func() { shut(t, db) }()
		for at := 0; at < len(h.log); {
			at = min(at+rapid.IntRange(1, 30).Draw(t, "batch"), len(h.log))
			if err := db.CatchUp(context.Background(), prefix(h.log, at)); err != nil {
				t.Fatal(err)
			}
			if rapid.IntRange(0, 3).Draw(t, "reopen") == 0 {
				shut(t, db)
				db = open(t, fs, "views")
			}
			if got := db.Cursor(); got != uint64(at) {
				t.Fatalf("cursor is %d, want %d", got, at)
			}
		}
		sum, cursor, err := db.Digest()
		if err != nil {
			t.Fatal(err)
		}
		if cursor != uint64(len(h.log)) || sum != digest(t, h.rows) {
			t.Fatalf("rows at %d of %d differ from the replay", cursor, len(h.log))
		}
		if sum != replayed(t, h.log, cursor) {
			t.Fatal("two replays differ")
		}
	})
}

// The visible checkpoints of a trial are exactly the ancestors of its head, except
// deleted and withdrawn ones; queries agree with the rows.
func TestTheLineIsWhatIsVisible(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t, 120)
		runs, err := projections.Runs(h.rows)
		if err != nil {
			t.Fatal(err)
		}
		for _, run := range runs {
			trials, err := projections.Trials(h.rows, run.Name)
			if err != nil {
				t.Fatal(err)
			}
			rows, err := projections.Checkpoints(h.rows, run.Name, true)
			if err != nil {
				t.Fatal(err)
			}
			for _, trial := range trials {
				checkLine(t, h.rows, trial, rows)
				checkMetrics(t, h.rows, trial)
			}
		}
	})
}

func checkLine(t *rapid.T, r projections.Reader, trial projections.Trial, rows []projections.Checkpoint) {
	bySeq := map[uint64]projections.Checkpoint{}
	var visible, open, openWant []string
	for _, c := range rows {
		if c.Trial != trial.Name {
			continue
		}
		bySeq[c.BegunSeq] = c
		if c.Visible() {
			visible = append(visible, c.ID)
		}
		if c.State == projections.Open || c.State == projections.Staged {
			openWant = append(openWant, c.ID)
		}
		if c.Visible() && c.Withdrawn {
			t.Fatalf("%s is visible and withdrawn", c.ID)
		}
	}
	var line []string
	for seq := trial.HeadSeq; seq != 0; seq = bySeq[seq].ParentSeq {
		c, ok := bySeq[seq]
		if !ok || c.ParentSeq >= seq {
			t.Fatalf("trial %s/%s: the line breaks at %d: %+v", trial.Run, trial.Name, seq, c)
		}
		if len(line) == 0 && (!c.Visible() || c.ID != trial.Head) {
			t.Fatalf("trial %s/%s: the head %q is %+v", trial.Run, trial.Name, trial.Head, c)
		}
		if c.Visible() {
			line = append(line, c.ID)
		}
	}
	if !slices.Equal(line, visible) {
		t.Fatalf("trial %s/%s: line %q, visible %q", trial.Run, trial.Name, line, visible)
	}
	if trial.HeadSeq == 0 && len(visible) > 0 {
		t.Fatalf("trial %s/%s has no head, but %q", trial.Run, trial.Name, visible)
	}
	inProgress, err := projections.OpenCheckpoints(r, trial.Run, trial.Name)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range inProgress {
		open = append(open, c.ID)
	}
	if !slices.Equal(open, openWant) {
		t.Fatalf("trial %s/%s: open are %q, want %q", trial.Run, trial.Name, open, openWant)
	}
}

func checkMetrics(t *rapid.T, r projections.Reader, trial projections.Trial) {
	reports, err := projections.Reports(r, trial.Run, trial.Name)
	if err != nil {
		t.Fatal(err)
	}
	at := 0
	for _, m := range reports {
		if m.LineIteration <= at {
			t.Fatalf("trial %s/%s: iteration %d of the line follows %d", trial.Run, trial.Name, m.LineIteration, at)
		}
		at = m.LineIteration
	}
	if at > trial.Iterations {
		t.Fatalf("trial %s/%s has %d iterations, the line %d", trial.Run, trial.Name, trial.Iterations, at)
	}
}

// A log of more events than a batch holds.
func TestManyBatches(t *testing.T) {
	log := []events.Recorded{event(1, events.Scope{Run: "demo", Trial: "main", Actor: events.Server},
		events.GroupStarted{Attempt: 1, WorldSize: 1})}
	for i := range 6_000 {
		log = append(log, event(uint64(i+2), events.Scope{Run: "demo", Trial: "main", Actor: events.Rank(0)},
			events.Metrics{Attempt: 1, Iteration: i + 1, Step: int64(i), Metrics: map[string]any{"loss": i}}))
	}
	db := open(t, vfs.NewMem(), "views")
	defer shut(t, db)
	if err := db.CatchUp(t.Context(), newLog(log...)); err != nil {
		t.Fatal(err)
	}
	sum, cursor, err := db.Digest()
	if err != nil {
		t.Fatal(err)
	}
	if cursor != uint64(len(log)) || sum != replayed(t, log, cursor) {
		t.Fatalf("rows at %d differ from the replay", cursor)
	}
	err = db.View(func(r projections.Reader) error {
		trial, err := projections.GetTrial(r, "demo", "main")
		if trial.Iterations != 6_000 || trial.LastMetrics["loss"] != 5_999.0 {
			t.Errorf("trial is %+v", trial)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func open(t fatal, fs vfs.FS, dir string) *viewdb.DB {
	t.Helper()
	db, err := viewdb.Open(dir, viewdb.Options{FS: fs, Store: storeID})
	if err != nil {
		t.Fatal(err)
	}
	return db
}

func shut(t fatal, db *viewdb.DB) {
	t.Helper()
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}
