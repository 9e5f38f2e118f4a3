package events

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The short path accepts this package's own output if all values are scalars; otherwise
// it would be useless.
func TestPlainMetricsAreTaken(t *testing.T) {
	for _, tc := range []struct {
		metrics map[string]any
		want    bool
	}{
		{map[string]any{}, true},
		{map[string]any{"loss": 0.25, "lr": 1e-7, "grad_norm": 1e21, "n": int64(math.MaxInt32), "val/acc@1": -3.5, "note": "warm up (1)"}, true},
		{nil, false},
		{map[string]any{"loss": 1e-300}, false},
		{map[string]any{"done": true, "more": false, "best": nil}, true},
		{map[string]any{"best": []int{1}}, false},
		{map[string]any{"note": "caf\u00e9"}, false},
	} {
		fact, err := NewFact(Stamp{ID: "a", Source: "s", Time: time.Unix(0, 1)}, Scope{Run: "r", Trial: "t", Actor: Rank(0)},
			&Metrics{
				Attempt: 1, Iteration: -2, Step: 1 << 40, Metrics: tc.metrics, Seconds: 0.5,
				Others:  []RankMetrics{{Rank: 1, Metrics: map[string]any{}}, {Rank: 2, Metrics: map[string]any{"loss": 1}}},
				Slowest: &SlowestRank{Rank: 2, Late: 25e-6},
			})
		if err != nil {
			t.Fatal(err)
		}
		if got := plainMetrics(fact.Data); got != tc.want {
			t.Errorf("%s: %v, want %v", fact.Data, got, tc.want)
		}
		if err := fact.CheckBody(); err != nil {
			t.Errorf("%s: %v", fact.Data, err)
		}
	}
}

// Everything that the short path accepts is also accepted by encoding/json, and so by
// readers of the log.
func TestPlainMetricsAreMetrics(t *testing.T) {
	parts := rapid.SampledFrom([]string{
		"0", "1", "-", "7", "99", "e", "E", "+", ".", "5", "00", "-0", "1e99", "1e400", "123456789012345678", "9223372036854775808",
		`"`, `\`, "\n", "\x00", "\u00e9", "a", "loss", " ", "{", "}", "[", "]", ":", ",", "null", "true", `"loss":`, `"others":[]`,
		strings.Repeat("9", 41), `"time_this_iter_s":`,
	})
	rapid.Check(t, func(t *rapid.T) {
		text := `{"attempt":1,"iteration":20,"step":-300,"metrics":{"loss":0.5,"lr":1e-5,"k":"v"},"others":[{"rank":3,"metrics":{"a":true}},{"rank":4,"metrics":{}}],"time_this_iter_s":2.5}`
		for range rapid.IntRange(0, 3).Draw(t, "changes") {
			at := rapid.IntRange(0, len(text)).Draw(t, "at")
			to := min(len(text), at+rapid.IntRange(0, 3).Draw(t, "cut"))
			text = text[:at] + parts.Draw(t, "part") + text[to:]
		}
		err := json.Unmarshal([]byte(text), new(Metrics))
		if plainMetrics([]byte(text)) && err != nil {
			t.Fatalf("%q is taken: %v", text, err)
		}
		e := Event{ID: "a", Kind: (Metrics{}).Kind(), Version: 1, Data: []byte(text)}
		if got := e.CheckBody(); (got == nil) != (err == nil) {
			t.Fatalf("%q: %v, want %v", text, got, err)
		}
	})
}
