package query

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/projections"
)

// TestQueries sends every query to both sources, about every run.
func TestQueries(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.story()
	runs, err := Ask(t.Context(), s.local(), Runs, Params{})
	if err != nil || len(runs) != 3 {
		t.Fatalf("runs %+v, %v", runs, err)
	}
	var params []Params
	for _, run := range []string{"run", runs[2].Name, "sweep", "missing", ""} {
		for _, trial := range []string{projections.DefaultTrial, "a", ""} {
			for _, all := range []bool{false, true} {
				p := Params{Run: run, Trial: trial, All: all, Attempt: 1, Ref: run}
				params = append(params, p)
				if all {
					p.Attempt, p.Ref = 2, run+"@best:loss:min"
					params = append(params, p)
					p.Attempt, p.Ref = -1, run+"@step-1.a1"
					params = append(params, p)
				}
			}
		}
	}
	for _, before := range []uint64{0, 20} {
		params = append(params, Params{Run: "run", Trial: projections.DefaultTrial, Ref: "step-1.a1", Attempt: 2, All: true, Before: before, Limit: 1})
	}
	if len(answers) < 11 {
		t.Errorf("only %d questions", len(answers))
	}
	local, client := s.local(), s.client()
	for name := range answers {
		answered := 0
		for _, p := range params {
			here, hereErr := local.Answer(t.Context(), name, p)
			there, thereErr := client.Answer(t.Context(), name, p)
			if !bytes.Equal(here, there) || !same(hereErr, thereErr) {
				t.Errorf("%s of %+v:\nhere  %s, %v\nthere %s, %v", name, p, here, hereErr, there, thereErr)
			}
			// No run of this story needs another run's checkpoints.
			if hereErr == nil && (len(here) > 4 || name == Needs.Name && string(here) == "[]") {
				answered++
			}
		}
		if answered == 0 {
			t.Errorf("%s: never an answer", name)
		}
	}
}

var identities = []error{projections.ErrNotFound, projections.ErrAmbiguous, projections.ErrReference, ErrUnreachable}

// same reports whether two errors have the same text and identity.
func same(a, b error) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	for _, is := range identities {
		if errors.Is(a, is) != errors.Is(b, is) {
			return false
		}
	}
	return a.Error() == b.Error()
}

// agree asks both sources and compares the decoded answers.
func agree[T any](t *testing.T, s *store, q Query[T], p Params) T {
	t.Helper()
	here, err := Ask(t.Context(), s.local(), q, p)
	if err != nil {
		t.Fatalf("%s here: %v", q.Name, err)
	}
	there, err := Ask(t.Context(), s.client(), q, p)
	if err != nil {
		t.Fatalf("%s there: %v", q.Name, err)
	}
	if !reflect.DeepEqual(here, there) {
		t.Errorf("%s:\nhere  %+v\nthere %+v", q.Name, here, there)
	}
	return there
}

// TestAnswers checks the types of the answers.
func TestAnswers(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.story()
	main := Params{Run: "run", Trial: projections.DefaultTrial}
	if got := agree(t, s, Runs, Params{}); len(got) != 3 || got[0].Name != "run" {
		t.Errorf("runs %+v", got)
	}
	if got := agree(t, s, Run, main); got.Name != "run" {
		t.Errorf("run %+v", got)
	}
	if got := agree(t, s, Jobs, main); len(got) != 1 || got[0].PID != 1 {
		t.Errorf("jobs %+v", got)
	}
	if got := agree(t, s, Trials, Params{Run: "sweep"}); len(got) != 2 || got[1].Name != "b" {
		t.Errorf("trials %+v", got)
	}
	if got := agree(t, s, Trial, main); got.Attempt != 2 || got.Head != "step-1.a1" {
		t.Errorf("trial %+v", got)
	}
	if got := agree(t, s, Attempts, main); len(got) != 2 || got[1].Attempt != 2 {
		t.Errorf("attempts %+v", got)
	}
	main.Attempt = 1
	if got := agree(t, s, Workers, main); len(got) != 2 || got[1].Rank != 1 {
		t.Errorf("workers %+v", got)
	}
	if got := agree(t, s, Checkpoints, main); len(got) != 1 || got[0].ID != "step-1.a1" || got[0].Bytes != 7 {
		t.Errorf("checkpoints %+v", got)
	}
	main.All = true
	if got := agree(t, s, Checkpoints, main); len(got) != 3 {
		t.Errorf("all checkpoints %+v", got)
	}
	if got := agree(t, s, OpenCheckpoints, main); len(got) != 1 || got[0].ID != "step-2.a2" {
		t.Errorf("open checkpoints %+v", got)
	}
	if got := agree(t, s, Resolve, Params{Ref: "run@latest"}); got.ID != "step-1.a1" {
		t.Errorf("resolved %+v", got)
	}
	few := Params{Run: "run", Trial: projections.DefaultTrial, Metrics: []string{"loss", "nan"}, From: 1, Until: 9, Points: 1, All: true}
	if got := agree(t, s, Metrics, few); len(got.Rows) != 2 || len(got.Rows[0].Metrics) != 2 || got.Rows[0].Metrics["nan"].Last != "NaN" || got.Rows[0].Hidden == got.Rows[1].Hidden {
		t.Errorf("metrics are %+v", got)
	}
	if got := agree(t, s, Reports, main); len(got) != 3 || got[2].Attempt != 2 || got[0].Metrics["nan"] != "NaN" {
		t.Errorf("metrics %+v", got)
	}
	sum, _, err := s.views.Digest()
	if got := agree(t, s, Digest, Params{}); err != nil || got != fmt.Sprintf("%x", sum) {
		t.Errorf("digest %s, want %x, %v", got, sum, err)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.story()
	for _, c := range []struct {
		query string
		p     Params
		is    error
		says  string
	}{
		{Trial.Name, Params{Run: "rin", Trial: projections.DefaultTrial}, projections.ErrNotFound, `did you mean "run"?`},
		{Run.Name, Params{Run: "nothing like it"}, projections.ErrNotFound, "nothing like it"},
		{Resolve.Name, Params{Ref: "run@step-9"}, projections.ErrNotFound, "step-9"},
		{Resolve.Name, Params{Ref: "sweep@step-1"}, projections.ErrAmbiguous, "sweep/b"},
		{Resolve.Name, Params{Ref: ""}, projections.ErrReference, "empty"},
		{Resolve.Name, Params{Ref: "run@best:loss:least"}, projections.ErrReference, "least"},
		{"riddles", Params{}, projections.ErrNotFound, "riddles"},
	} {
		for side, source := range map[string]Source{"here": s.local(), "there": s.client()} {
			out, err := source.Answer(t.Context(), c.query, c.p)
			if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) || out != nil {
				t.Errorf("%s, %s of %+v: %s, %v", side, c.query, c.p, out, err)
			}
			are := 0
			for _, is := range identities {
				if errors.Is(err, is) {
					are++
				}
			}
			if are != 1 {
				t.Errorf("%s, %s: %v has %d identities", side, c.query, err, are)
			}
		}
	}
}

// TestHalted checks that halted views report the reason.
func TestHalted(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.story()
	if err := s.views.Close(); err != nil {
		t.Fatal(err)
	}
	for side, source := range map[string]Source{"here": s.local(), "there": s.client()} {
		_, err := source.Answer(t.Context(), Runs.Name, Params{})
		if err == nil || !strings.Contains(err.Error(), "closed") {
			t.Errorf("%s: %v", side, err)
		}
		for _, is := range identities {
			if errors.Is(err, is) {
				t.Errorf("%s: %v is %v", side, err, is)
			}
		}
	}
	if status, _, body := get(t, s, http.MethodGet, "/v1/runs"); status != 503 {
		t.Errorf("status %d: %s", status, body)
	}
}

// TestClient connects to broken servers, and to servers that die while they
// answer.
func TestClient(t *testing.T) {
	t.Parallel()
	end := func(context.Context) (uint64, error) { return 1, nil }
	refused := errors.New("refused")
	handler := func(h http.HandlerFunc) func(context.Context) (net.Conn, error) { return listen(t, h) }
	for _, c := range []struct {
		name string
		dial func(context.Context) (net.Conn, error)
		last func(context.Context) (uint64, error)
		is   error
		says string
	}{
		{"missing", func(context.Context) (net.Conn, error) { return nil, refused }, end, ErrUnreachable, "refused"},
		{"no end of the log", nil, func(context.Context) (uint64, error) { return 0, refused }, refused, "refused"},
		{"cut off", handler(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			fmt.Fprint(w, `[{"name":`)
		}), end, ErrUnreachable, "runs"},
		{"hung up", handler(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }), end, ErrUnreachable, "EOF"},
		{"no JSON", handler(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") }), end, nil, "decode the answer to runs"},
		{"an error without JSON", handler(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "bad gateway", http.StatusBadGateway) }), end, nil, "502"},
		{"an unknown kind of error", handler(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(418)
			fmt.Fprint(w, `{"error":"a teapot","kind":"tea"}`)
		}), end, nil, "a teapot"},
	} {
		got, err := Ask(t.Context(), NewClient(c.dial, c.last), Runs, Params{})
		if err == nil || c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %+v, %v", c.name, got, err)
		}
		if errors.Is(err, ErrUnreachable) != errors.Is(c.is, ErrUnreachable) {
			t.Errorf("%s: it may be asked again: %v", c.name, err)
		}
	}
}
