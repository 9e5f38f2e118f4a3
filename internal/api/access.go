package api

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Identity is the user of a request, as the server knows it.
type Identity struct {
	Principal string    `json:"principal"` // user:NAME; uid:N for the server's own user
	Name      string    `json:"name"`
	Role      string    `json:"role" enum:"reader,operator,admin,auditor"`
	Token     string    `json:"token,omitempty"` // name of the token
	Hash      string    `json:"hash"`            // the first 16 hexadecimal digits of the token's SHA-256
	Expires   time.Time `json:"expires,omitzero"`
	May       []string  `json:"may"` // in words
}

// IssuedToken is a token of a user.
type IssuedToken struct {
	Token   string    `json:"token,omitempty"` // name of the token
	Hash    string    `json:"hash"`            // the first 16 hexadecimal digits of its SHA-256
	Expires time.Time `json:"expires,omitzero"`
	Expired bool      `json:"expired"`
}

// UserAccess is a user with its tokens.
type UserAccess struct {
	Name   string        `json:"name"`
	Role   string        `json:"role" enum:"reader,operator,admin,auditor"`
	Tokens int           `json:"tokens"`
	Issued []IssuedToken `json:"issued"`
}

// AccessList is who has access to the server. As of a sequence, it is that of now.
type AccessList struct {
	Users []UserAccess `json:"users"`
}

// AccessOf lists the users of tokens, in the order of their first tokens.
func AccessOf(all Users) []UserAccess {
	list, now := []UserAccess{}, time.Now()
	at := map[string]int{}
	for _, u := range all {
		i, had := at[u.Name]
		if !had {
			i = len(list)
			at[u.Name], list = i, append(list, UserAccess{Name: u.Name, Role: u.Role.String(), Issued: []IssuedToken{}})
		}
		list[i].Tokens++
		list[i].Issued = append(list[i].Issued, IssuedToken{Token: u.Token, Hash: u.Hash(), Expires: u.Expires, Expired: u.expired(now)})
	}
	return list
}

// moment implements [asked].
func (OfNow) moment() (asOf uint64, chosen bool, err error) { return 0, false, nil }

// readAccess adds the reads about users.
func (h *Handler) readAccess() {
	get(h, "/whoami", "get-whoami", "access", "Describe the user of the request", "As `ckptstore access whoami --http URL --json`.", func(ctx context.Context, from *at, _ *OfNow) (Identity, error) {
		from.files = true // of now: the token
		u := userOf(ctx)
		return Identity{
			Principal: u.Principal(), Name: u.Name, Role: u.Role.String(), Token: u.Token, Hash: u.Hash(), Expires: u.Expires, May: u.Role.Words(),
		}, nil
	})
	get(h, "/access", "list-access", "access", "List the users of the server", "As `ckptstore access list --http URL --json`, for admins and auditors.", func(_ context.Context, from *at, _ *OfNow) (AccessList, error) {
		from.files = true // of now: the file of users
		return AccessList{AccessOf(h.o.Users.List())}, nil
	})
}

// evidence serves the tamper evidence of the store in the form of C2SP tlog-tiles, as
// `ckptstore audit serve` does.
func (h *Handler) evidence(w http.ResponseWriter, r *http.Request) {
	book, err := h.store.Tiles()
	if err != nil {
		httpkit.Refuse(w, fmt.Errorf("evidence of the log: %w", err))
		return
	}
	tiles := book.Handler(func(err error) { h.o.Logger.Error("evidence not read", "path", r.URL.Path, "error", err) })
	http.StripPrefix(Prefix+"/audit", tiles).ServeHTTP(w, r)
}

// longAnswer is the longest answer that [Ask] reads, in bytes.
const longAnswer = 16 << 20

// Ask reads an answer of the server of an API at a URL: that of GET /path. A refusal is an error
// of the kind that the server names.
func Ask(ctx context.Context, client *http.Client, server, path, token string, into any) error {
	at, err := url.Parse(server)
	switch {
	case err != nil, at.Host == "", at.Scheme != "http" && at.Scheme != "https":
		return problem.Errorf(problem.Invalid, "%q: want the URL of an HTTP API, such as https://train.example:7700", server)
	case at.Scheme == "http" && !loopback(at.Hostname()):
		return problem.Errorf(problem.Invalid, "%s: without TLS others can read the token on the way: give an https:// URL, or tunnel to 127.0.0.1", at.Redacted())
	}
	if token == "" {
		return problem.Errorf(problem.Unauthorized, "%s: no token is given", at.Redacted())
	}
	at.User, at.RawQuery, at.Fragment, at.Path = nil, "", "", strings.TrimSuffix(at.Path, "/")+Prefix+"/"+path
	bad := func(kind problem.Kind, format string, values ...any) error {
		return problem.Errorf(kind, "%s: "+format, append([]any{at}, values...)...)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		return bad(problem.Invalid, "%w", err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	direct := *client // a redirect could lead to where others can read the token
	direct.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	resp, err := direct.Do(req)
	if err != nil {
		return bad(problem.NoStore, "%w; check that `ckptstore serve --http` runs there", err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(resp.Body, longAnswer))
	if err != nil {
		return bad(problem.NoStore, "%w", err)
	}
	var refusal httpkit.Details
	switch {
	case resp.StatusCode == http.StatusOK:
		if err := json.Unmarshal(text, into); err != nil {
			return bad(problem.Internal, "the answer cannot be read: %w: is that a ckptstore?", err)
		}
		return nil
	case resp.StatusCode/100 == 3:
		to := "another URL"
		if target, err := resp.Location(); err == nil {
			to = target.Redacted()
		}
		return bad(problem.Invalid, "it redirects to %s, where the token is not sent: if that is the server, give its URL", to)
	case json.Unmarshal(text, &refusal) == nil && refusal.Kind != "":
		return bad(refusal.Kind, "%s", refusal.Detail)
	}
	return bad(problem.Internal, "%s; is that a ckptstore?", resp.Status)
}
