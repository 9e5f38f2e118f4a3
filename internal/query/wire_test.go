package query

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/projections"
	"golang.org/x/sync/errgroup"
)

// get returns the raw answer to a path.
func get(t *testing.T, s *store, method, path string) (status int, header http.Header, body string) {
	t.Helper()
	client := s.client().http
	req, err := http.NewRequestWithContext(t.Context(), method, "http://store"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(data)
}

func TestWire(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.story()
	for _, c := range []struct {
		path   string
		status int
		kind   string
		says   []string
	}{
		{"/v1/runs", 200, "", nil},
		{"/v1/checkpoints?run=run&all=1", 200, "", []string{"step-3.a1"}},
		{"/v1/checkpoints?run=run&all=false&at_least=1&unknown=x", 200, "", []string{"step-1.a1"}},
		{"/v1/workers?run=run&trial=main&attempt=2", 200, "", []string{`"rank":0`}},
		{"/v1/riddles", 404, "not_found", []string{"query", "riddles"}},
		{"/v1/run?run=missing", 404, "not_found", []string{"missing"}},
		{"/v1/resolve", 400, "bad_reference", []string{"empty"}},
		{"/v1/resolve?ref=sweep", 400, "ambiguous", []string{"sweep/a", "sweep/b"}},
		{"/v1/workers?attempt=x", 400, "bad_reference", []string{"attempt", `"x"`}},
		{"/v1/workers?attempt=99999999999999999999", 400, "bad_reference", []string{"attempt", "range"}},
		{"/v1/checkpoints?all=perhaps", 400, "bad_reference", []string{"all", "perhaps"}},
		{"/v1/runs?at_least=-1", 400, "bad_reference", []string{"at_least", "-1"}},
		{"/v1/metrics?run=run&trial=main&metric=loss&metric=nan&points=1", 200, "", []string{`"nans":`, `"min":`}},
		{"/v1/metrics?run=run&trial=main&from=x&points=y", 400, "bad_reference", []string{"from", "points"}},
		{"/v1/metrics?run=run&trial=main&from=9&until=3", 400, "bad_reference", []string{"from iteration 9 until 3"}},
		{"/v1/metrics?run=run&trial=missing", 404, "not_found", []string{"missing"}},
		{"/v1/runs?at_least=x&all=y", 400, "bad_reference", []string{"at_least", "all"}},
	} {
		status, header, body := get(t, s, http.MethodGet, c.path)
		of := httpkit.JSON
		if c.status != 200 {
			of = httpkit.Problem
		}
		if status != c.status || header.Get("Content-Type") != of || !json.Valid([]byte(body)) {
			t.Errorf("%s: %d %s: %s", c.path, status, header.Get("Content-Type"), body)
		}
		var f httpkit.Details
		if c.status != 200 {
			if err := json.Unmarshal([]byte(body), &f); err != nil || f.Message == "" {
				t.Errorf("%s: %s, %v", c.path, body, err)
			}
			body = f.Message
		}
		if string(f.Kind) != c.kind {
			t.Errorf("%s: kind %q, want %q", c.path, f.Kind, c.kind)
		}
		for _, part := range c.says {
			if !strings.Contains(body, part) {
				t.Errorf("%s: %s lacks %q", c.path, body, part)
			}
		}
	}
	for _, c := range []struct {
		method, path string
		status       int
	}{
		{http.MethodPost, "/v1/runs", 405},
		{http.MethodDelete, "/v1/checkpoints?run=run", 405},
		{http.MethodGet, "/v1/", 404},
		{http.MethodGet, "/v1/runs/x", 404},
		{http.MethodGet, "/", 404},
	} {
		if status, _, body := get(t, s, c.method, c.path); status != c.status {
			t.Errorf("%s %s: %d %s", c.method, c.path, status, body)
		}
	}
}

// TestAtLeast checks that an answer covers the log at the time of the query.
func TestAtLeast(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.story()
	s.record("late", projections.DefaultTrial, events.TrialCreated{})
	// The views lack the event, so both queries wait.
	asking := make(chan struct{}, 2)
	last := func(ctx context.Context) (uint64, error) {
		defer func() { asking <- struct{}{} }()
		return s.log.Last(ctx)
	}
	var g errgroup.Group
	for _, source := range []Source{&Local{Views: s.views, Last: last}, NewClient(s.dial, last)} {
		g.Go(func() error {
			run, err := Ask(t.Context(), source, Run, Params{Run: "late"})
			if err != nil || run.Name != "late" {
				return fmt.Errorf("run %+v, %w", run, err)
			}
			return nil
		})
	}
	for range 2 {
		<-asking
	}
	// Without it they would have answered at once.
	if _, _, body := get(t, s, http.MethodGet, "/v1/run?run=late"); !strings.Contains(body, "not_found") {
		t.Errorf("without at_least: %s", body)
	}
	s.catchUp()
	if err := g.Wait(); err != nil {
		t.Error(err)
	}

	// A wait ends with the context, on both sides of the wire.
	s.record("later", projections.DefaultTrial, events.TrialCreated{})
	for side, source := range map[string]Source{"here": s.local(), "there": s.client()} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err := source.Answer(ctx, Runs.Name, Params{})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", side, err)
		}
		cancel()
	}
}
