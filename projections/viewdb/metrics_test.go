package viewdb_test

import (
	"fmt"
	"math"
	"reflect"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

// After any sequence of resumes, every report is in the line or hidden, exactly once;
// and a table of few rows has the same extremes as a table of all reports.
func TestMetricsKeepEveryReport(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t, 60)
		runs, err := projections.Runs(h.rows)
		if err != nil {
			t.Fatal(err)
		}
		reports, stored := 0, 0
		err = h.rows.Scan([]byte("m"), []byte("n"), func(_, _ []byte) error { stored++; return nil })
		if err != nil {
			t.Fatal(err)
		}
		for _, run := range runs {
			trials, err := projections.Trials(h.rows, run.Name)
			if err != nil {
				t.Fatal(err)
			}
			for _, trial := range trials {
				checkTable(t, h.rows, trial)
				all := metrics(t, h.rows, projections.MetricsRange{Run: run.Name, Trial: trial.Name, All: true})
				for _, row := range all.Rows {
					reports += row.Reports
				}
			}
		}
		// Facts alone create no trial, so no query can ask for those reports.
		orphans := 0
		for _, r := range h.log {
			if _, err := projections.GetTrial(h.rows, r.Scope.Run, r.Scope.Trial); err != nil && r.Kind == "report.metrics" {
				orphans++
			}
		}
		if orphans == 0 && reports != stored {
			t.Fatalf("%d reports are shown of %d", reports, stored)
		}
	})
}

func metrics(t fatal, r projections.Reader, q projections.MetricsRange) projections.MetricsTable {
	t.Helper()
	table, err := projections.Metrics(r, q)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func checkTable(t *rapid.T, r projections.Reader, trial projections.Trial) {
	want, err := projections.Reports(r, trial.Run, trial.Name)
	if err != nil {
		t.Fatal(err)
	}
	from := rapid.IntRange(0, 10).Draw(t, "from")
	q := projections.MetricsRange{Run: trial.Run, Trial: trial.Name, From: from}
	if rapid.Bool().Draw(t, "bounded") {
		q.Until = from + rapid.IntRange(1, 10).Draw(t, "length")
	}
	raw := metrics(t, r, q)
	i, least, most, nans := 0, math.Inf(1), math.Inf(-1), 0
	for _, m := range want {
		if m.LineIteration < from || q.Until != 0 && m.LineIteration > q.Until {
			continue
		}
		if i >= len(raw.Rows) {
			t.Fatalf("iteration %d is missing", m.LineIteration)
		}
		row := raw.Rows[i]
		if row.Iteration != m.LineIteration || row.Attempt != m.Attempt || row.Hidden || !reflect.DeepEqual(row.Metrics["loss"].Last, m.Metrics["loss"]) {
			t.Fatalf("row %+v, report %+v", row, m)
		}
		v := m.Metrics["loss"].(float64)
		least, most = min(least, v), max(most, v)
		nans++ // each has one
		i++
	}
	if i != len(raw.Rows) {
		t.Fatalf("%d rows, want %d", len(raw.Rows), i)
	}
	q.Points = rapid.IntRange(1, 5).Draw(t, "points")
	few := metrics(t, r, q)
	if len(few.Rows) > q.Points {
		t.Fatalf("%d rows, %d were asked for", len(few.Rows), q.Points)
	}
	fewLeast, fewMost := math.Inf(1), math.Inf(-1)
	for _, row := range few.Rows {
		fewLeast, fewMost = min(fewLeast, row.Metrics["loss"].Min.(float64)), max(fewMost, row.Metrics["loss"].Max.(float64))
		i -= row.Reports
		nans -= row.Metrics["bad"].NaNs
	}
	if i != 0 || nans != 0 || fewLeast != least || fewMost != most {
		t.Fatalf("few rows leave out %d reports and %d NaNs, and have %v to %v of %v to %v", i, nans, fewLeast, fewMost, least, most)
	}
}

// counting counts the rows that a query reads.
type counting struct {
	projections.Reader
	rows int
}

func (c *counting) Get(key []byte) ([]byte, error) {
	c.rows++
	return c.Reader.Get(key)
}

func (c *counting) Scan(lo, hi []byte, visit func(key, value []byte) error) error {
	return c.Reader.Scan(lo, hi, func(k, v []byte) error { c.rows++; return visit(k, v) })
}

// The cost of a query follows from the requested range.
func TestMetricsReadTheirRangeAlone(t *testing.T) {
	const iterations = 5_000
	main := events.Scope{Run: "demo", Trial: "main", Actor: events.Server}
	log := []events.Recorded{event(1, main, events.GroupStarted{Attempt: 1, WorldSize: 1})}
	for i := range iterations {
		log = append(log, event(uint64(i+2), events.Scope{Run: "demo", Trial: "main", Actor: events.Rank(0)},
			events.Metrics{Attempt: 1, Iteration: i + 1, Step: int64(i), Metrics: map[string]any{"loss": i % 100, "lr": "-Infinity"}}))
	}
	db := open(t, vfs.NewMem(), "views")
	defer shut(t, db)
	if err := db.CatchUp(t.Context(), newLog(log...)); err != nil {
		t.Fatal(err)
	}
	err := db.View(func(r projections.Reader) error {
		c := &counting{Reader: r}
		got := metrics(t, c, projections.MetricsRange{Run: "demo", Trial: "main", Names: []string{"loss"}, From: 2_001, Until: 2_100, Points: 10, All: true})
		if c.rows > 2*100+20 {
			t.Errorf("%d rows were read for 100 iterations of %d", c.rows, iterations)
		}
		if len(got.Rows) != 10 || got.Width != 10 || got.Iterations != iterations || fmt.Sprint(got.Names) != "[loss lr]" {
			t.Fatalf("%+v", got)
		}
		row := got.Rows[3]
		want := projections.Summary{Count: 10, Min: 30.0, Max: 39.0, Last: 39.0}
		if row.Iteration != 2_031 || row.UntilIteration != 2_040 || row.Step != 2_039 || row.Metrics["loss"] != want || len(row.Metrics) != 1 {
			t.Errorf("%+v", row)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
