package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
)

// TestRoles tries every request of the API as every role. A request that is allowed gets past
// the guard, whatever then becomes of it.
func TestRoles(t *testing.T) {
	t.Parallel()
	observed := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "observed") })
	h := newHarness(t, Options{Observe: observed})
	h.train("bert", 1)
	// What only some roles may do; the rest is the state of runs, for all but auditors.
	var (
		all      = []Role{Reader, Operator, Admin, Auditor}
		people   = []Role{Reader, Operator, Admin}
		deciding = []Role{Operator, Admin}
		seeing   = []Role{Admin, Auditor}
	)
	want := map[string][]Role{
		"GET " + Prefix + "/whoami": all, "GET " + Prefix + "/store": all, "GET " + Prefix + "/openapi.json": all,
		"GET " + Prefix + "/events": all, "GET " + Prefix + "/events/{sequence}": all, "GET " + Prefix + "/timeline": all, "GET " + Prefix + "/stream": all,
		"GET " + Prefix + "/audit/checkpoint": all, "GET " + Prefix + "/audit/tile/0/000": all,
		"GET " + Prefix + "/access":  seeing,
		"GET /metrics":               people,
		"GET " + Prefix + "/nothing": people,
	}
	var document struct {
		Paths map[string]map[string]any `json:"paths"`
	}
	if err := json.Unmarshal([]byte(h.call("GET", Prefix+"/openapi.json", readToken1, "").body), &document); err != nil {
		t.Fatal(err)
	}
	requests := slices.Collect(maps.Keys(want))
	for path, methods := range document.Paths {
		for method := range methods {
			request := strings.ToUpper(method) + " " + path
			switch _, listed := want[request]; {
			case listed:
			case strings.HasPrefix(request, "GET "):
				want[request] = people
				requests = append(requests, request)
			default:
				want[request] = deciding
				requests = append(requests, request)
			}
		}
	}
	if len(requests) < 30 {
		t.Errorf("only %d requests: %v", len(requests), requests)
	}
	token := map[Role]string{Reader: readToken1, Operator: writeToken, Admin: rootToken, Auditor: auditToken}
	names := strings.NewReplacer("{run}", "nothing", "{id}", "step-10.a1", "{tag}", "x", "{sequence}", "1")
	for _, request := range requests {
		method, path, _ := strings.Cut(request, " ")
		for _, role := range all {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			req, err := http.NewRequestWithContext(ctx, method, h.url+names.Replace(path), strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+token[role])
			req.Header.Set("Content-Type", httpkit.JSON)
			resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			passed := resp.StatusCode != http.StatusForbidden
			if passed != slices.Contains(want[request], role) {
				t.Errorf("%s as %s: %s", request, role, resp.Status)
			}
			cancel() // a stream
			_ = resp.Body.Close()
		}
	}
}

// TestWhoami: a user gets its role, its token's name and its rights. A token that is unknown, a
// token that was revoked, and a token that has expired are different refusals.
func TestWhoami(t *testing.T) {
	t.Parallel()
	users, tokens := issued(t)
	h := newHarness(t, Options{Users: users})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	who := func(token string) (id Identity, err error) {
		err = Ask(t.Context(), client, h.url, "whoami", token, &id)
		return id, err
	}
	id, err := who(tokens["eva"])
	if err != nil || id.Principal != "user:eva" || id.Role != "auditor" || id.Token != "office" || id.Expires.IsZero() || len(id.Hash) != 16 ||
		fmt.Sprint(id.May) != "[read the log read the evidence of the log list who has access]" {
		t.Errorf("%+v, %v", id, err)
	}
	var list AccessList
	if err := Ask(t.Context(), client, h.url, "access", tokens["eva"], &list); err != nil || len(list.Users) != 2 || list.Users[1].Name != "eva" || list.Users[1].Issued[0].Hash != id.Hash {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := RevokeTokens(t.Context(), users.path, "eva", "office"); err != nil {
		t.Fatal(err)
	}
	for token, want := range map[string]string{tokens["eva"]: "was revoked at", "another": "not one of this server", "": "no token is given"} {
		if _, err := who(token); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	moved := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/else" {
			t.Errorf("the redirect is followed, with %q", r.Header.Get("Authorization"))
		}
		http.Redirect(w, r, "/else", http.StatusTemporaryRedirect)
	}))
	defer moved.Close()
	if err := Ask(t.Context(), client, moved.URL, "whoami", "x", &id); system.KindOf(err) != problem.Invalid || !strings.Contains(err.Error(), "redirects to "+moved.URL+"/else") {
		t.Errorf("a redirect: %v", err)
	}
	for url, want := range map[string]string{"http://train.example:7700": "without TLS", "nats://127.0.0.1:1": "want the URL", "http://127.0.0.1:1": "serve --http"} {
		if err := Ask(t.Context(), client, url, "whoami", "x", &id); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", url, err, want)
		}
	}
}

// issued returns a file of users: rosa, a reader, and eva, an auditor whose token expires in an
// hour.
func issued(t *testing.T) (*UsersFile, map[string]string) {
	t.Helper()
	path, tokens := filepath.Join(t.TempDir(), "users"), map[string]string{}
	for _, i := range []Issue{{Name: "rosa", Role: Reader}, {Name: "eva", Role: Auditor, Token: "office", Expires: time.Now().Add(time.Hour)}} {
		token, _, err := IssueToken(t.Context(), path, i)
		if err != nil {
			t.Fatal(err)
		}
		tokens[i.Name] = token
	}
	users, err := OpenUsers(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return users, tokens
}

// TestStreamOfRevokedToken: an open stream ends when its token is revoked, expires, or gets
// another role: with a last message that tells why. The streams of others stay.
func TestStreamOfRevokedToken(t *testing.T) {
	t.Parallel()
	for what, end := range map[string]struct {
		do   func(t *testing.T, path string) error
		want string
	}{
		"revoked": {func(t *testing.T, path string) error {
			_, err := RevokeTokens(t.Context(), path, "eva", "")
			return err
		}, "the token was revoked at"},
		"expired": {func(t *testing.T, path string) error {
			return rewrite(t, path, "expires=", "expires=2026-01-01T00:00:00Z")
		}, "the token has expired at 2026-01-01"},
		"role": {func(t *testing.T, path string) error { return rewrite(t, path, "auditor", "reader") }, "has the role reader now"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			users, tokens := issued(t)
			h := newHarness(t, Options{Users: users})
			h.train("bert", 1)
			stays, stay := context.WithCancel(t.Context())
			defer stay()
			other := make(chan error, 1)
			began := make(chan struct{})
			go func() {
				other <- h.follow(stays, "?after=0", func(m message) bool {
					if m.name == "caught-up" {
						close(began)
					}
					return m.name != "unauthorized"
				}, "Authorization: Bearer "+tokens["rosa"])
			}()
			<-began
			var last message
			done := false
			err := h.follow(t.Context(), "?after=0", func(m message) bool {
				if m.name == "caught-up" {
					if err := end.do(t, users.path); err != nil {
						t.Error(err)
					}
				}
				last, done = m, m.name == "unauthorized"
				return true
			}, "Authorization: Bearer "+tokens["eva"])
			var d httpkit.Details
			if err != nil || !done || json.Unmarshal([]byte(last.data), &d) != nil || d.Status != http.StatusUnauthorized || !strings.Contains(d.Detail, end.want) {
				t.Errorf("the last message is %+v: %v", last, err)
			}
			h.record("other", "main", &events.JobStarted{Job: "j"})
			select {
			case err := <-other:
				t.Errorf("the stream of another user ended: %v", err)
			default:
				stay()
				if err := <-other; !errors.Is(err, context.Canceled) {
					t.Errorf("the stream of another user ended: %v", err)
				}
			}
		})
	}
}

// rewrite changes words of a file of users that begin with a text.
func rewrite(t *testing.T, path, begin, to string) error {
	t.Helper()
	text := read(t, path)
	for word := range strings.FieldsSeq(text) {
		if strings.HasPrefix(word, begin) {
			text = strings.ReplaceAll(text, word, to)
		}
	}
	return changeUsers(t.Context(), path, func(roster, []string) ([]string, error) { return []string{text}, nil })
}

// TestStalledStreamOfRevokedToken: a client that takes nothing, so that a write to it waits, is
// cut when its token is revoked.
func TestStalledStreamOfRevokedToken(t *testing.T) {
	t.Parallel()
	const many, size = 3000, 4000
	users, tokens := issued(t)
	h := newHarness(t, Options{Users: users})
	h.reports("r", many, strings.Repeat("x", size))
	handler := New(h.st, Options{Users: users, writeLimit: time.Hour})
	server := httptest.NewServer(handler)
	defer server.Close()
	defer handler.Close()
	stalled, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stalled.Close() }()
	fmt.Fprintf(stalled, "GET %s/stream?after=0 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n\r\n", Prefix, tokens["eva"])
	open := func() int {
		handler.hub.mu.Lock()
		defer handler.hub.mu.Unlock()
		return handler.hub.clients
	}
	until(t, "the stream begins", func() bool { return open() == 1 })
	if _, err := RevokeTokens(t.Context(), users.path, "eva", ""); err != nil {
		t.Fatal(err)
	}
	until(t, "the stream ends", func() bool { return open() == 0 })
	if err := stalled.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	n, err := io.Copy(io.Discard, stalled)
	if n >= many*size {
		t.Errorf("the client got %d bytes, %v: it was not stalled", n, err)
	}
}

// until waits for a condition.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	limit, tick := time.After(time.Minute), time.NewTicker(5*time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("not in a minute: %s", what)
		}
	}
}

// reports appends reports of metrics with a text.
func (h *harness) reports(run string, n int, text string) {
	h.t.Helper()
	for first := 0; first < n; first += 100 {
		var facts []events.Fact
		for i := first; i < min(n, first+100); i++ {
			f, err := events.NewFact(events.Stamp{ID: fmt.Sprintf("%s-%d", run, i), Source: "test", Time: time.Now()}, events.Scope{Run: run, Trial: "main", Actor: events.Node(0)},
				&events.Metrics{Attempt: 1, Iteration: i + 1, Step: int64(i), Metrics: map[string]any{"text": text}})
			if err != nil {
				h.t.Fatal(err)
			}
			facts = append(facts, f)
		}
		if _, err := h.st.Log.Append(h.t.Context(), facts...); err != nil {
			h.t.Fatal(err)
		}
	}
}
