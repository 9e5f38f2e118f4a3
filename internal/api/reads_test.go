package api

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/views"
	"github.com/ckptstore/ckptstore/projections"
)

// TestReads: every GET of the document answers, and the answers fit each other.
func TestReads(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{Version: "test"})
	h.train("bert", 3)
	h.train("gpt", 2)

	var about Store
	r := h.get("/store", &about)
	if about.Store != h.st.ID || about.Role != "reader" || about.User != "rosa" || about.ReadOnly || fmt.Sprint(about.Sequence) != r.head.Get("Ckpt-Sequence") {
		t.Errorf("the store: %+v, %v", about, r.head)
	}
	var runs RunList
	h.get("/runs", &runs)
	if len(runs.Runs) != 2 || runs.Next != "" {
		t.Fatalf("runs: %+v", runs)
	}
	one := runs.Runs[0]
	if one.Run != "bert" || one.State != insight.Ended || *one.Step != 30 || one.Iterations != 30 || one.Safe.Checkpoint != "step-30.a1" || one.Metrics["digest"] != "abc" {
		t.Errorf("run bert: %+v", one)
	}
	var detail RunDetail
	if r = h.get("/runs/bert", &detail); detail.Config["lr"] != 0.1 || r.head.Get("Ckpt-Lane-Sequence") != fmt.Sprint(detail.LaneSeq) {
		t.Errorf("run: %+v, %v", detail, r.head)
	}
	for path, member := range map[string]string{
		"/runs/bert/trials": "trials", "/runs/bert/attempts": "attempts", "/runs/bert/jobs": "jobs", "/runs/bert/nodes": "nodes",
		"/runs/bert/workers": "workers", "/runs/bert/restores": "restores", "/at-risk": "at_risk",
	} {
		var got map[string]any
		h.get(path, &got)
		if list, ok := got[member].([]any); !ok {
			t.Errorf("%s has no list %s: %v", path, member, got)
		} else if empty := member == "workers" || member == "restores" || member == "at_risk" || member == "nodes"; len(list) == 0 && !empty {
			t.Errorf("%s is empty", path)
		}
	}
	var page CheckpointPage
	h.get("/runs/bert/checkpoints", &page)
	var ids []string
	for _, c := range page.Checkpoints {
		ids = append(ids, c.ID)
	}
	if !slices.Equal(ids, []string{"step-30.a1", "step-20.a1", "step-10.a1"}) {
		t.Errorf("checkpoints: %v", ids)
	}
	var c CheckpointDetail
	h.get("/runs/bert/checkpoints/step-20", &c)
	if c.Checkpoint.ID != "step-20.a1" || c.Problem == "" || !strings.HasSuffix(c.Path, "data/bert/main/step-20.a1") {
		t.Errorf("checkpoint without files: %+v", c)
	}
	var save Save
	h.get("/runs/bert/checkpoints/latest/save", &save)
	if len(save.Writes) != 1 || save.Writes[0].BytesWritten != 100 {
		t.Errorf("save: %+v", save)
	}
	var files SavedFiles
	h.get("/runs/bert/checkpoints/latest/files", &files)
	if len(files.Files) != 1 || files.Files[0].Size != 100 {
		t.Errorf("files: %+v", files)
	}
	var found Resolved
	if h.get("/resolve?ref=bert@best:loss:min", &found); found.Checkpoint.ID != "step-30.a1" {
		t.Errorf("resolved: %+v", found)
	}
	var diff insight.Diff
	if h.get("/diff?a=bert&b=gpt", &diff); diff.Of != "trials" || len(diff.Metrics) != 2 {
		t.Errorf("diff: %+v", diff)
	}
	h.record("fork", "main", &events.TrialCreated{Parent: &events.TrialParent{Run: "bert", Trial: "main", Checkpoint: "step-20.a1"}})
	var lineage insight.Lineage
	if h.get("/runs/bert/lineage", &lineage); len(lineage.Trials) != 2 || lineage.Trials[0].Run != "bert" || lineage.Trials[1].Parent != "bert@step-20.a1" {
		t.Errorf("lineage: %+v", lineage)
	}
	h.refusedAs("lineage of a trial that is not there", h.call("GET", Prefix+"/runs/bert/lineage?trial=x", readToken1, ""), 404, "x")
	h.get("/store", &about)
	var health Health
	if h.get("/health", &health); health.Disk == nil || health.Disk.Free == 0 || health.Disk.Size < health.Disk.Free || len(health.Cursors) != 0 {
		t.Errorf("health: %+v", health)
	}
	_, sub, err := h.st.Subscribe(t.Context(), "alerts")
	if err != nil {
		t.Fatal(err)
	}
	sub.Handled(3)
	if err := sub.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if h.get("/health", &health); len(health.Cursors) != 1 || health.Cursors[0].Name != "alerts" || health.Cursors[0].Sequence != 3 || health.Cursors[0].Lag != about.Sequence-3 {
		t.Errorf("health with a cursor: %+v", health)
	}
	var e map[string]any
	if h.get("/events/1", &e); e["type"] != "ckpt.store.created.v1" || e["specversion"] != "1.0" {
		t.Errorf("event 1: %v", e)
	}

	h.refusedAs("a run that is not there", h.call("GET", Prefix+"/runs/brt", readToken1, ""), 404, `did you mean "bert"`)
	h.refusedAs("a checkpoint that is not there", h.call("GET", Prefix+"/runs/bert/checkpoints/step-99", readToken1, ""), 404, "step-99")
	h.refusedAs("no tensors", h.call("GET", Prefix+"/runs/bert/checkpoints/latest/tensors", readToken1, ""), 500)
	h.refusedAs("too many rows", h.call("GET", Prefix+"/runs?limit=1001", readToken1, ""), 400, "limit")
	h.refusedAs("a bad number", h.call("GET", Prefix+"/runs?as_of=x", readToken1, ""), 400, "as_of")
	h.refusedAs("the future", h.call("GET", Prefix+"/runs?as_of=999999", readToken1, ""), 404, "the log ends at")
	h.refusedAs("no ranks", h.call("GET", Prefix+"/runs/bert/checkpoints/latest/reshard", readToken1, ""), 400, "ranks")
	h.refusedAs("a bad page", h.call("GET", Prefix+"/runs?page=zzz", readToken1, ""), 400, "next")
	h.refusedAs("a page that is not there", h.call("GET", Prefix+"/runs?page=eyJzIjox", readToken1, ""), 404, "first page")
	h.refusedAs("a bad type", h.call("GET", Prefix+"/events?type=*.x.y", readToken1, ""), 404, "type")
}

// TestHostileNames: names are data, whatever is in them.
func TestHostileNames(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	names := []string{"<img src=x onerror=alert(1)>", "a/b", "a%2Fb", "..", ".", "a:stop", "a b?c#d", "\u202efdp.exe", strings.Repeat("n", 80), "ключ", `"'\`}
	for _, name := range names {
		h.train(name, 1)
	}
	for _, name := range names {
		at := "/runs/" + url.PathEscape(name)
		if name == "." || name == ".." { // a client must escape the dots, or its library removes the segment
			at = "/runs/" + strings.ReplaceAll(name, ".", "%2E")
		}
		var d RunDetail
		h.get(at, &d)
		if d.Run != name {
			t.Errorf("%q is answered as %q", name, d.Run)
		}
		var c CheckpointDetail
		if h.get(at+"/checkpoints/step-10.a1", &c); c.Checkpoint.Run != name {
			t.Errorf("the checkpoint of %q is of %q", name, c.Checkpoint.Run)
		}
		var page EventPage
		if h.get("/events?run="+url.QueryEscape(name)+"&type=checkpoint.committed", &page); len(page.Events) != 1 {
			t.Errorf("events of %q: %d", name, len(page.Events))
		}
	}
	r := h.call("PUT", Prefix+"/runs/"+url.PathEscape(names[0])+"/checkpoints/step-10.a1/tags/"+url.PathEscape("<b>"), writeToken, "")
	if r.status != http.StatusOK || strings.Contains(r.body, "<b>") || !strings.Contains(r.body, `\u003cb\u003e`) {
		t.Errorf("a tag in markup: %d %s", r.status, r.body)
	}
	long := strings.Repeat("x", 10<<10)
	h.refusedAs("a name of 10 KB", h.call("GET", Prefix+"/runs/"+long, readToken1, ""), 404)
	h.refusedAs("a reference of 10 KB", h.call("GET", Prefix+"/resolve?ref="+long, readToken1, ""), 404)
	h.refusedAs("a fork of 10 KB", h.call("POST", Prefix+"/runs/a%2Fb:fork", writeToken, `{"name":"`+long+`"}`), 400, "name")
	if r := h.call("POST", Prefix+"/runs/a:stop:stop", writeToken, ""); r.status != http.StatusConflict {
		t.Errorf("stop of run a:stop, which has no live job: %d %s", r.status, r.body)
	}
}

// TestPagesOfRuns: a client that asks for everything gets pages, which fit each other although the
// log grows.
func TestPagesOfRuns(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	const many = 1000
	for i := range many {
		h.record(fmt.Sprintf("run-%04d", i), "main", &events.TrialCreated{})
	}
	h.train("z", 7)
	var names []string
	for next := ""; ; {
		var page RunList
		r := h.get("/runs?limit=300&page="+next, &page)
		if len(r.body) > 300*2000 {
			t.Errorf("a page of %d bytes", len(r.body))
		}
		for _, one := range page.Runs {
			names = append(names, one.Run)
		}
		if next = page.Next; next == "" {
			break
		}
		h.record("y-"+page.Runs[0].Run, "main", &events.TrialCreated{}) // a later run does not appear
	}
	if len(names) != many+1 || !slices.IsSorted(names) || names[0] != "run-0000" || names[many] != "z" {
		t.Errorf("%d runs from %s to %s", len(names), names[0], names[len(names)-1])
	}
	var first RunList
	if h.get("/runs", &first); len(first.Runs) != 100 || first.Next == "" {
		t.Errorf("without a limit: %d runs", len(first.Runs))
	}
	var ids []string
	for next := ""; ; {
		var page CheckpointPage
		h.get("/runs/z/checkpoints?limit=3&page="+next, &page)
		for _, c := range page.Checkpoints {
			ids = append(ids, c.ID)
		}
		if next = page.Next; next == "" {
			break
		}
	}
	if len(ids) != 7 || ids[0] != "step-70.a1" || ids[6] != "step-10.a1" {
		t.Errorf("checkpoints in pages: %v", ids)
	}
	var backward, forward []uint64
	collect := func(path string, to *[]uint64) {
		for next := ""; ; {
			var page EventPage
			h.get(path+"&page="+next, &page)
			for _, e := range page.Events {
				*to = append(*to, e.Sequence)
			}
			if next = page.Next; next == "" {
				return
			}
		}
	}
	collect("/events?limit=7&run=z", &backward)
	collect("/events?limit=7&run=z&first=true", &forward)
	slices.Reverse(backward)
	if len(forward) != 3+7*13+3 || !slices.Equal(forward, backward) {
		t.Errorf("%d events forward and %d backward", len(forward), len(backward))
	}
	var page EventPage
	h.get(fmt.Sprintf("/events?limit=5&before=%d", forward[9]), &page)
	if len(page.Events) != 5 || page.Events[0].Sequence != forward[9]-1 || page.Events[4].Sequence != forward[9]-5 {
		t.Errorf("before %d: %+v", forward[9], page.Events)
	}
	var between []uint64
	collect(fmt.Sprintf("/events?limit=2&after=%d&before=%d&first=true", forward[9], forward[15]), &between)
	if !slices.Equal(between, forward[10:15]) {
		t.Errorf("events between two: %v, want %v", between, forward[10:15])
	}
}

// TestListPages: the pages of a run's lists are the lists, and a token is good for its list only.
func TestListPages(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	const many = 7
	var ranks []events.RankPlacement
	for rank := range many {
		ranks = append(ranks, events.RankPlacement{Rank: rank, LocalRank: rank})
	}
	for i := 1; i <= many; i++ {
		job := fmt.Sprintf("job-%d", i)
		h.record("bert", "main", &events.JobStarted{Job: job, Host: "here", PID: 1, NProc: 1, NNodes: 1},
			&events.GroupStarted{Attempt: i, Job: job, WorldSize: many, Ranks: ranks})
		h.record("bert", fmt.Sprintf("trial-%d", i), &events.TrialCreated{})
	}
	for load := 1; load <= many; load++ {
		h.record("bert", "main", &events.RestoreBegun{Attempt: many, Load: load, WorldSize: many})
	}
	tokens := map[string]string{}
	for _, list := range []struct {
		path, rows, key string
		want            int
	}{
		{"/runs/bert/jobs?", "jobs", "job", many},
		{"/runs/bert/trials?", "trials", "name", many + 1},
		{"/runs/bert/attempts?trial=main&", "attempts", "attempt", many},
		{"/runs/bert/workers?trial=main&", "workers", "rank", many},
		{"/runs/bert/restores?trial=main&", "restores", "load", many},
	} {
		keys := func(limit int) (keys []string, whole bool) {
			for next := ""; ; {
				var page map[string]any
				h.get(fmt.Sprintf("%slimit=%d&page=%s", list.path, limit, next), &page)
				rows, _ := page[list.rows].([]any)
				if len(rows) > limit {
					t.Errorf("%s: %d rows in a page of %d", list.rows, len(rows), limit)
				}
				for _, row := range rows {
					keys = append(keys, fmt.Sprint(row.(map[string]any)[list.key]))
				}
				if next, _ = page["next"].(string); next == "" {
					return keys, len(rows) == len(keys)
				}
				tokens[list.rows] = next
			}
		}
		all, whole := keys(1000)
		if len(all) != list.want || !whole {
			t.Errorf("%s: %v, want %d in one page", list.rows, all, list.want)
		}
		for limit := 1; limit <= many+1; limit++ {
			if got, _ := keys(limit); !slices.Equal(got, all) {
				t.Errorf("%s in pages of %d: %v, want %v", list.rows, limit, got, all)
			}
		}
	}
	for _, path := range []string{"/jobs?page=", "/attempts?trial=main&page=", "/workers?trial=main&page=", "/restores?trial=main&page="} {
		h.refusedAs("a token of another list", h.call("GET", Prefix+"/runs/bert"+path+tokens["trials"], readToken1, ""), 404, "first page")
	}
	h.refusedAs("no limit", h.call("GET", Prefix+"/runs/bert/jobs?limit=0", readToken1, ""), 400, "limit")
	var one RunDetail
	if h.get("/runs/bert", &one); one.Job == nil || one.Job.Job != fmt.Sprintf("job-%d", many) || one.Job.Attempts != 1 || one.Trials != many+1 {
		t.Errorf("the run: %+v", one.RunSummary)
	}
}

// TestAsOf: an answer as of a sequence never changes, can be kept, and is that of the log up to
// it; other answers have an ETag.
func TestAsOf(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	h.train("bert", 3)
	last, err := h.st.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	before := h.call("GET", fmt.Sprintf("%s/runs/bert/checkpoints?all=true&as_of=%d", Prefix, last), readToken1, "")
	mid := h.call("GET", fmt.Sprintf("%s/runs/bert/checkpoints?as_of=%d", Prefix, last-10), readToken1, "")
	h.train("gpt", 1)
	h.record("bert", "main", &events.CheckpointPinned{Checkpoint: "step-10.a1"})
	after := h.call("GET", fmt.Sprintf("%s/runs/bert/checkpoints?all=true&as_of=%d", Prefix, last), readToken1, "")
	if before.body != after.body || before.head.Get("Cache-Control") != forever || before.head.Get("Ckpt-Sequence") != fmt.Sprint(last) {
		t.Errorf("as of %d: %s\nlater: %s\n%v", last, before.body, after.body, before.head)
	}
	if strings.Contains(mid.body, "step-30") || !strings.Contains(mid.body, "step-20") {
		t.Errorf("as of %d: %s", last-10, mid.body)
	}
	h.refusedAs("a run of later", h.call("GET", fmt.Sprintf("%s/runs/gpt?as_of=%d", Prefix, last), readToken1, ""), 404, "as of sequence")
	r := h.call("GET", Prefix+"/runs/bert", readToken1, "")
	tag := r.head.Get("ETag")
	if tag == "" || r.head.Get("Cache-Control") != "no-store" {
		t.Errorf("a live answer: %v", r.head)
	}
	if r := h.call("GET", Prefix+"/runs/bert", readToken1, "", "If-None-Match: "+tag); r.status != http.StatusNotModified || r.body != "" {
		t.Errorf("the same answer: %d %s", r.status, r.body)
	}
	h.record("bert", "main", &events.CheckpointUnpinned{Checkpoint: "step-10.a1"})
	if r := h.call("GET", Prefix+"/runs/bert", readToken1, "", "If-None-Match: "+tag); r.status != http.StatusOK {
		t.Errorf("another answer: %d", r.status)
	}
	// What was appended is in the next answer that asks for it.
	seq := h.record("new", "main", &events.TrialCreated{})
	var d RunDetail
	if h.get(fmt.Sprintf("/runs/new?at_least=%d", seq), &d); d.Run != "new" {
		t.Errorf("at least %d: %+v", seq, d)
	}
	short := h.call("GET", Prefix+"/runs/bert/checkpoints?all=true", readToken1, "", "Accept-Encoding: br, gzip")
	z, err := gzip.NewReader(strings.NewReader(short.body))
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(z); err != nil || short.head.Get("Content-Encoding") != "gzip" || !json.Valid(text) {
		t.Errorf("compressed: %v, %v", short.head, err)
	}
}

// TestNextPageWaits: what a client asks for as of an event has to be prepared; the next page of a list
// is answered before that.
func TestNextPageWaits(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	if _, err := store.Init(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	st, err := store.Open(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	}()
	var facts []events.Fact
	for i := range 9000 {
		f, err := events.NewFact(events.Stamp{ID: store.NewID(), Source: "test", Time: time.Now()}, events.Scope{Run: "bert", Trial: "main", Actor: events.Rank(0)}, &events.Metrics{Attempt: 1, Iteration: 1 + i})
		if err != nil {
			t.Fatal(err)
		}
		facts = append(facts, f)
	}
	var last uint64
	for some := range slices.Chunk(facts, 500) { // an append has a deadline
		all, err := st.Log.Append(t.Context(), some...)
		if err != nil {
			t.Fatal(err)
		}
		last = all[len(all)-1]
	}
	h := &Handler{store: st, pasts: pasts{turn: make(chan struct{}, 1)}} // it prepares nothing
	if _, err := h.pasts.at(t.Context(), h, last, true); !errors.Is(err, views.ErrPreparing) {
		t.Errorf("as of a chosen event: %v", err)
	}
	h.pasts.turn <- struct{}{} // a page waits
	if _, err := h.pasts.at(t.Context(), h, last, true); !errors.Is(err, views.ErrPreparing) {
		t.Errorf("as of a chosen event, while a page waits: %v", err)
	}
	<-h.pasts.turn
	if f, err := h.pasts.at(t.Context(), h, last, false); err != nil || f.sequence != last {
		t.Errorf("the next page: %d, %v", f.sequence, err)
	}
}

// TestAccessIsOfNow: who the user is, and who has access, is of now whatever as_of is.
func TestAccessIsOfNow(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	h.train("bert", 1)
	last, err := h.st.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for path, token := range map[string]string{"/whoami": readToken1, "/access": rootToken} {
		r := h.call("GET", Prefix+path+"?as_of=2", token, "")
		if r.status != http.StatusOK || r.head.Get("Ckpt-Sequence") != fmt.Sprint(last) || r.head.Get("Cache-Control") == forever {
			t.Errorf("%s: %d, %v: %s", path, r.status, r.head, r.body)
		}
	}
}

// TestPreparing: an answer as of an event that is not prepared yet tells the client to ask again.
func TestPreparing(t *testing.T) {
	for want, err := range map[string]error{"2": fmt.Errorf("as of sequence 7: %w: 1 of 9 events", views.ErrPreparing), "": projections.ErrNotFound} {
		var r *refusal
		if !errors.As(refused(err), &r) || r.GetHeaders().Get("Retry-After") != want {
			t.Errorf("%v is refused with %v, Retry-After %q, want %q", err, r, r.GetHeaders().Get("Retry-After"), want)
		}
		if want != "" && r.GetStatus() != http.StatusServiceUnavailable {
			t.Errorf("%v is refused with %d", err, r.GetStatus())
		}
	}
}

// TestColumns: a column has every value of its points, with six digits and in the order of
// iterations; null stands for values that are not finite.
func TestColumns(t *testing.T) {
	t.Parallel()
	one, two, three, tiny, huge := 1.0, 2.0, 3.0, 0.123456789, 1234567.0
	hidden := func(x int, v *float64) projections.PointsLine {
		return projections.PointsLine{Hidden: true, Attempt: 1, Metrics: map[string]*projections.PointsColumns{"loss": {
			Until: []int{x}, Step: []int64{int64(10 * x)}, Attempt: []int{1}, Min: []*float64{v}, Max: []*float64{v}, Last: []*float64{nil}, NonFinite: []int{1},
		}}}
	}
	got, err := json.Marshal(columnsOf(projections.PointsTable{Run: "r", Trial: "t", Iterations: 3, Width: 1, Names: []string{"loss", "sum"}, Lines: []projections.PointsLine{
		{Metrics: map[string]*projections.PointsColumns{"loss": {
			X: []int{1, 1}, Until: []int{1, 2}, Step: []int64{10, 20}, Attempt: []int{1, 2},
			Min: []*float64{&tiny, nil}, Max: []*float64{&huge, nil}, Last: []*float64{&two, nil}, NonFinite: []int{0, 2},
		}}},
		hidden(9, &three), hidden(2, &one),
	}}, []projections.MetricsRow{
		{Attempt: 1, UntilIteration: 1, Step: 10, Metrics: map[string]projections.Summary{"sum": {Count: 1, Last: "abc"}}},
		{Attempt: 3, UntilIteration: 3, Step: 30, Metrics: map[string]projections.Summary{"sum": {Count: 2, Min: 1.0, Max: 1.0, Last: "abc"}}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"run":"r","trial":"t","iterations":3,"width":1,"names":["loss","sum"],"lines":[` +
		`{"hidden":false,"attempt":3,"metrics":{"loss":{"x":[1,2],"step":[10,20],"attempt":[1,2],"min":[0.123457,null],"max":[1.23457e+06,null],"last":[2,null],"nonfinite":[0,2]}},"texts":{"sum":{"x":[1],"step":[10],"last":["abc"]}}},` +
		`{"hidden":true,"attempt":1,"metrics":{"loss":{"x":[2,9],"step":[20,90],"attempt":[1,1],"min":[1,3],"max":[1,3],"last":[null,null],"nonfinite":[1,1]}},"texts":{}}]}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if text, err := json.Marshal([]Digits{Digits(math.Inf(1)), 0}); err != nil || !reflect.DeepEqual(string(text), "[null,0]") {
		t.Errorf("%s, %v", text, err)
	}
}

// TestMetricsKeepSpikes: few rows of many reports have their spike, count their infinities, and
// have the finite extremes of the rows with infinities.
func TestMetricsKeepSpikes(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{Version: "test"})
	const reports, spike, begin, end = 5000, 1717, 3001, 3050
	bodies := []events.Body{&events.TrialCreated{}, &events.GroupStarted{Attempt: 1, WorldSize: 1}}
	for i := 1; i <= reports; i++ {
		var loss any = 1 + float64(i)/10000
		if i == spike {
			loss = 98765.4
		} else if i >= begin && i <= end {
			loss = "Infinity"
		}
		bodies = append(bodies, &events.Metrics{Attempt: 1, Iteration: i, Step: int64(2 * i), Metrics: map[string]any{"loss": loss, "sum": "abc"}})
	}
	h.record("spiky", "main", bodies...)
	var got Columns
	h.get("/runs/spiky/metrics?points=40&metric=loss", &got)
	c := got.Lines[0].Metrics["loss"]
	if len(got.Lines) != 1 || c == nil || len(c.X) > 40 || len(c.X) < 20 || len(got.Lines[0].Texts) != 0 || got.Lines[0].Attempt != 1 || !slices.Equal(got.Names, []string{"loss", "sum"}) {
		t.Fatalf("%+v", got)
	}
	bad, before := 0, 0
	for i, x := range c.X {
		first, last := before+1, x
		before = x
		if c.Step[i] != int64(2*x) || c.Attempt[i] != 1 {
			t.Errorf("row until %d: step %d, attempt %d", x, c.Step[i], c.Attempt[i])
		}
		if has := first <= spike && spike <= last; has != (c.Max[i] > 2) {
			t.Errorf("row from %d until %d: max %v", first, last, c.Max[i])
		}
		if c.Min[i] < 1 || c.Max[i] < c.Min[i] { // each row has finite numbers: it is wider than the infinities
			t.Errorf("row from %d until %d: from %v until %v", first, last, c.Min[i], c.Max[i])
		}
		bad += c.NonFinite[i]
	}
	if bad != end-begin+1 || before != reports {
		t.Errorf("%d are not finite, the last row ends at %d", bad, before)
	}
	var near Columns
	h.get("/runs/spiky/metrics?points=40&from=3001&until=3020", &near)
	if l := near.Lines[0]; len(l.Metrics["loss"].X) != 20 || l.Metrics["loss"].NonFinite[0] != 1 || len(l.Texts["sum"].X) != 20 || l.Texts["sum"].Last[19] != "abc" {
		t.Errorf("%+v", l)
	}
}

// TestEventsPastTheEnd: positions that the log does not have are refused, in a forged token too.
func TestEventsPastTheEnd(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	h.train("bert", 1)
	last, err := h.st.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	get := func(query string) reply { return h.call("GET", Prefix+"/events?"+query, readToken1, "") }
	h.refusedAs("after the end of numbers", get("after=18446744073709551615"), 404, "the log ends at")
	h.refusedAs("after the end", get(fmt.Sprintf("after=%d", last+1)), 404, "the log ends at")
	forged := func(s uint64, k string) string { return "page=" + place{s, k}.token() }
	for _, order := range []string{"", "first=true&"} {
		h.refusedAs("a list as of the future", get(order+forged(last+1, "1")), 404, "first page")
		h.refusedAs("a page as of the future", get(order+forged(last+1000, fmt.Sprint(last+900))), 404, "first page")
		h.refusedAs("a page past its list", get(order+forged(last, fmt.Sprint(last+1))), 404, "first page")
		h.refusedAs("a page at the end of numbers", get(order+forged(last, "18446744073709551615")), 404, "first page")
		h.refusedAs("a page before the log", get(order+forged(last, "0")), 404, "first page")
	}
	var page EventPage
	if h.get(fmt.Sprintf("/events?after=%d", last), &page); len(page.Events) != 0 || page.Next != "" {
		t.Errorf("after the last event: %+v", page)
	}
}

// TestDottedRuns: a run whose name a browser removes from a path is asked for by a parameter.
func TestDottedRuns(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	for _, name := range []string{".", "..", "-", "a/b", "%2F", "%2E"} {
		h.train(name, 1)
	}
	for path, want := range map[string]string{
		"/runs/-?run=.": ".", "/runs/-?run=..": "..", "/runs/-": "-", "/runs/-?run=x": "-", "/runs/%2E": ".", "/runs/%2E%2E": "..",
		"/runs/a%2Fb": "a/b", "/runs/%252F": "%2F", "/runs/%252E?run=..": "%2E",
	} {
		var run RunDetail
		if h.get(path, &run); run.Run != want {
			t.Errorf("%s is run %q, want %q", path, run.Run, want)
		}
	}
	var page CheckpointPage
	if h.get("/runs/-/checkpoints?run=..&brief=true", &page); len(page.Checkpoints) != 1 || page.Checkpoints[0].Run != ".." {
		t.Fatalf("checkpoints of ..: %+v", page)
	}
	if c := page.Checkpoints[0]; c.ID == "" || c.EndedAt.IsZero() || c.Manifest != "" || c.Sequence != 0 || c.Parent != "" || !c.CommittedAt.IsZero() {
		t.Errorf("a brief row: %+v", c)
	}
	h.refusedAs("one of its checkpoints that is not there", h.call("GET", Prefix+"/runs/-/checkpoints/step-99?run=.", readToken1, ""), 404, "step-99")
}

// TestPagesOfLargeEvents: a page of events ends after a few megabytes, and the pages have all events, in both directions.
func TestPagesOfLargeEvents(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	var facts []events.Fact
	for rank := range 60 {
		f, err := events.NewFact(events.Stamp{ID: store.NewID(), Source: "test", Time: time.Now()}, events.Scope{Run: "bert", Trial: "main", Actor: events.Rank(rank)},
			&events.WorkerExited{Attempt: 1, Rank: rank, Message: strings.Repeat("x", 150<<10)})
		if err != nil {
			t.Fatal(err)
		}
		facts = append(facts, f)
	}
	if _, err := h.st.Log.Append(t.Context(), facts...); err != nil {
		t.Fatal(err)
	}
	for _, from := range []string{"", "&first=true"} {
		pages, seen := 0, map[uint64]bool{}
		for next := ""; pages == 0 || next != ""; pages++ {
			var page EventPage
			h.get("/events?run=bert&limit=1000"+from+"&page="+url.QueryEscape(next), &page)
			size := 0
			for _, e := range page.Events {
				size += len(e.Data)
				if seen[e.Sequence] {
					t.Errorf("%q: event %d comes twice", from, e.Sequence)
				}
				seen[e.Sequence] = true
			}
			if size > mostBytes+1<<20 {
				t.Errorf("%q: a page has bodies of %d bytes", from, size)
			}
			if next = page.Next; pages > 100 {
				t.Fatalf("%q: the pages do not end", from)
			}
		}
		if len(seen) != len(facts) || pages < 3 {
			t.Errorf("%q: %d events in %d pages, want %d", from, len(seen), pages, len(facts))
		}
	}
}
