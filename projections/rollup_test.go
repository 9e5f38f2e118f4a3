package projections

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
)

// drawMetrics returns the metrics of a report: numbers of very different sizes, numbers that
// are not finite, other values, or none.
func drawMetrics(t *rapid.T) map[string]any {
	metrics := map[string]any{}
	for _, name := range []string{"loss", "lr", "grad/norm", "ä<b>"} {
		switch rapid.IntRange(0, 19).Draw(t, name) {
		case 0:
		case 1:
			metrics[name] = "NaN"
		case 2:
			metrics[name] = "Infinity"
		case 3:
			metrics[name] = "-Infinity"
		case 4:
			metrics[name] = true
		case 5:
			metrics[name] = "warm-up"
		case 6:
			metrics[name] = 1e300
		case 7:
			metrics[name] = math.Copysign(0, -1)
		default:
			metrics[name] = rapid.Float64Range(-3, 3).Draw(t, "value")
		}
	}
	return metrics
}

// cheapMetrics returns some metrics that follow from a seed: a draw of each takes longer than
// its fold.
func cheapMetrics(seed uint64) map[string]any {
	seed = seed*0x9E3779B97F4A7C15 + 0x1234567
	odd := []any{"NaN", "Infinity", "-Infinity", true, "text", 1e300, -1e-300}
	metrics := map[string]any{"loss": float64(seed%100_003)/7 - 5000}
	if seed>>20%11 == 0 {
		metrics["loss"] = odd[seed>>30%uint64(len(odd))]
	}
	if seed>>24%5 != 0 {
		metrics["lr"] = float64(seed>>33) * 1e-9
	}
	if seed>>27%97 == 0 {
		metrics["rare"] = float64(seed >> 40)
	}
	return metrics
}

// reported returns the event of a report.
func reportedEvent(t fatal, seq uint64, attempt, iteration int, metrics map[string]any) events.Recorded {
	t.Helper()
	body, err := json.Marshal(events.Metrics{Attempt: attempt, Iteration: iteration, Step: int64(3*iteration - 7*(iteration%4)), Metrics: metrics, Seconds: float64(iteration) / 8})
	if err != nil {
		t.Fatal(err)
	}
	r := recorded(seq, events.Scope{Run: "demo", Trial: DefaultTrial, Actor: events.Rank(0)}, "report.metrics", string(body))
	r.Time = epoch // a time moves with its report
	return r
}

type fatal interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

// withoutSequences returns the rows without the sequences of reports.
func withoutSequences(t fatal, r Reader) map[string]string {
	t.Helper()
	rows := map[string]string{}
	err := r.Scan(nil, nil, func(k, value []byte) error {
		switch k[0] {
		case keyRollup:
			u, err := decodeRollup(k, value, nil)
			if err != nil {
				return err
			}
			if !bytes.Equal(u.encode(), value) {
				return errors.New("a rollup is not encoded as it was decoded")
			}
			u.sequence, u.since = 0, 0
			rows[string(k)] = string(u.encode())
		case keyReport:
			report, err := decodeReport(k, value)
			if err != nil {
				return err
			}
			report.Sequence = 0
			rows[string(k)] = fmt.Sprint(report)
		default:
			rows[string(k)] = string(value)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

// Reports in any order, with any of them missing, give the same rollups; and each is the
// summary of its reports.
func TestRollupsFollowFromTheSetOfReports(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.SampledFrom([]int{5, 15, 16, 17, 255, 256, 257, 530}).Draw(t, "reports")
		seed := rapid.Uint64().Draw(t, "seed")
		missing := map[int]bool{}
		for range rapid.IntRange(0, 3).Draw(t, "missing") {
			missing[rapid.IntRange(1, n).Draw(t, "gap")] = true
		}
		var order []int
		for i := 1; i <= n; i++ {
			if !missing[i] {
				order = append(order, i)
			}
		}
		metrics := func(i int) map[string]any { return cheapMetrics(seed + uint64(i)) }
		fold := func(order []int) *Memory {
			rows := NewMemory()
			for at, i := range order {
				if err := Apply(rows, reportedEvent(t, uint64(at+1), 1, i, metrics(i))); err != nil {
					t.Fatal(err)
				}
			}
			return rows
		}
		want := withoutSequences(t, fold(order))
		late := slices.Clone(order)
		switch rapid.IntRange(0, 2).Draw(t, "how late") {
		case 0: // a few are late
			for range rapid.IntRange(1, 5).Draw(t, "late") {
				i := rapid.IntRange(0, len(late)-1).Draw(t, "which")
				of := late[i]
				late = append(slices.Delete(late, i, i+1), of)
			}
		case 1:
			slices.Reverse(late)
		case 2:
			late = rapid.Permutation(late).Draw(t, "order")
		}
		rows := fold(late)
		if got := withoutSequences(t, rows); fmt.Sprint(got) != fmt.Sprint(want) {
			for k, v := range want {
				if got[k] != v {
					t.Errorf("row %q is %q, want %q", k, got[k], v)
				}
			}
			for k := range got {
				if _, ok := want[k]; !ok {
					t.Errorf("row %q is too many", k)
				}
			}
			t.FailNow()
		}
		checkRollups(t, rows, n, missing, metrics)
	})
}

// checkRollups compares each rollup with a summary of its reports.
func checkRollups(t *rapid.T, rows *Memory, n int, missing map[int]bool, metrics func(int) map[string]any) {
	found := map[[2]int]*rollup{}
	prefix := []byte{keyRollup}
	err := rows.Scan(prefix, after(prefix), func(k, value []byte) error {
		u, err := decodeRollup(k, value, nil)
		found[[2]int{int(k[len(k)-9]), u.first}] = u
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for level := 1; level <= 2; level++ {
		for first := 1; first+spanOf(level)-1 <= n; first += spanOf(level) {
			last := first + spanOf(level) - 1
			whole := true
			for i := first; i <= last; i++ {
				whole = whole && !missing[i]
			}
			u := found[[2]int{level, first}]
			delete(found, [2]int{level, first})
			if (u != nil) != whole {
				t.Fatalf("rollup of %d to %d: %v, its reports are all there: %v", first, last, u, whole)
			}
			if u == nil {
				continue
			}
			for _, of := range u.metrics {
				checkTally(t, of, first, last, metrics)
			}
		}
	}
	if len(found) > 0 {
		t.Fatalf("%d rollups too many", len(found))
	}
}

func checkTally(t *rapid.T, of *tally, first, last int, metrics func(int) map[string]any) {
	want := tally{name: of.name, min: math.Inf(1), max: math.Inf(-1)}
	for i := first; i <= last; i++ {
		value, has := metrics(i)[of.name]
		v, ok := asNumber(value)
		switch {
		case !has:
			continue
		case !ok:
			want.others++
			continue
		case math.IsNaN(v):
			want.nan++
		case math.IsInf(v, 1):
			want.inf++
		case math.IsInf(v, -1):
			want.neg++
		default:
			want.sum += v
			if v < want.min {
				want.min, want.atMin = v, i
			}
			if v > want.max {
				want.max, want.atMax = v, i
			}
		}
		want.numbers++
		want.value, want.atLast = v, i
	}
	if want.finite() == 0 {
		want.min, want.max = 0, 0
	}
	got := *of
	if !near(got.sum, want.sum) {
		t.Fatalf("sum of %s from %d to %d is %v, want %v", of.name, first, last, got.sum, want.sum)
	}
	got.sum, want.sum = 0, 0
	if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
		t.Fatalf("rollup of %d to %d is\n%+v, want\n%+v", first, last, got, want)
	}
}

func near(a, b float64) bool {
	return a == b || math.Abs(a-b) <= 1e-9*max(math.Abs(a), math.Abs(b), 1e6)
}

// A row in the trainer's form is read as JSON would be, and any other form as JSON.
func TestRawReportsAreReadAsJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := events.Metrics{Attempt: 1, Iteration: 3, Step: rapid.Int64().Draw(t, "step"), Metrics: drawMetrics(t), Seconds: rapid.Float64Range(0, 1e6).Draw(t, "seconds")}
		plain := b.Metrics["ä<b>"] == nil
		if rapid.Bool().Draw(t, "others") {
			b.Others = []events.RankMetrics{{Rank: 1, Metrics: map[string]any{"time_this_iter_s": 5, "]": `"}]`}}}
		}
		if rapid.Bool().Draw(t, "summary") {
			b.Summary = []events.MetricSummary{{Name: "loss", Ranks: 2, Min: -1e-9, Max: "Infinity"}}
		}
		if rapid.Bool().Draw(t, "slowest") {
			b.Slowest = &events.SlowestRank{Rank: 1, Late: 25e-6}
		}
		body, err := json.Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		row := fmt.Appendf(nil, `{"sequence":%d,"time":"2026-01-01T00:00:00.5Z","report":%s}`, rapid.Uint64().Draw(t, "sequence"), body)
		var fast, slow rawReport
		if got := fast.plain(row); got != plain {
			t.Fatalf("%s is plain: %v", row, got)
		}
		if err := fast.read(row); err != nil {
			t.Fatal(err)
		}
		if err := slow.read(append(row, ' ')); err != nil { // a space is not plain
			t.Fatal(err)
		}
		if fmt.Sprintf("%+v", fast) != fmt.Sprintf("%+v", slow) {
			t.Fatalf("%s is read as\n%+v, want\n%+v", row, fast, slow)
		}
	})
	for _, odd := range []string{
		`{"sequence":1,"time":"2026-01-01T00:00:00Z","report":{"attempt":1,"iteration":1,"step":1,"metrics":{"a":1,"a":2},"time_this_iter_s":1}}`,
		`{"sequence":1,"time":"2026-01-01T00:00:00Z","report":{"attempt":1,"iteration":1,"step":1,"metrics":{"\u0061":1},"time_this_iter_s":1}}`,
		`{"sequence":1,"time":"2026-01-01T00:00:00Z","report":{"attempt":1,"iteration":1,"step":1,"metrics":{"a":1},"step":2}}`,
		`{"sequence":1,"time":"2026-01-01T00:00:00Z","report":{"metrics":{"a":[1]}}}`,
	} {
		var r rawReport
		if r.plain([]byte(odd)) {
			t.Errorf("%s is plain", odd)
		}
		if err := r.read([]byte(odd)); err != nil || len(r.values) != 1 || string(r.values[0].name) != "a" {
			t.Errorf("%s is read as %+v, %v", odd, r, err)
		}
	}
}

// A damaged rollup is an error that names its row.
func TestDamagedRollup(t *testing.T) {
	rows := NewMemory()
	for i := 1; i <= fan; i++ {
		if err := Apply(rows, reportedEvent(t, uint64(i), 1, i, map[string]any{"loss": i, "lr": "NaN"})); err != nil {
			t.Fatal(err)
		}
	}
	k := rollupKey("demo", DefaultTrial, 1, 1, 0)
	value, err := rows.Get(k)
	if err != nil || value == nil {
		t.Fatalf("no rollup: %v", err)
	}
	for n := range value {
		if _, err := decodeRollup(k, value[:n], nil); !errors.Is(err, errRollup) {
			t.Fatalf("the first %d bytes of %d are accepted: %v", n, len(value), err)
		}
	}
	if _, err := decodeRollup(k, append(value, 0), nil); !errors.Is(err, errRollup) {
		t.Errorf("a byte too many is accepted: %v", err)
	}
}

// The iteration of a checkpoint is that of the newest report at or before its step, however
// many reports are for later steps.
func TestIterationAt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.SampledFrom([]int{0, 7, 16, 33, 300, 600}).Draw(t, "reports")
		gap := rapid.IntRange(0, n).Draw(t, "gap")
		low := map[int]bool{}
		for range rapid.IntRange(0, 3).Draw(t, "low steps") {
			low[rapid.IntRange(0, n).Draw(t, "low")] = true
		}
		rows := NewMemory()
		step := func(i int) int64 {
			if low[i] {
				return int64(i % 10)
			}
			return int64(1000 + i)
		}
		for i := 1; i <= n; i++ {
			if i == gap {
				continue
			}
			body := fmt.Sprintf(`{"attempt":1,"iteration":%d,"step":%d,"metrics":{"loss":1},"time_this_iter_s":1}`, i, step(i))
			if err := Apply(rows, recorded(uint64(i), events.Scope{Run: "demo", Trial: DefaultTrial, Actor: events.Rank(0)}, "report.metrics", body)); err != nil {
				t.Fatal(err)
			}
		}
		c := Checkpoint{Run: "demo", Trial: DefaultTrial, Attempt: 1, Step: rapid.SampledFrom([]int64{-1, 5, 999, 1016, 1300, 5000}).Draw(t, "step")}
		from := rapid.IntRange(0, n).Draw(t, "from")
		want := from
		for i := from + 1; i <= n; i++ {
			if i != gap && step(i) <= c.Step {
				want = i
			}
		}
		r := &counting{Reader: rows}
		got, err := iterationAt(r, c, from)
		if err != nil || got != want {
			t.Fatalf("iteration %d, %v, want %d", got, err, want)
		}
		if r.rows > 5*fan+2*len(low)*2*fan {
			t.Fatalf("%d of %d reports were read", r.rows, n)
		}
	})
}
