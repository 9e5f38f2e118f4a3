package api

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// answerPolicy is the Content-Security-Policy of all answers but those of the page, which sets its
// own: no other answer is a document.
const answerPolicy = "default-src 'none'; frame-ancestors 'none'; sandbox"

// guarded refuses requests for other hosts, and those that another site makes a browser send.
// A page of another site cannot read an answer: nothing allows it by CORS. A page whose name
// was made to resolve to this address could, so the host is checked.
func (h *Handler) guarded(next http.Handler) http.Handler {
	var origins http.CrossOriginProtection
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		head := w.Header()
		head.Set("X-Content-Type-Options", "nosniff")
		head.Set("Referrer-Policy", "no-referrer")
		head.Set("Cross-Origin-Resource-Policy", "same-origin")
		head.Set("Content-Security-Policy", answerPolicy)
		head.Set("Cache-Control", "no-store")
		if !h.servesHost(r.Host) {
			httpkit.Refuse(w, problem.Errorf(problem.Denied, "this server is not called %q: use the address that `ckptstore ui` prints, or name the host with --http-host", r.Host))
			return
		}
		if err := origins.Check(r); err != nil {
			httpkit.Refuse(w, problem.Wrap(problem.Denied, err))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// servesHost reports whether a Host header names this server. The port may be that of a
// tunnel.
func (h *Handler) servesHost(host string) bool {
	name := host
	if split, _, err := net.SplitHostPort(host); err == nil {
		name = split
	} else if inner, ok := strings.CutPrefix(host, "["); ok {
		if name, ok = strings.CutSuffix(inner, "]"); !ok {
			return false
		}
	}
	if name == "" || strings.ContainsAny(name, "@/\\ ") {
		return false
	}
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if address, err := netip.ParseAddr(name); err == nil && address.IsLoopback() {
		return true
	}
	return name == "localhost" || slices.ContainsFunc(h.o.Hosts, func(mine string) bool { return strings.EqualFold(mine, name) })
}

// another is the next step of a client whose token is not accepted.
const another = "ask the operator of the server for a token; `ckptstore ui` prints the link with that of your own server"

// authorized refuses requests without the token of a user, and those that the user's role does
// not allow.
func (h *Handler) authorized(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, err := bearer(h.o.Users, r)
		if err != nil {
			w.Header().Set("WWW-Authenticate", `Bearer realm="ckptstore"`)
			httpkit.Refuse(w, fmt.Errorf("%w: %s", err, another))
			return
		}
		if right := need(r); !user.Role.May(right) {
			httpkit.Refuse(w, problem.Errorf(problem.Denied, "user %s is %s, and %s %s is for %s: ask the operator of the server for another role", user.Name, user.Role, r.Method, r.URL.Path, with(right)))
			return
		}
		next.ServeHTTP(w, r.WithContext(withUser(r.Context(), user)))
	})
}

// collected is an answer that is kept until it is complete.
type collected struct {
	head   http.Header
	status int
	body   bytes.Buffer
}

// Header implements [http.ResponseWriter].
func (c *collected) Header() http.Header { return c.head }

// WriteHeader implements [http.ResponseWriter].
func (c *collected) WriteHeader(status int) {
	if c.status == 0 {
		c.status = status
	}
}

// Write implements [http.ResponseWriter].
func (c *collected) Write(p []byte) (int, error) {
	c.WriteHeader(http.StatusOK)
	return c.body.Write(p)
}

// smallAnswer is the length in bytes up to which an answer is not compressed.
const smallAnswer = 1 << 10

// validated gives answers to GET an ETag of their body, answers 304 where the client has the
// body, and compresses long ones. Streams pass.
func validated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead || r.URL.Path == Prefix+"/stream" {
			next.ServeHTTP(w, r)
			return
		}
		c := &collected{head: w.Header()}
		next.ServeHTTP(c, r)
		if c.status == 0 {
			c.status = http.StatusOK
		}
		body := c.body.Bytes()
		head := w.Header()
		head.Add("Vary", "Authorization, Accept-Encoding")
		if c.status == http.StatusOK {
			sum := sha256.Sum256(body)
			tag := `W/"` + hex.EncodeToString(sum[:12]) + `"` // weak: the same for every encoding
			head.Set("ETag", tag)
			if holds(r.Header.Get("If-None-Match"), tag) {
				head.Del("Content-Type")
				w.WriteHeader(http.StatusNotModified)
				return
			}
		}
		if len(body) > smallAnswer && httpkit.TakesGzip(r.Header.Get("Accept-Encoding")) {
			var short bytes.Buffer
			z := gzip.NewWriter(&short)
			_, err := z.Write(body)
			if err == nil && z.Close() == nil {
				head.Set("Content-Encoding", "gzip")
				body = short.Bytes()
			}
		}
		w.WriteHeader(c.status)
		if r.Method != http.MethodHead {
			_, _ = w.Write(body) // a disconnected client needs no answer
		}
	})
}

// dotted gives a run named "." or ".." its path. Browsers remove such segments of a path, in every
// encoding, so the page asks for /runs/-?run=..
func dotted(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rest, found := strings.CutPrefix(r.URL.Path, Prefix+"/runs/-")
		if name := r.URL.Query().Get("run"); found && (name == "." || name == "..") && (rest == "" || rest[0] == '/') {
			raw, _ := strings.CutPrefix(r.URL.EscapedPath(), Prefix+"/runs/-")
			r = r.Clone(r.Context())
			r.URL.Path = Prefix + "/runs/" + name + rest
			r.URL.RawPath = Prefix + "/runs/" + strings.ReplaceAll(name, ".", "%2E") + raw
		}
		next.ServeHTTP(w, r)
	})
}

// holds reports whether a list of entity tags has one.
func holds(list, tag string) bool {
	for one := range strings.SplitSeq(list, ",") {
		if one = strings.TrimSpace(one); one == "*" || one == tag || "W/"+one == tag {
			return true
		}
	}
	return false
}
