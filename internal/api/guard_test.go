package api

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

// TestRefusals: each of these requests is refused. Every one of them was seen answered with
// its guard removed.
func TestRefusals(t *testing.T) {
	t.Parallel()
	observed := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "observed "+r.URL.Path) })
	h := newHarness(t, Options{Hosts: []string{"train.example"}, Observe: observed})
	h.train("bert", 1)
	const runs, pin = Prefix + "/runs", Prefix + "/runs/bert/checkpoints/step-10.a1/pin"
	for _, c := range []struct {
		what, method, path, token, body string
		headers                         []string
		status                          int
		part                            string
	}{
		{"no token", "GET", runs, "", "", nil, 401, "ckptstore ui"},
		{"a wrong token", "GET", runs, "token-of-reade", "", nil, 401, "token"},
		{"the token in a cookie", "GET", runs, "", "", []string{"Cookie: token=" + readToken1}, 401, "token"},
		{"the token in the query", "GET", runs + "?token=" + readToken1, "", "", nil, 401, "token"},
		{"another scheme", "GET", runs, "", "", []string{"Authorization: Basic " + readToken1}, 401, "token"},
		{"the document without a token", "GET", Prefix + "/openapi.json", "", "", nil, 401, "token"},
		{"the stream without a token", "GET", Prefix + "/stream", "", "", nil, 401, "token"},
		{"metrics without a token", "GET", "/metrics", "", "", nil, 401, "token"},
		{"metrics of a foreign host", "GET", "/metrics", readToken1, "", []string{"Host: evil.example"}, 403, "evil.example"},
		{"a foreign host", "GET", runs, readToken1, "", []string{"Host: evil.example"}, 403, "evil.example"},
		{"a foreign host with a port", "GET", runs, readToken1, "", []string{"Host: evil.example:7700"}, 403, "evil.example"},
		{"a host that begins like this one", "GET", runs, readToken1, "", []string{"Host: 127.0.0.1.evil.example"}, 403, "evil.example"},
		{"a host that ends like this one", "GET", runs, readToken1, "", []string{"Host: evil-localhost:80"}, 403, "evil"},
		{"a user in the host", "GET", runs, readToken1, "", []string{"Host: 127.0.0.1:80@evil.example"}, 403, "not called"},
		{"no host", "GET", runs, readToken1, "", []string{"Host: :7700"}, 403, "not called"},
		{"the page of a foreign host", "GET", "/", "", "", []string{"Host: evil.example"}, 403, "evil"},
		{"a POST from another site", "PUT", pin, writeToken, "{}", []string{"Sec-Fetch-Site: cross-site"}, 403, "cross-origin"},
		{"a POST from another origin", "PUT", pin, writeToken, "{}", []string{"Origin: http://evil.example"}, 403, "cross-origin"},
		{"a POST from another port", "PUT", pin, writeToken, "{}", []string{"Sec-Fetch-Site: same-site"}, 403, "cross-origin"},
		{"a reader who pins", "PUT", pin, readToken1, "{}", nil, 403, "rosa is reader"},
		{"a reader who stops", "POST", Prefix + "/runs/bert:stop", readToken1, "{}", nil, 403, "operator"},
		{"a reader who forks", "POST", Prefix + "/runs/bert:fork", readToken1, `{"name":"x"}`, nil, 403, "operator"},
		{"a reader who lists access", "GET", Prefix + "/access", readToken1, "", nil, 403, "for admin, auditor"},
		{"an operator who lists access", "GET", Prefix + "/access", writeToken, "", nil, 403, "olaf is operator"},
		{"an auditor who reads metrics", "GET", "/metrics", auditToken, "", nil, 403, "eva is auditor"},
		{"an auditor who pins", "PUT", pin, auditToken, "{}", nil, 403, "eva is auditor"},
		{"a reader who unpins", "DELETE", pin, readToken1, "", nil, 403, "operator"},
		{"a long body", "PUT", pin, writeToken, `{"reason":"` + strings.Repeat("x", maxBody) + `"}`, nil, 413, "body"},
		{"a body that is no object", "PUT", pin, writeToken, `[]`, nil, 400, "object"},
		{"an unknown member", "PUT", pin, writeToken, `{"reasons":"x"}`, nil, 400, "reasons"},
	} {
		h.refusedAs(c.what, h.call(c.method, c.path, c.token, c.body, c.headers...), c.status, c.part)
	}
	for _, host := range []string{"localhost", "localhost:8800", "127.0.0.1", "127.9.9.9:1", "[::1]:7700", "[::1]", "LOCALHOST.", "train.example:443"} {
		if r := h.call("GET", runs, readToken1, "", "Host: "+host); r.status != http.StatusOK {
			t.Errorf("host %s: %d %s", host, r.status, r.body)
		}
	}
	if r := h.call("GET", "/metrics", readToken1, ""); r.status != http.StatusOK || r.body != "observed /metrics" {
		t.Errorf("metrics: %d %s", r.status, r.body)
	}
	// A supervisor calls the server by its address, and has no token.
	for _, probe := range []string{"/healthz", "/readyz"} {
		if r := h.call("GET", probe, "", "", "Host: 10.1.2.3:7700"); r.status != http.StatusOK || r.body != "observed "+probe {
			t.Errorf("%s: %d %s", probe, r.status, r.body)
		}
	}
	if r := h.call("PUT", pin, writeToken, "{}", "Sec-Fetch-Site: same-origin"); r.status != http.StatusOK {
		t.Errorf("a decision of the page: %d %s", r.status, r.body)
	}
	if r := h.call("PUT", pin, writeToken, ""); r.status != http.StatusOK {
		t.Errorf("a decision without a body: %d %s", r.status, r.body)
	}
}

// TestHeaders: no answer can be read by another site, framed, cached by a proxy, or taken for
// a document.
func TestHeaders(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	for _, path := range []string{"/", Prefix + "/runs", Prefix + "/nothing"} {
		head := h.call("GET", path, readToken1, "", "Origin: http://evil.example").head
		for name, want := range map[string]string{
			"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Access-Control-Allow-Origin": "", "Set-Cookie": "", "Cache-Control": "no-store",
		} {
			if got := head.Get(name); got != want {
				t.Errorf("%s: %s is %q, want %q", path, name, got, want)
			}
		}
		if policy := head.Get("Content-Security-Policy"); !strings.Contains(policy, "default-src 'none'") || !strings.Contains(policy, "frame-ancestors 'none'") {
			t.Errorf("%s has the policy %q", path, policy)
		}
	}
	if r := h.call("GET", "/", "", ""); !strings.Contains(r.body, Prefix+"/openapi.json") {
		t.Errorf("without a page: %s", r.body)
	}
	paged := h.serve(h.st, Options{Page: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Security-Policy", "of the page")
		_, _ = w.Write([]byte("the page"))
	})})
	if r := h.callAt(t.Context(), paged, "GET", "/assets/x.js", "", ""); r.body != "the page" || r.head.Get("Content-Security-Policy") != "of the page" {
		t.Errorf("with a page: %v %s", r.head, r.body)
	}
	if r := h.call("PUT", Prefix+"/runs", writeToken, "{}"); r.status != http.StatusMethodNotAllowed || r.head.Get("Allow") != "GET" {
		t.Errorf("PUT of a list: %d, Allow %q", r.status, r.head.Get("Allow"))
	}
	h.refusedAs("an unknown path", h.call("GET", Prefix+"/nothing", readToken1, ""), 404, "openapi.json")
	for _, c := range []struct{ method, path, allow string }{
		{"POST", "/runs/bert", "GET"},
		{"OPTIONS", "/runs/bert", "GET"},
		{"OPTIONS", "/runs/bert:stop", "POST"},
		{"PUT", "/runs/a%3Ab", "GET"},
		{"OPTIONS", "/runs/bert/checkpoints/x/pin", "PUT, DELETE"},
	} {
		r := h.call(c.method, Prefix+c.path, writeToken, "")
		if h.refusedAs(c.method+" "+c.path, r, 405); r.head.Get("Allow") != c.allow {
			t.Errorf("%s %s: Allow %q, want %q", c.method, c.path, r.head.Get("Allow"), c.allow)
		}
	}
	for _, query := range []string{"as_of=", "as_of=1&as_of=2", "limit=", "limit=1&limit=2", "page=&page=", "%zz"} {
		h.refusedAs(query, h.call("GET", Prefix+"/runs?"+query, readToken1, ""), 400)
	}
	for _, header := range []string{"Idempotency-Key: ", "If-Match: "} {
		h.refusedAs("an empty header", h.call("POST", Prefix+"/runs/bert:stop", writeToken, "", header), 400, "no value")
	}
	h.refusedAs("an unknown verb", h.call("POST", Prefix+"/runs/bert:explode", writeToken, "{}"), 405)
}
