package nodes

import (
	"bytes"
	"crypto/tls"
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

// A connection takes memory for large bodies once a request with the job's token has come by it: others may open
// as many as they like.
func TestBuffersOfTrustedPeers(t *testing.T) {
	t.Parallel()
	p, err := ListenPeers(t.Context(), "127.0.0.1", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	var n Node
	n.Address = "127.0.0.1"
	p.Declare(&n)
	body := strings.Repeat("body", 1<<18)
	sizes := make(chan int, 2) // of the buffer, in the midst of a body
	p.serveWith("token", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var got bytes.Buffer
		_, _ = io.CopyN(&got, r.Body, int64(len(body)/2))
		sizes <- r.Context().Value(bulkKey{}).(*bulk).under.in.Size()
		_, _ = io.Copy(&got, r.Body)
		_, _ = w.Write(got.Bytes())
	}))
	for _, token := range []string{"", "token", "token"} {
		c := peerClient(nil, token, n.PeerPin)
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, n.PeerURL()+"/x", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		reply, err := c.Do(r)
		if err != nil {
			if token == "" {
				continue // the server has closed the connection with what it has not read
			}
			t.Fatal(err)
		}
		got, err := io.ReadAll(reply.Body)
		if token != "" && (err != nil || string(got) != body) {
			t.Errorf("%d bytes come back: %v", len(got), err)
		}
		_ = reply.Body.Close()
		c.CloseIdleConnections()
	}
	for range 2 {
		if size := <-sizes; size != bulkBuffer {
			t.Errorf("a buffer of %d bytes for a request with the token", size)
		}
	}
}

// pipes is a listener that accepts some connections.
type pipes struct {
	net.Listener
	left int
	far  net.Conn // the other end of the last one
}

func (l *pipes) Accept() (near net.Conn, err error) {
	if l.left == 0 {
		return nil, net.ErrClosed
	}
	l.left--
	near, l.far = net.Pipe()
	return near, nil
}

// Connections beyond a bound are closed at once, unless a request with the job's token has come by earlier ones,
// or those have ended.
func TestStrangersAreBounded(t *testing.T) {
	t.Parallel()
	p := &pipes{}
	l := &strangers{Listener: p}
	var all []*bulk
	accept := func(n int) {
		t.Helper()
		p.left = n
		for {
			c, err := bulkListener{l, &tls.Config{}}.Accept()
			if err != nil {
				break
			}
			all = append(all, c.(*bulk))
		}
	}
	accept(maxStrangers + 3)
	if len(all) != maxStrangers {
		t.Fatalf("%d connections are accepted, want %d", len(all), maxStrangers)
	}
	if _, err := p.far.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("one too many: %v", err)
	}
	if size := all[0].under.in.Size(); size != firstBuffer {
		t.Errorf("a new connection has a buffer of %d bytes, want %d", size, firstBuffer)
	}
	all[0].trust()
	all[0].trust()
	_, _ = all[0].Close(), all[1].Close()
	if accept(3); len(all) != maxStrangers+2 {
		t.Errorf("%d connections are accepted, want %d", len(all), maxStrangers+2)
	}
	for _, c := range all {
		_, _ = c.Close(), c.Close()
	}
	if n := l.count.Load(); n != 0 {
		t.Errorf("%d connections are not trusted after all have ended", n)
	}
}

// The connections of joined nodes to the endpoint are not counted as those of strangers.
func TestNodesAreNoStrangers(t *testing.T) {
	t.Parallel()
	j := listen(t, nil)
	closed(t, "contact", join1(t, j.agent("a", -1)).Contact())
	for limit := within(t); ; {
		unknown, known := 0, 0
		j.mu.Lock()
		for _, c := range j.conns {
			if len(c.sessions) > 0 {
				known++
			} else {
				unknown++
			}
		}
		count := int(j.strangers.count.Load())
		j.mu.Unlock()
		if known > 0 && count == unknown {
			return
		}
		if limit.Err() != nil { // otherwise one may be being accepted
			t.Fatalf("%d strangers, with %d connections of nodes and %d others", count, known, unknown)
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-limit.Done():
		}
	}
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
