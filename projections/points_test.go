package projections

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
)

// drawLine folds a trial of some attempts, each of which resumes from a checkpoint of the one
// before it, with some reports missing or late. It returns the rows and the next sequence.
func drawLine(t *rapid.T) *Memory {
	rows, seq := NewMemory(), uint64(0)
	lane := events.Scope{Run: "demo", Trial: DefaultTrial, Actor: events.Server}
	decide := func(kind events.Kind, body string, args ...any) {
		seq++
		if err := Apply(rows, recorded(seq, lane, kind, fmt.Sprintf(body, args...))); err != nil {
			t.Fatal(err)
		}
	}
	seed, resume := rapid.Uint64().Draw(t, "seed"), ""
	for attempt := 1; attempt <= rapid.IntRange(1, 4).Draw(t, "attempts"); attempt++ {
		decide("group.started", `{"attempt":%d,"world_size":1,"resume":%q}`, attempt, resume)
		n := rapid.SampledFrom([]int{0, 3, 16, 40, 300, 700}).Draw(t, "reports")
		save := rapid.IntRange(0, n).Draw(t, "save")
		gap := rapid.SampledFrom([]int{0, 0, 0, n / 3}).Draw(t, "gap")
		late := rapid.SampledFrom([]int{0, 0, n / 2}).Draw(t, "late")
		report := func(i int) {
			seq++
			if err := Apply(rows, reportedEvent(t, seq, attempt, i, cheapMetrics(seed+uint64(1000*attempt+i)))); err != nil {
				t.Fatal(err)
			}
		}
		for i := 1; i <= n; i++ {
			if i != gap && i != late {
				report(i)
			}
			if i == save {
				resume = fmt.Sprintf("s.a%d", attempt)
				decide("checkpoint.begun", `{"attempt":%d,"checkpoint":%q,"name":"s","step":%d,"world_size":1}`, attempt, resume, 3*i-7*(i%4))
				decide("checkpoint.committed", `{"attempt":%d,"checkpoint":%q,"manifest":"m"}`, attempt, resume)
			}
		}
		if late > 0 {
			report(late)
		}
	}
	return rows
}

// Every number of the line is in exactly one point, at every zoom: the points have its
// spikes, its NaNs and its extremes, and there are not more of them than were asked for.
func TestPointsKeepEveryNumber(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rows := drawLine(t)
		reports, err := Reports(rows, "demo", DefaultTrial)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			q := PointsRange{Run: "demo", Trial: DefaultTrial, Points: rapid.SampledFrom([]int{1, 2, 3, 7, 50, 400, 5000}).Draw(t, "points")}
			q.From = rapid.SampledFrom([]int{0, 1, 17, 33, 200}).Draw(t, "from")
			if length := rapid.SampledFrom([]int{0, 1, 15, 31, 257, 600}).Draw(t, "length"); length > 0 {
				q.Until = max(q.From, 1) + length - 1
			}
			if rapid.Bool().Draw(t, "one metric") {
				q.Names = []string{"lr"}
			}
			got, err := Points(rows, q)
			if err != nil {
				t.Fatal(err)
			}
			if len(got.Lines) != 1 || got.Lines[0].Hidden {
				t.Fatalf("lines %+v", got.Lines)
			}
			checkPoints(t, q, got.Lines[0], reports)
		}
	})
}

// checkPoints compares the points of a line with its reports.
func checkPoints(t *rapid.T, q PointsRange, line PointsLine, reports []Report) {
	type value struct {
		x    int
		step int64
		v    float64
	}
	want := map[string][]value{}
	for _, r := range reports {
		if r.LineIteration < q.From || q.Until != 0 && r.LineIteration > q.Until {
			continue
		}
		for name, metric := range r.Metrics {
			if v, ok := asNumber(metric); ok && (len(q.Names) == 0 || slices.Contains(q.Names, name)) {
				want[name] = append(want[name], value{r.LineIteration, r.Step, v})
			}
		}
	}
	if len(line.Metrics) != len(want) {
		t.Fatalf("%d metrics, want %d", len(line.Metrics), len(want))
	}
	for name, values := range want {
		c := line.Metrics[name]
		if c == nil || len(c.X) > q.Points || !slices.IsSorted(c.X) {
			t.Fatalf("%s: %d points were asked for, points %+v", name, q.Points, c)
		}
		before := 0
		for i, x := range c.X {
			ends := func(r Report) bool {
				return r.LineIteration == c.Until[i] && r.Step == c.Step[i] && r.Attempt == c.Attempt[i]
			}
			if c.Until[i] < x || i+1 < len(c.X) && c.Until[i] >= c.X[i+1] || !slices.ContainsFunc(reports, ends) {
				t.Fatalf("%s: no report of the line ends point %d: iteration %d, step %d, attempt %d", name, i, c.Until[i], c.Step[i], c.Attempt[i])
			}
			var sum, finite float64
			least, most, atLeast, atMost := math.Inf(1), math.Inf(-1), 0, 0
			count, odd, last := 0, 0, value{}
			for _, v := range values {
				if v.x <= before || v.x > x {
					continue
				}
				count, last = count+1, v
				if math.IsNaN(v.v) || math.IsInf(v.v, 0) {
					odd++
					continue
				}
				if finite++; v.v < least {
					least, atLeast = v.v, v.x
				}
				if v.v > most {
					most, atMost = v.v, v.x
				}
				sum += v.v
			}
			bad := c.Count[i] != count || c.NonFinite[i] != odd || last.x != x || !same(c.Last[i], last.v) || c.AtMin[i] != atLeast || c.AtMax[i] != atMost
			if finite > 0 {
				bad = bad || !same(c.Min[i], least) || !same(c.Max[i], most) || c.Mean[i] == nil && !math.IsInf(sum, 0) || c.Mean[i] != nil && !near(*c.Mean[i]*finite, sum)
			} else {
				bad = bad || c.Min[i] != nil || c.Max[i] != nil || c.Mean[i] != nil
			}
			if bad {
				t.Fatalf("%s: point %d, until %d: count %d, want %d; not finite %d, want %d; last at %d; %v to %v at %d and %d, want %v to %v at %d and %d",
					name, i, x, c.Count[i], count, c.NonFinite[i], odd, last.x, c.Min[i], c.Max[i], c.AtMin[i], c.AtMax[i], least, most, atLeast, atMost)
			}
			before = x
		}
		if last := values[len(values)-1].x; before != last {
			t.Fatalf("%s: the points end at %d, the reports at %d", name, before, last)
		}
	}
}

func same(got *float64, want float64) bool {
	if got == nil {
		return math.IsNaN(want) || math.IsInf(want, 0)
	}
	return *got == want
}

// The reports that resumes have hidden stay in lines of their own, and those of one attempt
// can be asked for alone.
func TestPointsOfHiddenReports(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rows := drawLine(t)
		stored := map[int]int{}
		prefix := []byte{keyReport}
		err := rows.Scan(prefix, after(prefix), func(k, value []byte) error {
			report, err := decodeReport(k, value)
			if _, ok := asNumber(report.Metrics["loss"]); ok {
				stored[report.Attempt]++
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		points := rapid.IntRange(1, 60).Draw(t, "points")
		count := func(q PointsRange) (n int) {
			q.Run, q.Trial, q.Points, q.Names = "demo", DefaultTrial, points, []string{"loss"}
			got, err := Points(rows, q)
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range got.Lines {
				if c := line.Metrics["loss"]; c != nil {
					for _, reports := range c.Count {
						n += reports
					}
				}
			}
			return n
		}
		all := 0
		for attempt, want := range stored {
			all += want
			if got := count(PointsRange{Attempt: attempt}); got != want {
				t.Fatalf("attempt %d has %d numbers in its points, %d are stored", attempt, got, want)
			}
		}
		if got := count(PointsRange{All: true}); got != all {
			t.Fatalf("%d numbers are in points, %d are stored", got, all)
		}
	})
}

// counting counts the rows that a query reads.
type counting struct {
	Reader
	rows int
}

func (c *counting) Scan(lo, hi []byte, visit func(key, value []byte) error) error {
	return c.Reader.Scan(lo, hi, func(k, v []byte) error { c.rows++; return visit(k, v) })
}

// The number of rows that points take does not follow from the number of reports.
func TestPointsReadFewRows(t *testing.T) {
	const iterations = 40_000
	rows := NewMemory()
	if err := Apply(rows, recorded(1, events.Scope{Run: "demo", Trial: DefaultTrial, Actor: events.Server}, "group.started", `{"attempt":1,"world_size":1}`)); err != nil {
		t.Fatal(err)
	}
	for i := range iterations {
		loss := any(1.5)
		switch i + 1 {
		case 17_777:
			loss = 1e6
		case 23_456:
			loss = "NaN"
		}
		if err := Apply(rows, reportedEvent(t, uint64(i+2), 1, i+1, map[string]any{"loss": loss})); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ from, until, points, most int }{
		{0, 0, 100, 900}, {0, 0, 10, 100}, {1000, 9000, 100, 900}, {17_000, 17_999, 1000, 1100}, {39_000, 0, 10, 120},
	} {
		r := &counting{Reader: rows}
		got, err := Points(r, PointsRange{Run: "demo", Trial: DefaultTrial, From: c.from, Until: c.until, Points: c.points})
		if err != nil {
			t.Fatal(err)
		}
		columns := got.Lines[0].Metrics["loss"]
		if r.rows > c.most || len(columns.X) > c.points || len(columns.X) < min(c.points, 100)/2 {
			t.Errorf("%+v: %d rows were read for %d points", c, r.rows, len(columns.X))
		}
		spike, odd := slices.Index(columns.AtMax, 17_777), slices.IndexFunc(columns.NonFinite, func(n int) bool { return n > 0 })
		sees := func(i int) bool { return max(c.from, 1) <= i && (c.until == 0 || i <= c.until) }
		if (spike >= 0) != sees(17_777) || (odd >= 0) != sees(23_456) || spike >= 0 && *columns.Max[spike] != 1e6 {
			t.Errorf("%+v: the spike is in point %d, the NaN in %d", c, spike, odd)
		}
	}
	for _, q := range []PointsRange{{Points: 0}, {Points: 1, From: -1}, {Points: 1, From: 9, Until: 8}} {
		q.Run, q.Trial = "demo", DefaultTrial
		if _, err := Points(rows, q); err == nil {
			t.Errorf("%+v is answered", q)
		}
	}
}
