package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/store"
)

func asError[T error](err error, to *T) bool { return errors.As(err, to) }

// decideAs makes a request and decodes its answer.
func decideAs[T any](h *harness, method, path, body string, headers ...string) (out T) {
	h.t.Helper()
	r := h.call(method, Prefix+path, writeToken, body, headers...)
	if r.status != http.StatusOK {
		h.t.Fatalf("%s %s: %d %s", method, path, r.status, r.body)
	}
	if err := json.Unmarshal([]byte(r.body), &out); err != nil {
		h.t.Fatal(err)
	}
	return out
}

// TestDecisions: pins, tags and forks are those of the command line, and in the log with their
// user.
func TestDecisions(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	h.train("bert", 2)
	const mark = "/runs/bert/checkpoints/step-10"
	if m := decideAs[answer.Marked](h, "PUT", mark+"/pin", `{"reason":"table 3"}`); !m.Pinned || m.PinReason != "table 3" || m.ID != "step-10.a1" {
		t.Errorf("pinned: %+v", m)
	}
	if m := decideAs[answer.Marked](h, "PUT", mark+"/tags/best", ""); len(m.Tags) != 1 || m.Tags[0] != "best" {
		t.Errorf("tagged: %+v", m)
	}
	if m := decideAs[answer.Marked](h, "PUT", "/runs/bert/checkpoints/latest/tags/best", ""); m.From != "step-10.a1" || m.ID != "step-20.a1" {
		t.Errorf("moved: %+v", m)
	}
	if m := decideAs[answer.Marked](h, "DELETE", "/runs/bert/checkpoints/best/tags/best", ""); len(m.Tags) != 0 {
		t.Errorf("untagged: %+v", m)
	}
	if m := decideAs[answer.Marked](h, "DELETE", mark+"/pin", ""); m.Pinned {
		t.Errorf("unpinned: %+v", m)
	}
	f := decideAs[answer.Forked](h, "POST", "/runs/bert:fork", `{"name":"bert2","checkpoint":"step-10","set":{"lr":0.5}}`)
	if f.Parent != "bert@step-10.a1" || f.Config["lr"] != 0.5 {
		t.Errorf("forked: %+v", f)
	}
	h.refusedAs("a second fork", h.call("POST", Prefix+"/runs/bert:fork", writeToken, `{"name":"bert2"}`), 409, "exists")
	h.refusedAs("a fork without a name", h.call("POST", Prefix+"/runs/bert:fork", writeToken, `{}`), 400, "name")
	h.refusedAs("a bad tag", h.call("PUT", Prefix+mark+"/tags/latest", writeToken, ""), 400, "tag")
	h.refusedAs("no live job", h.call("POST", Prefix+"/runs/bert:stop", writeToken, ""), 409, "no live job")
	var page EventPage
	h.get("/events?type=checkpoint.*&type=trial.created&limit=100", &page)
	decisions := 0
	for _, e := range page.Events {
		if e.Source == "test" {
			continue
		}
		decisions++
		if e.Source != "api/olaf" || e.Principal != "user:olaf" {
			t.Errorf("event %d, %s, is of %s, %s", e.Sequence, e.Kind, e.Source, e.Principal)
		}
	}
	if decisions != 7 {
		t.Errorf("%d decisions", decisions)
	}
}

// TestSenderOfDecisions: the server's own user is the sender as its number, and no user of a file
// can have that name.
func TestSenderOfDecisions(t *testing.T) {
	t.Parallel()
	const own = "token-of-the-server"
	h := newHarness(t, Options{Users: append(slices.Clone(people), NewUser("uid-7", Admin, own))})
	h.train("bert", 1)
	if r := h.call("PUT", Prefix+"/runs/bert/checkpoints/latest/pin", own, `{"reason":"r"}`); r.status != http.StatusOK {
		t.Fatalf("%d %s", r.status, r.body)
	}
	var page EventPage
	if h.get("/events?type=checkpoint.pinned", &page); len(page.Events) != 1 || page.Events[0].Principal != "uid:7" || page.Events[0].Source != "api/uid-7" {
		t.Errorf("%+v", page.Events)
	}
	path := filepath.Join(t.TempDir(), "users")
	if _, _, err := IssueToken(t.Context(), path, Issue{Name: "uid-7", Role: Operator}); err == nil || !strings.Contains(err.Error(), "begin with uid-") {
		t.Errorf("issued: %v", err)
	}
	if _, err := parseRoster(strings.TrimSpace(NewUser("uid-7", Operator, "x").line())); err == nil {
		t.Error("a file names the server's own user")
	}
}

// TestStop stops a live job, whose lease this test holds.
func TestStop(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	h.record("bert", "main", &events.JobStarted{Job: "job-1", Host: "here", PID: 4711, NProc: 1, NNodes: 1}, &events.TrialCreated{}, &events.GroupStarted{Attempt: 1, Job: "job-1", WorldSize: 1})
	_, release, err := h.st.HoldRun(t.Context(), "bert", "job-1")
	if err != nil {
		t.Fatal(err)
	}
	id := store.NewID()
	first := h.call("POST", Prefix+"/runs/bert:preempt", writeToken, `{"reason":"enough"}`, "Idempotency-Key: "+id)
	var s answer.Stopped
	if err := json.Unmarshal([]byte(first.body), &s); err != nil || s.Job != "job-1" || !s.Preempt || s.Reason != "enough" {
		t.Errorf("stopped: %d %s", first.status, first.body)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	// The job is gone. A repeated request gets the first answer, from this server and from
	// another server that was started later.
	again := h.call("POST", Prefix+"/runs/bert:preempt", writeToken, `{"reason":"enough"}`, "Idempotency-Key: "+id)
	if again.status != http.StatusOK || again.body != first.body {
		t.Errorf("repeated: %d %s", again.status, again.body)
	}
	later := h.callAt(t.Context(), h.serve(h.st, Options{}), "POST", Prefix+"/runs/bert:preempt", writeToken, `{"reason":"enough"}`, "Idempotency-Key: "+id)
	if err := json.Unmarshal([]byte(later.body), &s); err != nil || later.status != http.StatusOK || s.Job != "job-1" || s.PID != 4711 {
		t.Errorf("repeated later: %d %s", later.status, later.body)
	}
	h.refusedAs("a new request", h.call("POST", Prefix+"/runs/bert:preempt", writeToken, `{"reason":"enough"}`), 409, "no live job")
}

// TestStopOfSearch stops the live job of a search of two trials: both are asked, once.
func TestStopOfSearch(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	for i, trial := range []string{"t00", "t01"} {
		bodies := []events.Body{&events.TrialCreated{}, &events.GroupStarted{Attempt: 1, Job: "job-1", WorldSize: 1}}
		if i == 0 {
			bodies = append([]events.Body{&events.JobStarted{Job: "job-1", Host: "here", PID: 4711, NProc: 1, NNodes: 1}}, bodies...)
		}
		h.record("search", trial, bodies...)
	}
	_, release, err := h.st.HoldRun(t.Context(), "search", "job-1")
	if err != nil {
		t.Fatal(err)
	}
	const stop = Prefix + "/runs/search:stop"
	h.refusedAs("a condition on one trial", h.call("POST", stop, writeToken, `{"reason":"enough"}`, `If-Match: "1"`), 400, "trains 2 trials")
	id := store.NewID()
	if r := h.call("POST", stop, writeToken, `{"reason":"enough"}`, "Idempotency-Key: "+id); r.status != http.StatusOK {
		t.Fatalf("stopped: %d %s", r.status, r.body)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	later := h.callAt(t.Context(), h.serve(h.st, Options{}), "POST", stop, writeToken, `{"reason":"enough"}`, "Idempotency-Key: "+id)
	if later.status != http.StatusOK {
		t.Errorf("repeated later: %d %s", later.status, later.body)
	}
	var page EventPage
	h.get("/events?type=trial.stop_requested", &page)
	var asked []string
	for _, e := range page.Events {
		asked = append(asked, e.Scope.Trial)
	}
	if len(asked) != 2 || page.Events[1].ID != id && page.Events[0].ID != id {
		t.Errorf("the log has requests %q", asked)
	}
}

// TestIfMatch: a decision on a newer lane than the client has seen is refused.
func TestIfMatch(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	h.train("bert", 1)
	const pin = Prefix + "/runs/bert/checkpoints/latest/pin"
	lane := h.call("GET", Prefix+"/runs/bert/checkpoints/latest", readToken1, "").head.Get("Ckpt-Lane-Sequence")
	if r := h.call("PUT", pin, writeToken, `{"reason":"mine"}`, `If-Match: "`+lane+`"`); r.status != http.StatusOK {
		t.Fatalf("the lane that was seen: %d %s", r.status, r.body)
	}
	h.refusedAs("a newer lane", h.call("DELETE", pin, writeToken, "", `If-Match: "`+lane+`"`), 412, "last decision is event")
	h.refusedAs("nothing to decide on a newer lane", h.call("PUT", pin, writeToken, `{"reason":"mine"}`, `If-Match: "`+lane+`"`), 412)
	h.refusedAs("a fork from a newer lane", h.call("POST", Prefix+"/runs/bert:fork", writeToken, `{"name":"x"}`, `If-Match: "`+lane+`"`), 412)
	h.refusedAs("no sequence", h.call("DELETE", pin, writeToken, "", "If-Match: abc"), 400, "If-Match")
	lane = h.call("GET", Prefix+"/runs/bert", readToken1, "").head.Get("Ckpt-Lane-Sequence")
	if r := h.call("DELETE", pin, writeToken, "", `If-Match: "`+lane+`"`); r.status != http.StatusOK {
		t.Errorf("the lane of now: %d %s", r.status, r.body)
	}
}

// TestIdempotency: of many requests with one key, one decides, and all get its answer.
func TestIdempotency(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	h.train("bert", 1)
	id := store.NewID()
	const pin = Prefix + "/runs/bert/checkpoints/latest/pin"
	bodies := make([]string, 20)
	var all sync.WaitGroup
	for i := range bodies {
		all.Go(func() {
			bodies[i] = h.call("PUT", pin, writeToken, `{"reason":"r"}`, "Idempotency-Key: "+id).body
		})
	}
	all.Wait()
	for _, body := range bodies {
		if body != bodies[0] || !strings.Contains(body, `"pinned":true`) {
			t.Errorf("%s\n%s", body, bodies[0])
		}
	}
	var page EventPage
	if h.get("/events?type=checkpoint.pinned", &page); len(page.Events) != 1 || page.Events[0].ID != id {
		t.Errorf("%d pins in the log: %+v", len(page.Events), page.Events)
	}
	h.refusedAs("the key for another request", h.call("PUT", pin, writeToken, `{"reason":"other"}`, "Idempotency-Key: "+id), 409, "another request")
	h.refusedAs("no UUID", h.call("PUT", pin, writeToken, "", "Idempotency-Key: x"), 400, "Idempotency-Key")

	// Another client unpins. A repetition through a new server does not pin again.
	decideAs[answer.Marked](h, "DELETE", strings.TrimPrefix(pin, Prefix), "")
	later := h.serve(h.st, Options{})
	if r := h.callAt(t.Context(), later, "PUT", pin, writeToken, `{"reason":"r"}`, "Idempotency-Key: "+id); r.status != http.StatusOK || strings.Contains(r.body, `"pinned":true`) {
		t.Errorf("repeated later: %d %s", r.status, r.body)
	}
	if h.get("/events?type=checkpoint.pinned", &page); len(page.Events) != 1 {
		t.Errorf("%d pins in the log", len(page.Events))
	}
	h.refusedAs("the ID of another event", h.callAt(t.Context(), h.serve(h.st, Options{}), "POST", Prefix+"/runs/bert:stop", writeToken, "", "Idempotency-Key: "+id), 409, fmt.Sprint("event ", page.Events[0].Sequence))
	fork := store.NewID()
	first := h.call("POST", Prefix+"/runs/bert:fork", writeToken, `{"name":"f"}`, "Idempotency-Key: "+fork)
	second := h.callAt(t.Context(), later, "POST", Prefix+"/runs/bert:fork", writeToken, `{"name":"f"}`, "Idempotency-Key: "+fork)
	if first.status != http.StatusOK || first.body != second.body {
		t.Errorf("forks: %d %s, %d %s", first.status, first.body, second.status, second.body)
	}
}

// TestOtherDecision: after a restart, the ID of another decision is refused, and a repeated
// decision is answered whatever its reference means meanwhile.
func TestOtherDecision(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	h.train("bert", 2)
	h.record("live", "main", &events.JobStarted{Job: "job-1", Host: "here", PID: 4711, NProc: 1, NNodes: 1}, &events.TrialCreated{}, &events.GroupStarted{Attempt: 1, Job: "job-1", WorldSize: 1})
	_, release, err := h.st.HoldRun(t.Context(), "live", "job-1")
	if err != nil {
		t.Fatal(err)
	}
	type request struct{ method, path, body string }
	const marks = "/runs/bert/checkpoints/"
	requests := []request{
		{"PUT", marks + "step-10/pin", `{"reason":"a"}`},
		{"PUT", marks + "latest/pin", `{"reason":"a"}`},
		{"DELETE", marks + "step-10.a1/pin", ""},
		{"PUT", marks + "step-10.a1/tags/good", ""},
		{"PUT", marks + "good/tags/best", ""},
		{"DELETE", marks + "best/tags/best", ""},
		{"DELETE", marks + "step-10.a1/tags/good", ""},
		{"POST", "/runs/live:stop", `{"reason":"a"}`},
		{"POST", "/runs/live:preempt", `{"reason":"a"}`},
		{"POST", "/runs/bert:fork", `{"name":"f","checkpoint":"step-10","set":{"lr":0.5,"token":"hunter2"}}`},
		{"POST", "/runs/bert:fork", `{"name":"g"}`},
	}
	ids := make([]string, len(requests))
	for i, r := range requests {
		ids[i] = store.NewID()
		if got := h.call(r.method, Prefix+r.path, writeToken, r.body, "Idempotency-Key: "+ids[i]); got.status != http.StatusOK {
			t.Fatalf("%v: %d %s", r, got.status, got.body)
		}
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	before, err := h.st.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	later := func(token string, r request, id string) reply {
		return h.callAt(t.Context(), h.serve(h.st, Options{}), r.method, Prefix+r.path, token, r.body, "Idempotency-Key: "+id)
	}
	for i, r := range requests {
		if got := later(writeToken, r, ids[i]); got.status != http.StatusOK {
			t.Errorf("repeated %v: %d %s", r, got.status, got.body)
		}
		h.refusedAs(fmt.Sprint("another user: ", r), later(rootToken, r, ids[i]), 409, "another request has decided")
	}
	for _, c := range []struct {
		of int
		r  request
	}{
		{0, request{"DELETE", marks + "step-10/pin", ""}},
		{0, request{"PUT", marks + "step-20/pin", `{"reason":"a"}`}},
		{0, request{"PUT", marks + "step-10/pin", `{"reason":"b"}`}},
		{0, request{"PUT", marks + "step-10/tags/good", ""}},
		{0, request{"PUT", marks + "none/pin", `{"reason":"a"}`}},
		{2, request{"PUT", marks + "step-10.a1/pin", ""}},
		{3, request{"PUT", marks + "step-10.a1/tags/other", ""}},
		{3, request{"PUT", marks + "step-20.a1/tags/good", ""}},
		{3, request{"DELETE", marks + "step-10.a1/tags/good", ""}},
		{5, request{"DELETE", marks + "step-20.a1/tags/best", ""}},
		{7, request{"POST", "/runs/live:preempt", `{"reason":"a"}`}},
		{8, request{"POST", "/runs/live:stop", `{"reason":"a"}`}},
		{8, request{"POST", "/runs/live:preempt", ""}},
		{9, request{"POST", "/runs/bert:fork", `{"name":"f","checkpoint":"step-20","set":{"lr":0.5,"token":"hunter2"}}`}},
		{9, request{"POST", "/runs/bert:fork", `{"name":"f","checkpoint":"step-10","set":{"lr":0.6,"token":"hunter2"}}`}},
		{9, request{"POST", "/runs/bert:fork", `{"name":"f","checkpoint":"step-10"}`}},
		{10, request{"POST", "/runs/bert:fork", `{"name":"g","set":{"lr":0.5}}`}},
	} {
		h.refusedAs(fmt.Sprint(c.r, " with the ID of ", requests[c.of]), later(writeToken, c.r, ids[c.of]), 409, "another request has decided")
	}
	if after, err := h.st.Log.Last(t.Context()); err != nil || after != before {
		t.Errorf("the log has %d events more: %v", after-before, err)
	}
}

// TestKeysOfUsers: a user's key is no other user's.
func TestKeysOfUsers(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	h.train("bert", 1)
	id := store.NewID()
	const pin = Prefix + "/runs/bert/checkpoints/step-10/pin"
	// Nothing is decided, so nothing is in the log: only the table of the server has the key.
	if r := h.call("DELETE", pin, writeToken, "", "Idempotency-Key: "+id); r.status != http.StatusOK {
		t.Fatalf("%d %s", r.status, r.body)
	}
	if r := h.call("PUT", pin, rootToken, `{"reason":"r"}`, "Idempotency-Key: "+id); r.status != http.StatusOK || !strings.Contains(r.body, `"pinned":true`) {
		t.Errorf("the key of another user: %d %s", r.status, r.body)
	}
}

// A member that is null is refused: a client whose reason is missing by mistake learns of it.
func TestNullReason(t *testing.T) {
	t.Parallel()
	var w Why
	if err := json.Unmarshal([]byte(`{"reason":null}`), &w); err == nil {
		t.Error("null is taken for a reason")
	}
	if err := json.Unmarshal([]byte(`{"reason":"enough"}`), &w); err != nil || w.Reason != "enough" {
		t.Errorf("%q, %v", w.Reason, err)
	}
	if err := json.Unmarshal([]byte(`{}`), &w); err != nil {
		t.Error(err)
	}
}
