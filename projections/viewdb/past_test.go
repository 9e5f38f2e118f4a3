package viewdb_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"testing"
	"time"

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
		log, fs := newLog(h.log...), vfs.NewMem()
		db := open(t, fs, "views")
		defer func() { shut(t, db) }()
		if err := db.CatchUp(t.Context(), log); err != nil {
			t.Fatal(err)
		}
		past := viewdb.NewHistory(db, log)
		every := uint64(rapid.IntRange(1, 60).Draw(t, "every"))
		past.Every(every, uint64(rapid.IntRange(2, 10).Draw(t, "most")))
		for range 8 {
			switch rapid.IntRange(0, 4).Draw(t, "before") {
			case 0:
				if err := past.Build(t.Context()); err != nil {
					t.Fatal(err)
				}
			case 1:
				past.Forget()
			case 2:
				shut(t, db)
				db = open(t, fs, "views")
				past = viewdb.NewHistory(db, log)
				past.Every(every, 5)
			}
			seq := uint64(rapid.IntRange(1, len(h.log)).Draw(t, "as of"))
			if rapid.Bool().Draw(t, "at a keyframe") {
				seq = max(1, seq-seq%every)
			}
			want, err := viewdb.Replay(t.Context(), log, seq)
			if err != nil {
				t.Fatal(err)
			}
			err = past.At(t.Context(), seq, func(r projections.Reader) error {
				if digest(t, r) != digest(t, want) {
					at, every, err := past.Keyframes()
					t.Fatalf("the rows as of %d of %d differ; keyframes up to %d, every %d, %v", seq, len(h.log), at, every, err)
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

// Keyframes and their versions stay few, and a state after the end of the views is refused.
func TestKeyframesAreBounded(t *testing.T) {
	story := training(40)
	log := newLog(story...)
	db := open(t, vfs.NewMem(), "views")
	defer shut(t, db)
	if err := db.CatchUp(t.Context(), log); err != nil {
		t.Fatal(err)
	}
	for _, most := range []uint64{1 << 20, 8} {
		past := viewdb.NewHistory(db, log)
		past.Every(10, most)
		if err := past.Build(t.Context()); err != nil {
			t.Fatal(err)
		}
		at, every, err := past.Keyframes()
		if err != nil || at/every > most || uint64(len(story))-at >= every {
			t.Errorf("with at most %d keyframes of a log of %d events, they end at %d, one every %d: %v", most, len(story), at, every, err)
		}
		// The rows of the trial and the attempt change at each keyframe.
		if n, of, err := db.Versions(); err != nil || uint64(of) != at/every {
			t.Errorf("with at most %d keyframes, a row has %d versions of %d keyframes, all rows %d: %v", most, of, at/every, n, err)
		}
		if err := db.Disguise(0, ""); err != nil {
			t.Fatal(err)
		}
		if err := db.StartKeyframes(); err != nil {
			t.Fatal(err)
		}
	}
	past := viewdb.NewHistory(db, log)
	err := past.At(t.Context(), uint64(len(story))+1, func(projections.Reader) error { return errors.New("it is read") })
	if !errors.Is(err, projections.ErrNotFound) {
		t.Errorf("the state after the end: %v", err)
	}
}

// Keyframes of other folds or of a program that knows other events, or a list of them that is damaged, are dropped at the next opening.
func TestKeyframesOfOtherFolds(t *testing.T) {
	for name, spoil := range map[string]func(*viewdb.DB) error{
		"keyframes of other folds": func(db *viewdb.DB) error { return db.Disguise(projections.Version-1, "") },
		"keyframes of other events": func(db *viewdb.DB) error { // of a program that did not note which it knows
			return db.Disguise(0, fmt.Sprintf(`{"at":5,"every":5,"thinned":5,"reducer":%d}`, projections.Version))
		},
		"damaged list":        func(db *viewdb.DB) error { return db.Disguise(0, `{"at":7}`) },
		"rows of other folds": (*viewdb.DB).Age,
	} {
		t.Run(name, func(t *testing.T) {
			fs, log := vfs.NewMem(), newLog(training(3)...)
			db := open(t, fs, "views")
			if err := db.CatchUp(t.Context(), log); err != nil {
				t.Fatal(err)
			}
			past := viewdb.NewHistory(db, log)
			past.Every(5, 100)
			if err := past.Build(t.Context()); err != nil {
				t.Fatal(err)
			}
			if n, _, err := db.Versions(); n == 0 || err != nil {
				t.Fatalf("%d versions: %v", n, err)
			}
			if err := spoil(db); err != nil {
				t.Fatal(err)
			}
			shut(t, db)
			db = open(t, fs, "views")
			defer shut(t, db)
			if n, _, err := db.Versions(); n != 0 || err != nil {
				t.Errorf("%d versions after the next opening: %v", n, err)
			}
			if at, _, err := viewdb.NewHistory(db, log).Keyframes(); at != 0 || err != nil {
				t.Errorf("keyframes up to %d after the next opening: %v", at, err)
			}
		})
	}
}

// stuckLog is a log that does not answer.
type stuckLog struct {
	*fakeLog
	asked chan struct{}
}

func (s stuckLog) Read(ctx context.Context, _, _ uint64) iter.Seq2[events.Recorded, error] {
	return func(yield func(events.Recorded, error) bool) {
		s.asked <- struct{}{}
		<-ctx.Done()
		yield(events.Recorded{}, ctx.Err())
	}
}

// A view closes although the log does not answer those who make keyframes or ask for the past.
func TestCloseEndsHistory(t *testing.T) {
	log := newLog(training(3)...)
	for name, use := range map[string]func(*viewdb.History) error{
		"keep": func(h *viewdb.History) error { return h.Keep(context.Background()) },
		"at": func(h *viewdb.History) error {
			return h.At(context.Background(), 3, func(projections.Reader) error { return nil })
		},
	} {
		t.Run(name, func(t *testing.T) {
			db := open(t, vfs.NewMem(), "views")
			if err := db.CatchUp(t.Context(), log); err != nil {
				t.Fatal(err)
			}
			stuck := stuckLog{log, make(chan struct{}, 1)}
			past := viewdb.NewHistory(db, stuck)
			past.Every(5, 100)
			ended := make(chan error, 1)
			go func() { ended <- use(past) }()
			<-stuck.asked
			if err := within(t, "closing the views", db.Close); err != nil {
				t.Error(err)
			}
			if err := within(t, name, func() error { return <-ended }); err == nil {
				t.Error("it ended without an error")
			}
		})
	}
}

// Keep makes the keyframes of a log while it grows, and ends with its context.
func TestKeepFollows(t *testing.T) {
	story := training(30)
	log := newLog(story[:40]...)
	db := open(t, vfs.NewMem(), "views")
	defer shut(t, db)
	ctx, cancel := context.WithCancel(t.Context())
	followed, kept := make(chan error, 1), make(chan error, 1)
	go func() { followed <- db.Follow(ctx, log) }()
	past := viewdb.NewHistory(db, log)
	past.Every(10, 1000)
	go func() { kept <- past.Keep(ctx) }()
	reached := func(want uint64) {
		t.Helper()
		if err := within(t, fmt.Sprintf("keyframes up to %d", want), func() error {
			for tick := time.Tick(5 * time.Millisecond); ; <-tick {
				if at, _, err := past.Keyframes(); at >= want || err != nil || ctx.Err() != nil {
					return err
				}
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	reached(40)
	log.append(story[40:75]...)
	reached(70)
	if at, end, quick, err := past.Progress(151); at != 70 || end != 75 || quick || err != nil {
		t.Errorf("progress %d of %d, quick %v, %v", at, end, quick, err)
	}
	if _, _, quick, err := past.Progress(149); !quick || err != nil {
		t.Errorf("event 149 is not near keyframe 70: %v", err)
	}
	cancel()
	for _, ended := range []chan error{kept, followed} {
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("it ended with %v", err)
		}
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
