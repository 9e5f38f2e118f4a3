package jetlog

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

const token = "0123456789abcdef0123456789abcdef"

// listening returns a log on a server that listens, and its address.
func listening(t *testing.T, o Listen) (*Log, string) {
	t.Helper()
	o.Address = "127.0.0.1:0"
	s, err := StartServer(t.Context(), ServerOptions{Dir: t.TempDir(), Listen: &o})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Shutdown)
	l := connectTo(t, Options{Dial: dial(s)})
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	if addr := s.ns.Addr(); addr != nil {
		t.Fatalf("it listens on %s by itself", addr)
	}
	if err := l.CreateBuckets(t.Context()); err != nil {
		t.Fatal(err)
	}
	addr, err := s.Listen(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return l, addr.String()
}

func TestWhoIsLetIn(t *testing.T) {
	t.Parallel()
	ours, theirs := newAuthority(t, "ours"), newAuthority(t, "theirs")
	server := func(clients *authority) *tls.Config {
		c := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{ours.sign(t)}}
		if clients != nil {
			c.ClientCAs, c.ClientAuth = clients.pool(), tls.RequireAndVerifyClientCert
		}
		return c
	}
	client := func(of *authority, certs ...tls.Certificate) *tls.Config {
		return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: of.pool(), Certificates: certs}
	}
	for name, tc := range map[string]struct {
		listen Listen
		client Options // with the scheme of its URL
		not    string  // in the error of a client that is not let in
	}{
		"token of the moment":            {Listen{Token: token}, Options{URL: "nats", FindToken: func() string { return token }}, ""},
		"wrong token of the moment":      {Listen{Token: token}, Options{URL: "nats", FindToken: func() string { return "" }}, "does not know this token"},
		"token":                          {Listen{Token: token}, Options{URL: "nats", Token: token}, ""},
		"wrong token":                    {Listen{Token: token}, Options{URL: "nats", Token: token + "x"}, "does not know this token"},
		"no token":                       {Listen{Token: token}, Options{URL: "nats"}, "none was given"},
		"token and TLS":                  {Listen{Token: token, TLS: server(nil)}, Options{URL: "tls", Token: token, TLS: client(ours)}, ""},
		"nats URL and our CA":            {Listen{Token: token, TLS: server(nil)}, Options{URL: "nats", Token: token, TLS: client(ours)}, ""},
		"wrong token and TLS":            {Listen{Token: token, TLS: server(nil)}, Options{URL: "tls", Token: "x", TLS: client(ours)}, "does not know this token"},
		"wrong CA":                       {Listen{Token: token, TLS: server(nil)}, Options{URL: "tls", Token: token, TLS: client(theirs)}, "CA that is not trusted"},
		"plain client":                   {Listen{Token: token, TLS: server(nil)}, Options{URL: "nats", Token: token}, "CA that is not trusted"},
		"TLS to a plain server":          {Listen{Token: token}, Options{URL: "tls", Token: token}, "has no TLS"},
		"CA for a plain server":          {Listen{Token: token}, Options{URL: "nats", Token: token, TLS: client(ours)}, "has no TLS"},
		"client certificate":             {Listen{TLS: server(ours)}, Options{URL: "tls", TLS: client(ours, ours.sign(t))}, ""},
		"no client certificate":          {Listen{TLS: server(ours)}, Options{URL: "tls", TLS: client(ours)}, "client's certificate"},
		"client certificate of another":  {Listen{TLS: server(ours)}, Options{URL: "tls", TLS: client(ours, theirs.sign(t))}, "client's certificate"},
		"certificate, but no token":      {Listen{Token: token, TLS: server(ours)}, Options{URL: "tls", TLS: client(ours, ours.sign(t))}, "none was given"},
		"certificate and token together": {Listen{Token: token, TLS: server(ours)}, Options{URL: "tls", Token: token, TLS: client(ours, ours.sign(t))}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			mine, addr := listening(t, tc.listen)
			o := tc.client
			o.URL += "://" + addr
			l, err := Connect(t.Context(), o)
			if tc.not != "" {
				if !errors.Is(err, ErrNotAllowed) || !strings.Contains(err.Error(), tc.not) || !strings.Contains(err.Error(), addr) || strings.Contains(err.Error(), token) {
					t.Fatalf("connect: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			if _, _, err := l.Open(t.Context()); err != nil {
				t.Fatal(err)
			}
			if seqs, err := l.Append(t.Context(), factsOf(t, 20)...); err != nil || seqs[19] != 21 {
				t.Fatal(seqs, err)
			}
			if seq, err := l.Decide(t.Context(), begun(t, "step-1"), 0); err != nil || seq != 22 {
				t.Fatal(seq, err)
			}
			// One account: a client on another path sees the same log.
			if got := readAll(t, mine, 1, 22); len(got) != 22 {
				t.Errorf("the owner reads %d events", len(got))
			}
		})
	}
}

// A client with the token may write, and cannot rewrite.
func TestClientCannotRewrite(t *testing.T) {
	t.Parallel()
	mine, addr := listening(t, Listen{Token: token})
	if _, err := mine.Append(t.Context(), factsOf(t, 5)...); err != nil {
		t.Fatal(err)
	}
	l := connectTo(t, Options{URL: "nats://" + addr, Token: token, Logger: slog.New(slog.DiscardHandler)})
	for _, subject := range attacks() {
		m, err := l.nc.RequestWithContext(t.Context(), subject, []byte(`{"seq":2,"no_erase":false}`))
		if err != nil || !strings.Contains(string(m.Data), `"err_code":60007`) {
			t.Errorf("%s is answered: %v, %v", subject, m, err)
		}
	}
	if info, err := mine.Info(t.Context()); err != nil || info.Last != 6 {
		t.Errorf("the log has %+v, %v", info, err)
	}
}

// attacks returns the destructive requests about each stream of a store.
func attacks() (subjects []string) {
	for _, stream := range []string{Stream, leaseStream, cursorStream} {
		for _, verb := range destructive {
			subjects = append(subjects, strings.TrimSuffix(verb, "*")+stream)
		}
	}
	return subjects
}

// TestOwnerMayChangeStreams checks that the owner's own connection may do what no
// client may; a connection within the process still counts as a client.
func TestOwnerMayChangeStreams(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir())
	owner := connectTo(t, s.OwnerOptions())
	if err := owner.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	if _, err := owner.js.UpdateStream(t.Context(), streamConfig(1)); err != nil {
		t.Errorf("the owner may not update its stream: %v", err)
	}
	client := connectTo(t, Options{Dial: dial(s), Logger: slog.New(slog.DiscardHandler)})
	for _, subject := range attacks() {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		m, err := client.nc.RequestWithContext(ctx, subject, []byte(`{"seq":1,"no_erase":false}`))
		cancel()
		if err == nil {
			t.Errorf("%s is answered: %s", subject, m.Data)
		}
	}
	if info, err := owner.Info(t.Context()); err != nil || info.Last != 1 {
		t.Errorf("the log has %+v, %v", info, err)
	}
}

// A client that was let in comes back when the server does, even if it was refused in
// between.
func TestTokenPutRight(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	at := "127.0.0.1:0"
	own := func(token string) *Server {
		s, err := StartServer(t.Context(), ServerOptions{Dir: dir, Listen: &Listen{Address: at, Token: token}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Shutdown)
		return s
	}
	s := own(token)
	if err := connectTo(t, Options{Dial: dial(s)}).Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	addr, err := s.Listen(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at = addr.String()
	refused := make(chan struct{}, 100)
	l := connectTo(t, Options{URL: "nats://" + at, Token: token, Logger: slog.New(tell{slog.DiscardHandler, refused})})
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.Shutdown()
	s = own(token + "other")
	if _, err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		<-refused
	}
	s.Shutdown()
	s = own(token)
	if _, err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	if seqs, err := l.Append(t.Context(), fact(t, 1)); err != nil || seqs[0] != 2 {
		t.Errorf("%v, %v", seqs, err)
	}
}

// tell passes authorization errors on.
type tell struct {
	slog.Handler
	refused chan struct{}
}

func (h tell) Enabled(context.Context, slog.Level) bool { return true }

func (h tell) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if err, ok := a.Value.Any().(error); ok && errors.Is(err, nats.ErrAuthorization) {
			select {
			case h.refused <- struct{}{}:
			default:
			}
		}
		return true
	})
	return nil
}

func TestListenRefused(t *testing.T) {
	cert := &tls.Config{MinVersion: tls.VersionTLS12}
	mutual := &tls.Config{MinVersion: tls.VersionTLS12, ClientAuth: tls.RequireAndVerifyClientCert}
	for _, tc := range []struct {
		o    Listen
		want string // "" for an allowed listener
	}{
		{Listen{Address: "localhost:4222", Token: token}, ""},
		{Listen{Address: "[::1]:0", TLS: mutual}, ""},
		{Listen{Address: "127.0.0.1:0"}, "any client that reaches it could write"},
		{Listen{Address: "localhost:4222", TLS: cert}, "any client that reaches it could write"},
		{Listen{Address: "127.9.9.9:0", Token: token}, ""},
		{Listen{Address: "0.0.0.0:0", Token: token, TLS: cert}, ""},
		{Listen{Address: "10.0.0.1:0", TLS: mutual}, ""},
		{Listen{Address: "10.0.0.1:0"}, "in clear"},
		{Listen{Address: "0.0.0.0:0", Token: token}, "in clear"},
		{Listen{Address: "node-1:0", Token: token}, "in clear"},
		{Listen{Address: "[::]:0", TLS: cert}, "any client that reaches it could write"},
		{Listen{Address: "127.0.0.1:0", Token: "short"}, "openssl rand"},
		{Listen{Address: "127.0.0.1"}, "HOST:PORT"},
		{Listen{Address: ":4222", Token: token, TLS: cert}, "0.0.0.0"},
		{Listen{Address: "127.0.0.1:65536"}, "HOST:PORT"},
		{Listen{Address: "127.0.0.1:http"}, "HOST:PORT"},
	} {
		err := tc.o.Validate()
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: %v", tc.o, err)
		}
		if err != nil && strings.Contains(err.Error(), token) {
			t.Errorf("%v contains the token", err)
		}
		if err != nil {
			dir := t.TempDir()
			if s, serr := StartServer(t.Context(), ServerOptions{Dir: dir, Listen: &tc.o}); serr == nil {
				s.Shutdown()
				t.Errorf("a server starts with %+v", tc.o)
			}
		}
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	s, err := StartServer(t.Context(), ServerOptions{Dir: t.TempDir(), Listen: &Listen{Address: taken.Addr().String(), Token: token}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Shutdown()
	if _, err := s.Listen(t.Context()); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a port that is taken: %v", err)
	}
}

func TestServed(t *testing.T) {
	mine, addr := listening(t, Listen{Token: token})
	l := connectTo(t, Options{URL: "nats://" + addr, Token: token, Timeout: 100 * time.Millisecond})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := l.Served(ctx); err == nil || !strings.Contains(err.Error(), addr) {
		t.Errorf("before any announcement: %v", err)
	}
	want := Served{Store: "store-1", Directory: "/somewhere", Host: "here"}
	if err := mine.Announce(want); err != nil {
		t.Fatal(err)
	}
	if got, err := l.Served(t.Context()); err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
}

// A server starts when the process that had the log open is still ending: the kernel may
// release the lock of the store first.
func TestLockOfAnEndingProcess(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ending, err := lockDir(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(100*time.Millisecond, func() { _ = ending.Close() })
	s, err := StartServer(t.Context(), ServerOptions{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	s.Shutdown()
}
