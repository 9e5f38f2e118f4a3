package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// TestTimeline: the columns have the counts of the events, whatever their width, as of the end or
// an earlier event, and although an answer reads only a part of the log.
func TestTimeline(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	h.train("bert", 40)
	var facts []events.Fact
	for i := range 333 {
		f, err := events.NewFact(events.Stamp{ID: fmt.Sprintf("m-%d", i), Source: "test", Time: time.Now()}, events.Scope{Run: "r", Trial: "main", Actor: events.Node(0)},
			&events.Metrics{Attempt: 1, Iteration: i + 1, Step: int64(i), Metrics: map[string]any{"loss": 1.0}})
		if err != nil {
			t.Fatal(err)
		}
		facts = append(facts, f)
	}
	if _, err := h.st.Log.Append(t.Context(), facts...); err != nil {
		t.Fatal(err)
	}
	h.train("gpt", 3)
	var families []string // by sequence, from 1
	for r, err := range h.st.Log.Read(t.Context(), 1, 0) {
		if err != nil {
			t.Fatal(err)
		}
		if families = append(families, r.Kind.Family()); len(families) != int(r.Sequence) {
			t.Fatalf("event %d after %d", r.Sequence, len(families)-1)
		}
		if last, err := h.st.Log.Last(t.Context()); err != nil {
			t.Fatal(err)
		} else if r.Sequence == last {
			break
		}
	}
	handler := New(h.st, Options{Users: people})
	t.Cleanup(handler.Close)
	handler.census.most = 3
	get := func(query string) (got Timeline, head http.Header) {
		t.Helper()
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost"+Prefix+"/timeline?"+query, nil)
		r.Header.Set("Authorization", "Bearer "+readToken1)
		handler.ServeHTTP(w, r)
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || w.Code != http.StatusOK {
			t.Fatalf("%s: %d %s", query, w.Code, w.Body)
		}
		return got, w.Header()
	}
	check := func(query string, got Timeline) {
		t.Helper()
		want := map[string][]int{}
		columns := int((got.Sequence - got.From + got.Width) / got.Width)
		for seq := got.From; seq <= got.Sequence; seq++ {
			family := families[seq-1]
			if want[family] == nil {
				want[family] = make([]int, columns)
			}
			want[family][(seq-got.From)/got.Width]++
		}
		if !maps.EqualFunc(got.Families, want, func(a, b []int) bool { return fmt.Sprint(a) == fmt.Sprint(b) }) {
			t.Errorf("%s: from %d, width %d: %v, want %v", query, got.From, got.Width, got.Families, want)
		}
	}
	last := len(families)
	// The first answers have the end of the log only.
	rounds := 0
	for from := uint64(last); from > 1; rounds++ {
		got, _ := get("columns=1000")
		if check("columns=1000", got); got.From >= from || got.Width != 100 || got.Sequence != uint64(last) {
			t.Fatalf("an answer from %d, width %d, after one from %d", got.From, got.Width, from)
		}
		from = got.From
	}
	if want := (last/blockEvents + 2) / 3; rounds != want {
		t.Errorf("%d answers for %d events, want %d", rounds, last, want)
	}
	for _, c := range []struct {
		query string
		width uint64
	}{{"", 100}, {"columns=6", 200}, {"columns=3", 400}, {"columns=1", 1600}, {"as_of=850&columns=5", 200}, {"as_of=99", 100}, {"as_of=100", 100}, {"as_of=1", 100}} {
		got, head := get(c.query)
		if check(c.query, got); got.From != 1 || got.Width != c.width || (head.Get("Cache-Control") == forever) != (len(c.query) > 5 && c.query[:5] == "as_of") {
			t.Errorf("%s: from %d, width %d; %v", c.query, got.From, got.Width, head)
		}
	}
	h.refusedAs("the future", h.call("GET", Prefix+"/timeline?as_of=99999", readToken1, ""), 404, "the log ends at")
	h.refusedAs("no columns", h.call("GET", Prefix+"/timeline?columns=0", readToken1, ""), 400, "columns")
}
