package api

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/store"
)

func TestMain(m *testing.M) {
	if os.Getenv(finderEnv) != "" {
		os.Exit(findRecords())
	}
	dir, err := os.MkdirTemp("/tmp", "ck") // sockets need a short path
	if err == nil {
		err = os.Setenv("XDG_RUNTIME_DIR", dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// tokens of the users of a harness.
const (
	readToken1 = "token-of-reader"
	writeToken = "token-of-operator"
	rootToken  = "token-of-admin"
	auditToken = "token-of-auditor"
)

var people = Users{NewUser("rosa", Reader, readToken1), NewUser("olaf", Operator, writeToken), NewUser("ada", Admin, rootToken), NewUser("eva", Auditor, auditToken)}

// harness is a store with an API.
type harness struct {
	t     *testing.T
	st    *store.Store
	url   string
	ends  map[events.Aggregate]uint64
	clock time.Time
}

func newHarness(t *testing.T, o Options) *harness {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	if _, err := store.Init(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	st, err := store.Open(t.Context(), store.Options{Location: dir, Reader: false})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	h := &harness{t: t, st: st, ends: map[events.Aggregate]uint64{}, clock: time.Now().Add(-time.Hour)}
	h.url = h.serve(st, o)
	return h
}

// serve serves a store until the end of the test.
func (h *harness) serve(st *store.Store, o Options) string {
	if o.Users == nil {
		o.Users = people
	}
	handler := New(st, o)
	server := httptest.NewServer(handler)
	h.t.Cleanup(func() {
		handler.Close()
		server.Close()
	})
	return server.URL
}

// record appends facts and decisions about a trial, a second apart.
func (h *harness) record(run, trial string, bodies ...events.Body) uint64 {
	h.t.Helper()
	agg, last := events.Aggregate{Run: run, Trial: trial}, uint64(0)
	for _, b := range bodies {
		h.clock = h.clock.Add(time.Second)
		stamp := events.Stamp{ID: store.NewID(), Source: "test", Time: h.clock}
		if b.Kind().Decides() {
			d, err := events.NewDecision(stamp, agg, b)
			if err == nil {
				last, err = h.st.Log.Decide(h.t.Context(), d, h.ends[agg])
			}
			if err != nil {
				h.t.Fatal(err)
			}
			h.ends[agg] = last
			continue
		}
		scope := events.Scope{Run: run, Trial: trial, Actor: events.Node(0)}
		if b.Kind().Family() == "job" {
			scope.Trial = events.None
		}
		f, err := events.NewFact(stamp, scope, b)
		if err != nil {
			h.t.Fatal(err)
		}
		all, err := h.st.Log.Append(h.t.Context(), f)
		if err != nil {
			h.t.Fatal(err)
		}
		last = all[0]
	}
	return last
}

// train records a run with this many checkpoints, one every ten iterations.
func (h *harness) train(run string, checkpoints int) {
	h.t.Helper()
	job := "job-of-" + run
	h.record(run, "main",
		&events.JobStarted{Job: job, Host: "here", PID: 1, Command: []string{"python3", "train.py"}, NProc: 1, NNodes: 1, Resume: "auto"},
		&events.TrialCreated{Config: map[string]any{"lr": 0.1}},
		&events.GroupStarted{Attempt: 1, Job: job, WorldSize: 1},
	)
	for n := 1; n <= checkpoints; n++ {
		id := fmt.Sprintf("step-%d.a1", 10*n)
		for i := 10*n - 9; i <= 10*n; i++ {
			h.record(run, "main", &events.Metrics{Attempt: 1, Iteration: i, Step: int64(i), Metrics: map[string]any{"loss": 1 / float64(i), "digest": "abc"}, Seconds: 0.1})
		}
		h.record(run, "main",
			&events.CheckpointBegun{Attempt: 1, Checkpoint: id, Name: fmt.Sprintf("step-%d", 10*n), Step: int64(10 * n), WorldSize: 1},
			&events.WriteCompleted{Attempt: 1, Checkpoint: id, Rank: 0, BytesWritten: 100, Files: []events.File{{Name: "r00000.safetensors", Size: 100}}},
			&events.CheckpointCommitted{Attempt: 1, Checkpoint: id, Manifest: fmt.Sprintf("%064x", n), Bytes: 100},
		)
	}
	h.record(run, "main", &events.GroupStopped{Attempt: 1, Reason: "done"}, &events.TrialCompleted{Attempt: 1})
	h.record(run, "main", &events.JobEnded{Job: job, Reason: "done"})
}

// reply is an answer of the API.
type reply struct {
	status int
	head   http.Header
	body   string
}

// call makes a request. Headers come as "Name: value".
func (h *harness) call(method, path, token, body string, headers ...string) reply {
	h.t.Helper()
	return h.callAt(h.t.Context(), h.url, method, path, token, body, headers...)
}

func (h *harness) callAt(ctx context.Context, base, method, path, token, body string, headers ...string) reply {
	h.t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, base+path, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if body != "" {
		req.Header.Set("Content-Type", httpkit.JSON)
	}
	for _, header := range headers {
		name, value, _ := strings.Cut(header, ": ")
		if req.Header.Set(name, value); name == "Host" {
			req.Host = value
		}
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}
	resp, err := client.Do(req)
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return reply{resp.StatusCode, resp.Header, string(text)}
}

// get reads a path and decodes the answer.
func (h *harness) get(path string, into any) reply {
	h.t.Helper()
	r := h.call(http.MethodGet, Prefix+path, readToken1, "")
	if r.status != http.StatusOK {
		h.t.Fatalf("GET %s: %d %s", path, r.status, r.body)
	}
	if err := json.Unmarshal([]byte(r.body), into); err != nil {
		h.t.Fatalf("GET %s: %v in %.300s", path, err, r.body)
	}
	return r
}

// refusedAs checks that an answer is a refusal of a kind, with a next step.
func (h *harness) refusedAs(what string, r reply, status int, parts ...string) {
	h.t.Helper()
	var d httpkit.Details
	if err := json.Unmarshal([]byte(r.body), &d); err != nil || r.status != status || d.Status != status || r.head.Get("Content-Type") != httpkit.Problem {
		h.t.Errorf("%s: %d %s: %.300s, want %d", what, r.status, r.head.Get("Content-Type"), r.body, status)
		return
	}
	for _, part := range parts {
		if !strings.Contains(d.Detail, part) {
			h.t.Errorf("%s: the detail lacks %q: %s", what, part, d.Detail)
		}
	}
}
