package httpkit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// refusal is the body of a reply, which must be problem details.
func refusal(t *testing.T, reply *http.Response) Details {
	t.Helper()
	body, err := io.ReadAll(reply.Body)
	if err != nil {
		t.Fatal(err)
	}
	var d Details
	var old client.Problem
	if err := errors.Join(json.Unmarshal(body, &d), json.Unmarshal(body, &old)); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	if of, err := url.Parse(d.Type); err != nil || !of.IsAbs() {
		t.Errorf("%s: the type is no URI: %v", body, err)
	}
	if reply.Header.Get("Content-Type") != "application/problem+json" || d.Status != reply.StatusCode || d.Title == "" || d.Detail == "" || d.Kind == "" {
		t.Errorf("status %d, %s: %s", reply.StatusCode, reply.Header.Get("Content-Type"), body)
	}
	if old.Message != d.Detail {
		t.Errorf("a client of the protocol reads %q of %s", old.Message, body)
	}
	return d
}

// TestRefuse: each kind is refused with problem details and its status.
func TestRefuse(t *testing.T) {
	t.Parallel()
	for _, kind := range []problem.Kind{
		problem.Internal, problem.Invalid, problem.BadReference, problem.Ambiguous, problem.NotFound, problem.MissingFile, problem.Conflict, problem.NotCommitted,
		problem.Findings, problem.Damage, problem.Newer, problem.Foreign, problem.NoStore, problem.Locked, problem.Denied, problem.NoAccess, problem.Unauthorized,
		problem.Gone, problem.UnknownPlan, problem.Unavailable, problem.Late, problem.NoSpace, problem.Failed,
	} {
		w := httptest.NewRecorder()
		Refuse(w, fmt.Errorf("save step-1: %w", problem.New(kind, "no <luck>")))
		d := refusal(t, w.Result())
		if d.Kind != kind || w.Code != kind.Status() || d.Title != kind.Title() || d.Detail != "save step-1: no <luck>" {
			t.Errorf("%s: %d %+v", kind, w.Code, d)
		}
	}
	w := httptest.NewRecorder()
	Refuse(w, syscall.EDQUOT)
	if d := refusal(t, w.Result()); d.Status != http.StatusInsufficientStorage {
		t.Errorf("%+v", d)
	}
}

type asked struct {
	Name string `json:"name"`
}

// TestHandle checks that a handler takes one JSON object within its limit, and
// otherwise reports what to send.
func TestHandle(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(Handle(64, func(_ context.Context, in asked) (map[string]any, error) {
		switch in.Name {
		case "absent":
			return nil, problem.Errorf(problem.NotFound, "no run %q", in.Name)
		case "odd":
			return map[string]any{"f": func() {}}, nil
		}
		return map[string]any{"hello": in.Name}, nil
	}))
	defer s.Close()
	for _, c := range []struct {
		name, body string
		status     int
		says       []string
	}{
		{"whole", `{"name":"a","more":1}`, 200, []string{`{"hello":"a"}`}},
		{"the largest", `{"name":"` + strings.Repeat("x", 53) + `"}`, 200, []string{"xxx"}},
		{"too large", `{"name":"` + strings.Repeat("x", 54) + `"}`, 400, []string{"read request", "at most 64 bytes"}},
		{"cut off", `{"name":`, 400, []string{"decode request", "send one JSON object"}},
		{"empty", ``, 400, []string{"decode request", "send one JSON object"}},
		{"of another type", `{"name":1}`, 400, []string{"decode request", "name", "send one JSON object"}},
		{"two objects", `{}{}`, 400, []string{"decode request"}},
		{"refused", `{"name":"absent"}`, 404, []string{`no run "absent"`}},
		{"without an encoding", `{"name":"odd"}`, 500, []string{"encode the reply"}},
	} {
		reply, err := http.Post(s.URL, JSON, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		text := ""
		if reply.StatusCode == http.StatusOK {
			body, _ := io.ReadAll(reply.Body)
			text = string(body)
			if reply.Header.Get("Content-Type") != JSON {
				t.Errorf("%s: %s", c.name, reply.Header.Get("Content-Type"))
			}
		} else {
			text = refusal(t, reply).Detail
		}
		_ = reply.Body.Close()
		for _, part := range c.says {
			if reply.StatusCode != c.status || !strings.Contains(text, part) {
				t.Errorf("%s: %d %s, want %d and %q", c.name, reply.StatusCode, text, c.status, part)
			}
		}
	}
}

// TestCutOffBody: a body that ends too early is the caller's fault.
func TestCutOffBody(t *testing.T) {
	t.Parallel()
	r := httptest.NewRequest(http.MethodPost, "/", io.MultiReader(strings.NewReader("{"), broken{}))
	_, err := Request[asked](httptest.NewRecorder(), r, 64)
	if err == nil || DetailsOf(err).Status != http.StatusBadRequest || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%v", err)
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// TestAuthorized: only the whole token is right, and an empty one never.
func TestAuthorized(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		header, token string
		want          bool
	}{
		{"Bearer secret", "secret", true},
		{"Bearer secre", "secret", false},
		{"Bearer secrets", "secret", false},
		{"secret", "secret", false},
		{"Basic secret", "secret", false},
		{"", "secret", false},
		{"Bearer ", "", false},
		{"", "", false},
	} {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		if c.header != "" {
			r.Header.Set("Authorization", c.header)
		}
		if got := Authorized(r, c.token); got != c.want {
			t.Errorf("%q with token %q: %v", c.header, c.token, got)
		}
	}
}

func TestTakesGzip(t *testing.T) {
	for accepts, want := range map[string]bool{
		"": false, "br": false, "gzip": true, "br, gzip": true, "*": true, "GZIP": true, "gzip;q=1": true, "gzip; q=0.5": true,
		"gzip;q=0": false, "gzip; q=0.000": false, "*;q=0": false, "*;q=0, gzip": true, "gzip;q=0, *": false, "gzip;q=x": false, "xgzip": false,
	} {
		if got := TakesGzip(accepts); got != want {
			t.Errorf("%q: %v, want %v", accepts, got, want)
		}
	}
}
