package nodes

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"
)

// Only a process with the job's token is served, and only the node whose certificate was
// declared is asked.
func TestPeersKnowEachOther(t *testing.T) {
	t.Parallel()
	peers := func() (*Peers, Node) {
		p, err := ListenPeers(t.Context(), "127.0.0.1", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Close() })
		n := Node{Address: "127.0.0.1"}
		p.Declare(&n)
		return p, n
	}
	p, n := peers()
	ask := func(token, pin string) (status int, err error) {
		c := peerClient(nil, token, pin)
		defer c.CloseIdleConnections()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, n.PeerURL()+"/x", strings.NewReader("text"))
		if err != nil {
			t.Fatal(err)
		}
		reply, err := c.Do(r)
		if err != nil {
			return 0, err
		}
		defer func() { _ = reply.Body.Close() }()
		_, err = io.Copy(io.Discard, reply.Body)
		return reply.StatusCode, err
	}
	wants := func(what, token, pin string, want int) {
		t.Helper()
		if got, err := ask(token, pin); got != want || err != nil {
			t.Errorf("%s: status %d, %v; want %d", what, got, err, want)
		}
	}
	wants("before it has joined", "token", n.PeerPin, http.StatusServiceUnavailable)
	p.serveWith("token", http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	wants("with the job's token", "token", n.PeerPin, http.StatusOK)
	wants("with another token", "other", n.PeerPin, http.StatusUnauthorized)
	wants("without a token", "", n.PeerPin, http.StatusUnauthorized)
	_, other := peers()
	if _, err := ask("token", other.PeerPin); !errors.Is(err, errOtherPeer) {
		t.Errorf("another certificate than the declared one: %v", err)
	}
	if url := (Node{Address: "127.0.0.1"}).PeerURL(); url != "" {
		t.Errorf("a node without a port has the URL %s", url)
	}
}

// deadlined records the deadlines that a handler sets.
type deadlined struct {
	*httptest.ResponseRecorder
	read, write time.Time
}

func (d *deadlined) SetReadDeadline(at time.Time) error {
	d.read = at
	return nil
}

func (d *deadlined) SetWriteDeadline(at time.Time) error {
	d.write = at
	return nil
}

// The server of HTTP reads what is left of a refused request's body. So all requests without the job's token
// have a deadline, whatever their path. Those that have the token get handlers with limits of their own.
func TestRefusedRequestsEnd(t *testing.T) {
	t.Parallel()
	p, err := ListenPeers(t.Context(), "127.0.0.1", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	e := listen(t, func(*EndpointConfig) {}).Endpoint
	peers := http.HandlerFunc(p.serve)
	ask := func(what string, h http.Handler, path, token string, bounded bool) {
		t.Helper()
		r := httptest.NewRequest(http.MethodPost, path, strings.NewReader("text"))
		credential{token: token}.set(r)
		w := &deadlined{ResponseRecorder: httptest.NewRecorder()}
		h.ServeHTTP(w, r)
		if w.read.IsZero() == bounded || w.write.IsZero() == bounded {
			t.Errorf("%s: status %d, deadlines %v and %v", what, w.Code, w.read, w.write)
		}
	}
	ask("peers before they have joined", peers, "/v1/replicas/find", "token", true)
	p.serveWith("token", http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	ask("peers with the token", peers, "/v1/loads/1/1/1", "token", false)
	ask("peers with another token", peers, "/v1/replicas/find", "other", true)
	for _, path := range []string{"/v1/beat", "/v1/join", "/v1/job", "/relay/x", "/none"} {
		ask("the endpoint at "+path, e.handler(), path, "other", true)
	}
	ask("a node that is no member", e.handler(), "/relay/x", e.token, true)
}

// An endpoint on this node is reached from its own address. A name of this node that means its
// loopback address is not what other nodes connect to.
func TestLocalAddress(t *testing.T) {
	t.Parallel()
	for endpoint, want := range map[string]string{"127.0.0.1:29400": "127.0.0.1", "127.0.0.7:29400": "127.0.0.1"} {
		if got, err := LocalAddress(t.Context(), endpoint); got != want || err != nil {
			t.Errorf("%s: %q, %v; want %q", endpoint, got, err, want)
		}
	}
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := LocalAddress(t.Context(), net.JoinHostPort(name, "29400")); err == nil && strings.HasPrefix(got, "127.") {
		t.Errorf("%s: %q is of no use for other nodes", name, got)
	}
	if _, err := LocalAddress(t.Context(), "no port"); err == nil {
		t.Error("an endpoint without a port has an address")
	}
}
