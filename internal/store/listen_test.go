package store

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/query"
)

var secretToken = strings.Repeat("0a1b", 16)

// listening opens a store that lets clients in, and returns its address.
func listening(t *testing.T, dir string, l *jetlog.Listen) (*Store, string) {
	t.Helper()
	bound := make(chan net.Addr, 1)
	s, err := Open(t.Context(), Options{Location: dir, Listen: l, Bound: func(a net.Addr) { bound <- a }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(t, s) })
	if !s.Owns() {
		t.Fatal("it does not own the store")
	}
	return s, (<-bound).String()
}

// TestServed works in a directory over TCP, through two owners in turn.
func TestServed(t *testing.T) {
	t.Parallel()
	dir := made(t)
	access := &Access{Token: secretToken}
	owner, addr := listening(t, dir, &jetlog.Listen{Address: "127.0.0.1:0", Token: secretToken})
	if c, err := readCard(dir); err != nil || c.Address != addr {
		t.Errorf("owner.json has %+v, %v, the address is %s", c, err, addr)
	}
	url := "nats://" + addr
	remote, err := Open(t.Context(), Options{Location: url, Access: access})
	if err != nil {
		t.Fatal(err)
	}
	defer shut(t, remote)
	if remote.ID != owner.ID || remote.Data.Dir() != filepath.Join(dir, "data") || remote.Owns() {
		t.Errorf("opened %s with data in %s, owned: %v", remote.ID, remote.Data.Dir(), remote.Owns())
	}
	committed(t, remote, "run", 1)
	sees := func(s *Store, n int) {
		t.Helper()
		all, err := query.Ask(t.Context(), s.Views(), query.Checkpoints, query.Params{Run: "run", Trial: trialName, All: true})
		if err != nil || len(all) != n {
			t.Errorf("%d checkpoints, %v, want %d", len(all), err, n)
		}
	}
	sees(owner, 1)
	committed(t, owner, "run", 2)
	sees(remote, 2)
	if a, b := digest(t, owner), digest(t, remote); a != b {
		t.Errorf("the owner's views have digest %s, the client's %s", a, b)
	}

	// Another process stands by, and listens once it owns the store.
	bound := make(chan net.Addr, 1)
	next, err := Open(t.Context(), Options{
		Location: dir, Listen: &jetlog.Listen{Address: addr, Token: secretToken}, Bound: func(a net.Addr) { bound <- a },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer shut(t, next)
	shut(t, owner)
	if got := (<-bound).String(); got != addr {
		t.Errorf("the next owner listens on %s", got)
	}
	committed(t, remote, "run", 3)
	sees(next, 3)
	if c, err := readCard(dir); err != nil || c.Address != addr {
		t.Errorf("owner.json has %+v, %v", c, err)
	}
}

// TestAnotherAtTheAddress: a client that reconnects and finds another store at its address writes
// nothing to it.
func TestAnotherAtTheAddress(t *testing.T) {
	t.Parallel()
	owner, addr := listening(t, made(t), &jetlog.Listen{Address: "127.0.0.1:0"})
	remote := openWith(t, Options{Location: "nats://" + addr, Access: &Access{}})
	defer func() { // its views may have detected it too
		if err := remote.Close(); err != nil && !errors.Is(err, jetlog.ErrForeign) {
			t.Error(err)
		}
	}()
	must(t, remote, "run", begun("step-1"))
	shut(t, owner)
	other, _ := listening(t, made(t), &jetlog.Listen{Address: addr})
	before, err := other.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	fact, err := metrics("late", "run", 1)
	if err != nil {
		t.Fatal(err)
	}
	_, err = remote.Log.Append(t.Context(), fact)
	wrong(t, err, jetlog.ErrForeign)
	_, err = decide(t.Context(), remote, "run", begun("step-2"))
	wrong(t, err, jetlog.ErrForeign)
	if after, err := other.Log.Last(t.Context()); err != nil || after != before {
		t.Errorf("the other store had %d events and has %d, %v", before, after, err)
	}
}

// TestNotLetIn: a refused client gets the reason and the setting to change.
func TestNotLetIn(t *testing.T) {
	t.Parallel()
	certs := certificates(t)
	listen, err := (Access{Token: secretToken, Cert: certs["server.pem"], Key: certs["server.key"]}).Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, addr := listening(t, made(t), listen)
	for name, tc := range map[string]struct {
		scheme string
		access Access
		says   string // "" if the client is accepted
	}{
		"good":          {"tls", Access{Token: secretToken, CA: certs["ca.pem"]}, ""},
		"wrong token":   {"tls", Access{Token: secretToken + "x", CA: certs["ca.pem"]}, "does not know this token"},
		"no token":      {"tls", Access{CA: certs["ca.pem"]}, "none was given"},
		"wrong CA":      {"tls", Access{Token: secretToken, CA: certificates(t)["ca.pem"]}, "CA that is not trusted"},
		"no CA":         {"tls", Access{Token: secretToken}, "CA that is not trusted"},
		"plain":         {"nats", Access{Token: secretToken}, "CA that is not trusted"},
		"nats URL good": {"nats", Access{Token: secretToken, CA: certs["ca.pem"]}, ""},
	} {
		begin := time.Now()
		s, err := Open(t.Context(), Options{Location: tc.scheme + "://" + addr, Access: &tc.access})
		if tc.says == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			shut(t, s)
			continue
		}
		if err == nil {
			shut(t, s)
		}
		wrong(t, err, jetlog.ErrNotAllowed, tc.says, addr, EnvToken, EnvTLSCA)
		if errors.Is(err, ErrNoStore) || err != nil && strings.Contains(err.Error(), secretToken) || time.Since(begin) > 5*time.Second {
			t.Errorf("%s: %v after %s", name, err, time.Since(begin))
		}
		_, err = InitURL(t.Context(), tc.scheme+"://"+addr, URLOptions{Data: t.TempDir(), Access: &tc.access})
		wrong(t, err, jetlog.ErrNotAllowed, tc.says)
	}
}

// TestElsewhere: the data of a served directory is expected under its path, where this machine may
// have another store or nothing.
func TestElsewhere(t *testing.T) {
	t.Parallel()
	dir := made(t)
	_, addr := listening(t, dir, &jetlog.Listen{Address: "127.0.0.1:0"})
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Location: "nats://" + addr, Access: &Access{}}
	if _, err := InitURL(t.Context(), o.Location, URLOptions{Data: t.TempDir(), Access: o.Access}); !errors.Is(err, ErrExists) {
		t.Errorf("another store on the same log: %v", err)
	}
	// Simulate that on this machine; the server itself has its log open.
	path := filepath.Join(dir, "store.json")
	mine := read(t, path)
	remove(t, dir, "store.json")
	refused(t, o, os.ErrNotExist, dir, host, "nothing there identifies", "mount it", "same path")
	write(t, path, read(t, filepath.Join(made(t), "store.json")))
	refused(t, o, ErrForeign, dir, "not of")
	write(t, path, mine)
	shut(t, openWith(t, o))
}

func openWith(t *testing.T, o Options) *Store {
	t.Helper()
	s, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestPortTaken: a store that cannot listen is released again.
func TestPortTaken(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dir := made(t)
	refused(t, Options{Location: dir, Listen: &jetlog.Listen{Address: l.Addr().String()}}, nil, l.Addr().String(), "in use")
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	shut(t, open(t, dir))
}

// TestInitCut: an init on a server that was interrupted before it marked the data location is
// finished by the next; an init on a location in use is refused.
func TestInitCut(t *testing.T) {
	t.Parallel()
	url, srv := server(t)
	data := t.TempDir()
	o := URLOptions{Data: data, Access: &Access{}}
	first, err := InitURL(t.Context(), url, o)
	if err != nil || first.Replicas != 1 {
		t.Fatal(first, err)
	}
	remove(t, data, markName)
	refused(t, Options{Location: url}, os.ErrNotExist, data, "nothing there identifies")
	second, err := InitURL(t.Context(), url, o)
	if err != nil || second != first {
		t.Fatalf("made %+v, then %+v, %v", first, second, err)
	}
	if _, err := InitURL(t.Context(), url, o); !errors.Is(err, ErrExists) {
		t.Errorf("again: %v", err)
	}
	shut(t, open(t, url))
	// Another server with the same data: the first server's log is not available.
	empty, other := server(t)
	_, err = InitURL(t.Context(), empty, o)
	wrong(t, err, ErrExists, first.Store, data, "key")
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	log, err := jetlog.Connect(ctx, jetlog.Options{URL: empty})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := log.Open(ctx); !errors.Is(err, jetlog.ErrNoLog) {
		t.Errorf("a refused init made a log: %v", err)
	}
	log.Close()
	for n, says := range map[int]string{2: "3 or 5", 7: "3 or 5", -1: "3 or 5", 3: "as many servers"} {
		_, err := InitURL(t.Context(), empty, URLOptions{Data: t.TempDir(), Replicas: n, Access: &Access{}})
		wrong(t, err, nil, says)
	}
	srv.end()
	other.end()
}

// TestTwoServers: one log directory is never served twice, by processes with or without the
// store's lock.
func TestTwoServers(t *testing.T) {
	t.Parallel()
	dir := made(t)
	log := filepath.Join(dir, "log")
	again := func() error {
		s, err := jetlog.StartServer(t.Context(), jetlog.ServerOptions{Dir: log})
		if err == nil {
			s.Shutdown()
		}
		return err
	}
	first := start(t, "holder", "CKPTSTORE_TEST_DIR="+log)
	first.hear("start")
	wrong(t, again(), jetlog.ErrServed, log)
	// Nor is a process an owner with the store's lock but without the log's.
	refused(t, Options{Location: dir, Patience: 100 * time.Millisecond}, jetlog.ErrServed, log)
	first.kill()
	owner := actors(t, dir, 1)[0]
	wrong(t, again(), jetlog.ErrServed, log)
	s := open(t, dir)
	must(t, s, "run", begun("step-1"))
	shut(t, s) // it would own the store next
	owner.kill()
	if err := again(); err != nil {
		t.Error(err)
	}
}
