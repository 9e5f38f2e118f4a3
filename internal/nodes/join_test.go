package nodes

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// TestJoinRefused lists the agents that cannot join, and what their errors name.
func TestJoinRefused(t *testing.T) {
	t.Parallel()
	// The coordinator's clock stands still, so that it loses no node.
	shared := listen(t, func(c *EndpointConfig) {
		c.Timeout, c.Self.Nodes = 200*time.Millisecond, "2:4"
		c.Now = func() time.Time { return epoch }
	})
	token := listen(t, func(c *EndpointConfig) { c.Dir, c.Token = "", "a long and secret token" })
	join1(t, shared.agent("held", 1))
	other := listen(t, func(c *EndpointConfig) { c.Self.Host = "beta" })
	for _, c := range []struct {
		name   string
		j      *job
		change func(*JoinConfig)
		kind   problem.Kind
		parts  []string
	}{
		{
			"another directory", shared, func(c *JoinConfig) { c.Dir = t.TempDir() }, problem.Foreign,
			[]string{"host-new (process 10)", "job-1.json", "not the same directory", shared.Addr().String()},
		},
		{
			"the directory of another job of this name", shared, func(c *JoinConfig) { c.Dir = other.dir }, problem.Foreign,
			[]string{"certificate is not that of job job-1", "another job"},
		},
		{"a token for a shared directory", shared, func(c *JoinConfig) { c.Token = "x" }, problem.Unauthorized, []string{"shared directory"}},
		{"a directory for a token", token, nil, problem.Unauthorized, []string{"was given a token"}},
		{"a wrong token", token, func(c *JoinConfig) { c.Token = "y" }, problem.Unauthorized, []string{"token", "job-1", "same token"}},
		{"another version", shared, func(c *JoinConfig) { c.Self.Version = "v2" }, problem.Invalid, []string{`"v1"`, `"v2"`, "same version"}},
		{"another store", shared, func(c *JoinConfig) { c.Self.Store = "store-2" }, problem.Foreign, []string{"store-1", "store-2", "alpha", "host-new"}},
		{"the index of a live node", shared, func(c *JoinConfig) { c.Self.Index = 1 }, problem.Conflict, []string{"host-held (process 10)", "host-new (process 10)", "index 1"}},
		{"the key of a live node", shared, func(c *JoinConfig) { c.Self.Key = "held" }, problem.Conflict, []string{"host-held (process 10)", "host-new (process 10)", `"held"`}},
		{"an impossible index", shared, func(c *JoinConfig) { c.Self.Index = -5 }, problem.Invalid, []string{"-5"}},
		{"no port", shared, func(c *JoinConfig) { c.Address = "127.0.0.1" }, problem.Invalid, []string{"HOST:PORT"}},
		{"neither directory nor token", shared, func(c *JoinConfig) { c.Dir = "" }, problem.Invalid, []string{"shared directory or a token"}},
	} {
		a := c.j.agent("new", -1)
		if c.change != nil {
			c.change(&a)
		}
		_, err := Join(within(t), a)
		if kindOf(err) != c.kind {
			t.Errorf("%s: %v, want %s", c.name, err, c.kind)
			continue
		}
		for _, part := range c.parts {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: no %q in %v", c.name, part, err)
			}
		}
	}
	good := token.agent("good", -1)
	good.Dir, good.Token = "", "a long and secret token"
	if l := join1(t, good); l.Index() != 1 {
		t.Errorf("index %d", l.Index())
	}
	different := shared.agent("different", -1)
	different.Self.Command, different.Self.Procs, different.Self.Nodes = "c2", 3, "2"
	join1(t, different)
	if text := shared.log.String(); !strings.Contains(text, "another command") || !strings.Contains(text, "has 3 workers") || strings.Count(text, "was started for 2 nodes, alpha (process") != 2 {
		t.Error("the differences are not logged")
	}
}

// TestJoinWaits: an agent that is started before the coordinator waits for it, and warns.
func TestJoinWaits(t *testing.T) {
	t.Parallel()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	dir, log := t.TempDir(), &records{}
	c := JoinConfig{Address: address, Dir: dir, Wait: time.Second, quiet: time.Millisecond, Logger: log.logger(), Self: Node{Key: "a", Index: -1, Host: "host-a", Version: "v1"}}
	_, err = Join(within(t), c)
	if kindOf(err) != problem.Unavailable || !errors.Is(err, ErrNoContact) || !errors.Is(err, syscall.ECONNREFUSED) {
		t.Error(err)
	}
	for _, part := range []string{address, "host-a", "within 1s", "start the agent of the endpoint's node"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("no %q in %v", part, err)
		}
	}
	if got := strings.Count(log.String(), "endpoint does not answer"); got != 1 {
		t.Errorf("%d warnings", got)
	}
	c.Wait = patient
	joined := make(chan error)
	go func() {
		l, err := Join(within(t), c)
		if err == nil {
			defer l.Close()
		}
		joined <- err
	}()
	j := listen(t, func(c *EndpointConfig) { c.Address, c.Dir = address, dir })
	if got := await[Joined](t, j.Endpoint); got.Member.Host != "host-a" {
		t.Errorf("%+v", got)
	}
	if err := <-joined; err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancelCause(within(t))
	cancel(errors.New("a signal"))
	if _, err := Join(ctx, c); err == nil || !strings.Contains(err.Error(), "a signal") {
		t.Error(err)
	}
}

// TestJoinForeign: other programs at the address of the endpoint are recognized.
func TestJoinForeign(t *testing.T) {
	t.Parallel()
	plain := func(l net.Listener) net.Listener { return l }
	certificate, err := newCertificate(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	secure := func(l net.Listener) net.Listener {
		return tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{certificate}})
	}
	for _, c := range []struct {
		name  string
		wrap  func(net.Listener) net.Listener
		reply any
		part  string
		kind  problem.Kind
	}{
		{"HTTP", plain, nothing{}, "another program listens there", problem.Foreign},
		{"another server", secure, nothing{}, "another program listens there", problem.Foreign},
		{"a later protocol", secure, jobInfo{Job: "job-1", Protocol: 2, Version: "v9", Shared: true}, `protocol 2 (version "v9"), this node has 1 (version "v1")`, problem.Invalid},
		{"a path as job", secure, jobInfo{Job: "../job-1", Protocol: 1, Version: "v1", Shared: true}, "malformed job ID", problem.Invalid},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		shown := make(chan string, 10)
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			shown <- r.Header.Get("Authorization")
			_ = httpkit.Reply(w, c.reply)
		}), ReadHeaderTimeout: time.Minute}
		go func() { _ = server.Serve(c.wrap(l)) }()
		_, err = Join(within(t), JoinConfig{Address: l.Addr().String(), Dir: t.TempDir(), Self: Node{Key: "a", Index: -1, Version: "v1"}, patience: time.Millisecond})
		if kindOf(err) != c.kind || !strings.Contains(err.Error(), c.part) {
			t.Errorf("%s: %v", c.name, err)
		}
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		close(shown)
		for token := range shown {
			if token != "" {
				t.Errorf("%s got the token", c.name)
			}
		}
	}
}

// TestTokenStaysSecret: a program between agent and coordinator, with a certificate of
// its own, does not get the token.
func TestTokenStaysSecret(t *testing.T) {
	t.Parallel()
	j := listen(t, func(c *EndpointConfig) { c.Dir, c.Token = "", "a long and secret token" })
	certificate, err := newCertificate(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{certificate}})
	if err != nil {
		t.Fatal(err)
	}
	through := connect(nil, "", time.Minute)
	defer through.close()
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			t.Error("the token was shown")
		}
		out, _, err := call[json.RawMessage](r.Context(), through, credential{}, r.Method, "https://"+j.Addr().String()+r.URL.String(), nil, smallBody)
		if err != nil {
			t.Error(err)
		}
		_ = httpkit.Reply(w, out)
	}), ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	c := j.agent("a", -1)
	c.Address, c.Dir, c.Token = l.Addr().String(), "", "a long and secret token"
	if _, err := Join(within(t), c); kindOf(err) != problem.Unauthorized {
		t.Error(err)
	}
}

// TestRestartedCoordinator: the links of an earlier coordinator end.
func TestRestartedCoordinator(t *testing.T) {
	t.Parallel()
	first := listen(t, short)
	l := join1(t, first.agent("a", -1))
	address := first.Addr().String()
	// The coordinator is killed: it does not end its job.
	first.mu.Lock()
	first.over, first.closed = nil, true
	first.mu.Unlock()
	_ = first.server.Close()
	second := listen(t, func(c *EndpointConfig) { short(c); c.Address, c.Job = address, "job-2" })
	closed(t, "the end of the link", l.Done())
	if !errors.Is(l.Err(), ErrRestarted) || !strings.Contains(l.Err().Error(), address) {
		t.Error(l.Err())
	}
	join1(t, second.agent("a", -1))
	first.mu.Lock()
	first.closed = false
	first.mu.Unlock()
}

// TestCredentials covers the file in the shared directory.
func TestCredentials(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "join")
	j := listen(t, func(c *EndpointConfig) { c.Dir = dir })
	path := filepath.Join(dir, "job-1.json")
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if c, err := readCredentials(dir, "job-1"); err != nil || c.Address != j.Addr().String() || c.Token != j.token || c.Certificate != j.certificate {
		t.Error(err)
	}
	if err := j.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file remains after Close: %v", err)
	}

	// A group's directory does not give the token to the group.
	if err := os.Chmod(dir, 0o770|os.ModeSetgid); err != nil {
		t.Fatal(err)
	}
	if err := (credentials{Token: "t"}).write(dir, "job-2"); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(dir, "job-2.json")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v", entries, err)
	}
	if err := os.Chmod(filepath.Join(dir, "job-2.json"), 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := readCredentials(dir, "job-2"); !errors.Is(err, private.ErrNotPrivate) {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "job-3.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readCredentials(dir, "job-3"); err == nil {
		t.Error("a truncated file was read")
	}
	if err := os.Symlink("job-2.json", filepath.Join(dir, "job-4.json")); err != nil {
		t.Fatal(err)
	}
	if _, err := readCredentials(dir, "job-4"); err == nil {
		t.Error("a symbolic link was followed")
	}
}

// TestFileBecomesVisible: an agent waits for a file that its node does not see yet.
func TestFileBecomesVisible(t *testing.T) {
	t.Parallel()
	j := listen(t, nil)
	path, hidden := filepath.Join(j.dir, "job-1.json"), filepath.Join(j.dir, "hidden")
	if err := os.Rename(path, hidden); err != nil {
		t.Fatal(err)
	}
	c := j.agent("a", -1)
	c.patience = 4 * time.Second
	asked := make(chan struct{})
	c.dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		select {
		case <-asked:
		default:
			close(asked)
		}
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	result := make(chan error)
	go func() {
		l, err := Join(within(t), c)
		if err == nil {
			l.Close()
		}
		result <- err
	}()
	closed(t, "the first connection", asked)
	if err := os.Rename(hidden, path); err != nil {
		t.Fatal(err)
	}
	if err := <-result; err != nil {
		t.Error(err)
	}
}

// TestListenRefuses lists the configurations that Listen refuses.
func TestListenRefuses(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*EndpointConfig){
		"MIN > MAX":       func(c *EndpointConfig) { c.Min, c.Max = 3, 2 },
		"no node":         func(c *EndpointConfig) { c.Min = 0 },
		"no maximum":      func(c *EndpointConfig) { c.Min, c.Max = -1, -1 },
		"no secret":       func(c *EndpointConfig) { c.Dir = "" },
		"a path as job":   func(c *EndpointConfig) { c.Job = "../x" },
		"no port":         func(c *EndpointConfig) { c.Address = "127.0.0.1" },
		"a large welcome": func(c *EndpointConfig) { c.Welcome = make([]byte, maxWelcome+1) },
		"negative T":      func(c *EndpointConfig) { c.Timeout = -1 },
		"no index":        func(c *EndpointConfig) { c.Self.Index = -7 },
	} {
		c := EndpointConfig{Address: "127.0.0.1:0", Dir: t.TempDir(), Job: "job-1", Min: 1, Max: 1}
		change(&c)
		if e, err := Listen(within(t), c); kindOf(err) != problem.Invalid {
			t.Errorf("%s: %v", name, err)
			if err == nil {
				_ = e.Close()
			}
		}
	}
	j := listen(t, nil)
	_, err := Listen(within(t), EndpointConfig{Address: j.Addr().String(), Dir: t.TempDir(), Job: "job-1", Min: 1, Max: 1})
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), "choose a free port") {
		t.Error(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(within(t), EndpointConfig{Address: "127.0.0.1:0", Dir: file, Job: "job-1", Min: 1, Max: 1}); err == nil {
		t.Error("a file was used as directory")
	}
}

// TestListenAt: an endpoint never listens on a loopback address that was not given.
func TestListenAt(t *testing.T) {
	t.Parallel()
	names := map[string]string{"debian": "127.0.1.1", "node0": "10.0.0.1", "node1": "10.0.0.2", "both": "127.0.1.1 10.0.0.1", "mapped": "::ffff:10.0.0.1"}
	m := machine{
		lookup: func(_ context.Context, host string) (list []netip.Addr, err error) {
			for a := range strings.FieldsSeq(names[host]) {
				list = append(list, netip.MustParseAddr(a))
			}
			if list == nil {
				err = errors.New("no such host")
			}
			return list, err
		},
		local: func() ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("10.0.0.1")}, nil
		},
	}
	for _, c := range []struct{ address, listen, warning string }{
		{"127.0.0.1:1", "127.0.0.1:1", ""},
		{"127.0.1.1:1", "127.0.1.1:1", ""},
		{"[::1]:1", "[::1]:1", ""},
		{"localhost:1", "localhost:1", ""},
		{":1", ":1", ""},
		{"10.0.0.9:1", "10.0.0.9:1", ""},
		{"node0:1", ":1", ""},
		{"both:1", ":1", ""},
		{"mapped:1", ":1", ""},
		{"debian:1", ":1", "debian is 127.0.1.1 on this node, where no other node can connect"},
		{"node1:1", ":1", "node1 is 10.0.0.2, but this node has 127.0.0.1, 10.0.0.1"},
		{"absent:1", ":1", "absent is unknown here"},
	} {
		listen, warning, err := m.listenAt(t.Context(), c.address)
		if err != nil || listen != c.listen || !strings.Contains(warning, c.warning) || (warning == "") != (c.warning == "") {
			t.Errorf("%s: %q, %q, %v", c.address, listen, warning, err)
		}
	}
	j := listen(t, func(c *EndpointConfig) { c.Address, c.machine = "debian:0", m })
	if got := j.Addr().(*net.TCPAddr); !got.IP.IsUnspecified() || !strings.Contains(j.log.String(), "endpoint host is not an address of this node") {
		t.Errorf("listens at %v", got)
	}
	if text := fmt.Sprint(j.Members()); strings.Contains(text, "127.0.1.1") {
		t.Errorf("the coordinator's node has a loopback address: %s", text)
	}
}

// A pod is its endpoint by its name, whatever a name server has for it: that name is
// published late, and leads to an earlier pod for a while. Another machine is it by a name or
// an address that is its own.
func TestIsHere(t *testing.T) {
	t.Parallel()
	names := map[string]string{"node0": "10.0.0.1", "node1": "10.0.0.2", "mapped": "::ffff:10.0.0.1", "bert-0.bert": "10.0.0.2", "bert-1.bert": "10.0.0.2", "10.0.0.1": "10.0.0.1", "stale-0.stale": "10.0.0.1"}
	m := machine{
		lookup: func(_ context.Context, host string) ([]netip.Addr, error) {
			if a, err := netip.ParseAddr(names[host]); err == nil {
				return []netip.Addr{a}, nil
			}
			return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
		},
		local: func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("10.0.0.1")}, nil },
	}
	for _, c := range []struct {
		host, name string
		pod, want  bool
	}{
		{"localhost", "host", false, true},
		{"host", "host", false, true},
		{"node0", "host", false, true},
		{"mapped", "host", false, true},
		{"10.0.0.1", "host", false, true},
		{"node1", "host", false, false},
		{"absent", "host", false, false},
		{"bert-0.bert", "bert-0", false, false},
		{"bert-0.bert", "bert-0", true, true},
		{"BERT-0.bert.team.svc", "bert-0", true, true},
		{"bert-0.absent", "bert-0", true, true},
		{"bert-0.bert", "bert-0.bert.team.svc.cluster.local", true, true},
		{"bert-0.bert", "bert-1", true, false},
		{"bert-1.bert", "bert-0", true, false},
		{"stale-0.stale", "stale-1", true, false},
		{"stale-0.stale", "stale-1", false, true},
		{"stale-0.stale", "other-1", true, true},
		{"node0", "bert-1", true, true},
		{"10.0.0.2", "10", true, false},
	} {
		m.name, m.pod = func() string { return c.name }, c.pod
		if got := m.is(t.Context(), c.host); got != c.want {
			t.Errorf("%s on %s, a pod: %v: %v", c.host, c.name, c.pod, got)
		}
	}
	// The endpoint of a pod listens at once, without a warning.
	m.name, m.pod = func() string { return "bert-0" }, true
	for _, at := range []string{"bert-0.bert:1", "bert-0.absent:1"} {
		if listen, warning, err := m.listenAt(t.Context(), at); listen != ":1" || warning != "" || err != nil {
			t.Errorf("%s: %q, %q, %v", at, listen, warning, err)
		}
	}
}

// TestRequestsAreChecked sends requests that no agent sends.
func TestRequestsAreChecked(t *testing.T) {
	t.Parallel()
	j := listen(t, nil)
	l := join1(t, j.agent("a", 1))
	c := connect(nil, j.certificate, time.Minute)
	defer c.close()
	base := "https://" + j.Addr().String()
	own := j.roster.entries[0].session
	describes := func(change func(*Node)) joinRequest {
		n := j.agent("b", 2).Self
		change(&n)
		return joinRequest{Protocol: 1, Session: rand.Text(), Node: n}
	}
	for _, r := range []struct {
		name, path string
		as         credential
		body       any
		kind       problem.Kind
	}{
		{"no token", "/v1/join", credential{}, nothing{}, problem.Unauthorized},
		{"a wrong token", "/v1/beat", credential{"x", l.as.session}, nothing{}, problem.Unauthorized},
		{"an unknown session", "/v1/beat", credential{j.token, "x"}, nothing{}, problem.Gone},
		{"no session", "/relay/x", credential{j.token, ""}, nothing{}, problem.Gone},
		{"the coordinator's session", "/v1/beat", credential{j.token, own}, nothing{}, problem.Denied},
		{"a large beat", "/v1/beat", l.as, strings.Repeat("x", smallBody), problem.Invalid},
		{"a large request for commands", "/v1/next", l.as, strings.Repeat("x", smallBody), problem.Invalid},
		{"a malformed join", "/v1/join", l.as, "x", problem.Invalid},
		{"a short session", "/v1/join", l.as, joinRequest{Protocol: 1, Session: "x"}, problem.Invalid},
		{"another protocol", "/v1/join", l.as, joinRequest{Protocol: 2, Session: strings.Repeat("x", 20)}, problem.Invalid},
		{"more workers than a machine has", "/v1/join", l.as, describes(func(n *Node) { n.Procs = 1 << 40 }), problem.Invalid},
		{"less than no worker", "/v1/join", l.as, describes(func(n *Node) { n.Procs = -1 }), problem.Invalid},
		{"no port", "/v1/join", l.as, describes(func(n *Node) { n.Port = 1 << 16 }), problem.Invalid},
		{"no port of a peer", "/v1/join", l.as, describes(func(n *Node) { n.PeerPort = -1 }), problem.Invalid},
		{"a name without end", "/v1/join", l.as, describes(func(n *Node) { n.Host = strings.Repeat("x", maxNode) }), problem.Invalid},
		{"a gap in the messages", "/v1/tell", l.as, tellRequest{First: 7, Messages: []message{{Kind: "x"}}}, problem.Invalid},
		{"a malformed leave", "/v1/leave", l.as, "x", problem.Invalid},
	} {
		_, _, err := call[nothing](within(t), c, r.as, http.MethodPost, base+r.path, r.body, smallBody)
		if kindOf(err) != r.kind {
			t.Errorf("%s: %v", r.name, err)
		}
	}
	// A repeated request does not repeat its messages.
	for range 2 {
		out, _, err := call[tellAnswer](within(t), c, l.as, http.MethodPost, base+"/v1/tell", tellRequest{First: 1, Messages: []message{{Kind: "a"}, {Kind: "b"}}}, smallBody)
		if err != nil || out.Heard != 2 {
			t.Errorf("%+v, %v", out, err)
		}
	}
	for _, kind := range []string{"a", "b"} {
		if got := await[Message](t, j.Endpoint); got.Kind != kind {
			t.Errorf("message %s, want %s", got.Kind, kind)
		}
	}
	reply, err := c.RoundTrip(must(http.NewRequestWithContext(within(t), http.MethodGet, base+"/v1/job", nil)))
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(reply.Body)
	_ = reply.Body.Close()
	if err != nil || string(body) != `{"job":"job-1","protocol":1,"version":"v1","shared":true}` || reply.TLS.Version != tls.VersionTLS13 {
		t.Errorf("%s, %v", body, err)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
