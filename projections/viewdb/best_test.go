package viewdb_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

// Best, which reads rows of values, returns the same as a search of every visible
// checkpoint's report, whenever and in whatever order reports come.
func TestBestIsWhatTheReportsSay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t, 0)
		p := place{history: h, scope: events.Scope{Run: "demo", Trial: projections.DefaultTrial, Actor: events.Server}, attempt: 1}
		p.decide(events.GroupStarted{Attempt: 1, WorldSize: 1})
		var saves []string
		next := 1 // iteration: most come in order
		steps := rapid.SampledFrom([]int{1, 2, 4, 12}).Draw(t, "steps")
		for i := range rapid.IntRange(0, 80).Draw(t, "events") {
			step := int64(h.pick("step", steps))
			switch what := h.pick("what", 10); {
			case what < 6:
				at := next
				if h.pick("out of order", 4) == 0 {
					at = 1 + h.pick("iteration", 10)
				} else {
					next++
				}
				metrics := map[string]any{"loss": h.pick("loss", 9)}
				if h.pick("evaluated", 3) == 0 {
					metrics["bad"] = "NaN"
				}
				p.observe(events.Metrics{Attempt: 1, Iteration: at, Step: step, Metrics: metrics, Seconds: 0.25})
			case what < 8 || len(saves) == 0:
				id := fmt.Sprintf("s%d.a1", i)
				p.decide(events.CheckpointBegun{Attempt: 1, Checkpoint: id, Name: fmt.Sprintf("s%d", i), Step: step, WorldSize: 1, Participants: []int{0}})
				p.decide(events.CheckpointCommitted{Attempt: 1, Checkpoint: id, Manifest: "m", Bytes: 1})
				saves = append(saves, id)
			case what == 8:
				p.decide(events.RestoreBegun{Attempt: 1, Load: i, Checkpoint: saves[h.pick("restored", len(saves))], WorldSize: 1})
			default:
				p.decide(events.CheckpointDeleted{Checkpoint: saves[h.pick("deleted", len(saves))], Reason: "retention"})
			}
		}
		runs, err := projections.Runs(h.rows)
		if err != nil {
			t.Fatal(err)
		}
		for _, run := range runs {
			checkValues(t, h.rows, run.Name)
			trials, err := projections.Trials(h.rows, run.Name)
			if err != nil {
				t.Fatal(err)
			}
			for _, trial := range trials {
				for _, metric := range []string{"loss", "bad", "none"} {
					for _, greatest := range []bool{false, true} {
						checkBest(t, h.rows, trial, metric, greatest)
					}
				}
			}
		}
	})
}

// checkValues fails if a row of values belongs to a checkpoint that is not committed.
func checkValues(t *rapid.T, r projections.Reader, run string) {
	rows, err := projections.Checkpoints(r, run, true)
	if err != nil {
		t.Fatal(err)
	}
	committed := map[uint64]bool{}
	for _, c := range rows {
		committed[c.BegunSeq] = c.State == projections.Committed
	}
	err = r.Scan([]byte("b"), []byte("c"), func(k, _ []byte) error {
		if begun := ^binary.BigEndian.Uint64(k[len(k)-8:]); !committed[begun] {
			t.Fatalf("%q is the value of a checkpoint that is not committed", k)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func checkBest(t *rapid.T, r projections.Reader, trial projections.Trial, metric string, greatest bool) {
	rows, err := projections.Checkpoints(r, trial.Run, false)
	if err != nil {
		t.Fatal(err)
	}
	want, top := "", math.NaN()
	for _, c := range rows {
		if c.Trial != trial.Name {
			continue
		}
		value, ok, err := projections.MetricAt(r, c, metric)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			continue
		}
		if !greatest {
			value = -value
		}
		if want == "" || value > top || math.IsNaN(top) && !math.IsNaN(value) {
			want, top = c.ID, value
		}
	}
	got, found, err := projections.Best(r, trial.Run, trial.Name, metric, greatest)
	if err != nil || found != (want != "") || got.ID != want {
		t.Fatalf("the best %s of %s/%s (greatest: %v) is %q (%v), want %q", metric, trial.Run, trial.Name, greatest, got.ID, err, want)
	}
}
