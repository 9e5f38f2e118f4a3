package viewdb_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// lateReports appends reports of one attempt whose iterations come in any order.
func (h *history) lateReports() {
	n := rapid.SampledFrom([]int{0, 20, 40, 300}).Draw(h.t, "late reports")
	order := rapid.Permutation(upTo(n)).Draw(h.t, "order")
	for _, i := range order {
		h.say(events.Scope{Run: "demo", Trial: projections.DefaultTrial, Actor: events.Rank(0)}, events.Metrics{
			Attempt: 1, Iteration: i, Step: int64(i / 3), Metrics: map[string]any{"loss": float64(i%7) / 3, "bad": "NaN"},
		})
		if i%29 == 0 {
			h.step()
		}
	}
}

func upTo(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i + 1
	}
	return all
}

// The state as of any event by keyframes equals a replay up to it, byte for byte, wherever
// the keyframes are and in whatever order the states are asked for.
func TestHistoryEqualsReplay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t, 40)
		h.lateReports()
		for range rapid.IntRange(0, 20).Draw(t, "more") {
			h.step()
		}
		log := newLog(h.log...)
		db := open(t, vfs.NewMem(), "views")
		defer func() { shut(t, db) }()
		if err := db.CatchUp(t.Context(), log); err != nil {
			t.Fatal(err)
		}
		past := viewdb.NewHistory(db, log)
		past.Every(uint64(rapid.IntRange(1, 60).Draw(t, "every")), rapid.IntRange(2, 10).Draw(t, "most"))
		for range 6 {
			seq := uint64(rapid.IntRange(1, len(h.log)).Draw(t, "as of"))
			want, err := viewdb.Replay(t.Context(), log, seq)
			if err != nil {
				t.Fatal(err)
			}
			err = past.At(t.Context(), seq, func(r projections.Reader) error {
				if digest(t, r) != digest(t, want) {
					t.Fatalf("the rows as of %d of %d differ; keyframes %v", seq, len(h.log), past.Keyframes())
				}
				if got, was := answers(t, r), answers(t, want); got != was {
					t.Fatalf("the answers as of %d of %d are\n%s\nwant\n%s", seq, len(h.log), got, was)
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}

// Keyframes stay few, and a state after the end of the views is refused.
func TestKeyframesAreBounded(t *testing.T) {
	log := newLog(training(40)...)
	db := open(t, vfs.NewMem(), "views")
	defer shut(t, db)
	if err := db.CatchUp(t.Context(), log); err != nil {
		t.Fatal(err)
	}
	past := viewdb.NewHistory(db, log)
	past.Every(10, 8)
	if err := past.Build(t.Context()); err != nil {
		t.Fatal(err)
	}
	at := past.Keyframes()
	if last, _ := log.Last(t.Context()); len(at) > 8 || len(at) < 4 || at[0] != 0 || last-at[len(at)-1] > 160 {
		t.Errorf("keyframes %v of a log of %d events", at, last)
	}
	last, _ := log.Last(t.Context())
	err := past.At(t.Context(), last+1, func(projections.Reader) error { return errors.New("it is read") })
	if !errors.Is(err, projections.ErrNotFound) {
		t.Errorf("the state after the end: %v", err)
	}
}

// BenchmarkAsOf asks for states that are spread over the log.
func BenchmarkAsOf(b *testing.B) {
	events := training(10_000)
	log := newLog(events...)
	db, err := viewdb.Open(b.TempDir(), viewdb.Options{Store: storeID})
	if err != nil {
		b.Fatal(err)
	}
	defer shut(b, db)
	if err := db.CatchUp(b.Context(), log); err != nil {
		b.Fatal(err)
	}
	past := viewdb.NewHistory(db, log)
	begin := cpu(b)
	if err := past.Build(b.Context()); err != nil {
		b.Fatal(err)
	}
	built := cpu(b) - begin
	var took []float64
	seq := uint64(0)
	for b.Loop() {
		seq = (seq+7_919)%uint64(len(events)) + 1
		begin := cpu(b)
		err := past.At(b.Context(), seq, func(r projections.Reader) error {
			_, err := projections.CheckpointsBefore(r, "demo", true, 0, 60)
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
		took = append(took, (cpu(b)-begin).Seconds()*1000)
	}
	slices.Sort(took)
	b.ReportMetric(took[len(took)*95/100], "p95-cpu-ms")
	b.ReportMetric(built.Seconds(), "build-cpu-s")
	b.Logf("%d events", len(events))
}
