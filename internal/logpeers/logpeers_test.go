package logpeers

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
)

var quiet = slog.New(slog.DiscardHandler)

func config(store string, index int) Config {
	return Config{Store: store, Index: index, Address: "127.0.0.1", Wait: time.Minute, Logger: quiet}
}

// joined is the peers of a log, each as a trainer of its own node would run it.
type joined struct {
	t      *testing.T
	store  string
	peers  [Copies]*Peer
	on     [Copies]string // directories of copies that are not in the store
	log    slog.Handler
	access Access

	refused atomic.Int32 // routes
}

// together joins several peers at once.
func (j *joined) together(formed bool, indexes ...int) {
	j.t.Helper()
	var wg sync.WaitGroup
	var mu sync.Mutex
	for _, k := range indexes {
		wg.Go(func() {
			c := config(j.store, k)
			c.Formed, c.Dir, c.Logger = formed, j.on[k], slog.New(counter{j.log, &j.refused})
			p, a, err := Join(j.t.Context(), c)
			if err != nil {
				j.t.Errorf("peer %d: %v", k, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			j.peers[k], j.access = p, a
			j.t.Cleanup(p.Close)
		})
	}
	wg.Wait()
	if j.t.Failed() {
		j.t.FailNow()
	}
}

func (j *joined) connect(a Access) *jetlog.Log {
	j.t.Helper()
	l, err := jetlog.Connect(j.t.Context(), jetlog.Options{URL: a.URL, Token: a.Token, TLS: a.TLS, Replicas: Copies, Timeout: time.Second})
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(l.Close)
	return l
}

// newLog returns the peers of a log that has one event.
func newLog(t *testing.T) (*joined, *jetlog.Log) {
	t.Helper()
	j := &joined{t: t, store: t.TempDir(), log: slog.DiscardHandler}
	return j, j.form()
}

// form joins all peers and makes a log that has one event.
func (j *joined) form() *jetlog.Log {
	j.t.Helper()
	j.together(false, 0, 1, 2)
	l := j.connect(j.access)
	ctx, cancel := context.WithTimeout(j.t.Context(), time.Minute)
	defer cancel()
	d, err := events.NewDecision(stamp("created"), events.Aggregate{}, events.StoreCreated{Store: "store-1", Format: 1, Data: "/data"})
	if err != nil {
		j.t.Fatal(err)
	}
	if err := l.Create(ctx, d); err != nil {
		j.t.Fatal(err)
	}
	return l
}

func stamp(id string) events.Stamp { return events.Stamp{ID: id, Source: "test", Time: time.Now()} }

func fact(t *testing.T, id string) events.Fact {
	t.Helper()
	f, err := events.NewFact(stamp(id), events.Scope{Run: "run", Trial: "main", Actor: events.Rank(0)}, events.Metrics{Attempt: 1, Iteration: 1})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// ids returns the events of a log.
func ids(t *testing.T, l *jetlog.Log) (all []string) {
	t.Helper()
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	last, err := l.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for e, err := range l.Read(t.Context(), 1, last) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, e.ID)
	}
	return all
}

// Three peers form a log of three copies. One ends, and the log takes events. It comes back
// at other addresses, another one ends, and the log is still there. After all have ended,
// two copies suffice to read it, and one does not.
func TestPeers(t *testing.T) {
	t.Parallel()
	j, l := newLog(t)
	if info, err := l.Info(t.Context()); err != nil || info.Replicas != Copies {
		t.Fatalf("%d copies, %v", info.Replicas, err)
	}
	want := []string{"created"}
	add := func(id string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := l.Append(ctx, fact(t, id)); err != nil {
			t.Fatalf("append %s: %v", id, err)
		}
		want = append(want, id)
	}
	add("of three")
	j.peers[0].Close()
	add("of two")
	j.together(true, 0)
	await(t, "copy 0 has caught up", func() bool { return j.peers[0].settled() })
	j.peers[1].Close()
	add("of the other two")
	if got := ids(t, l); !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
	l.Close()
	j.peers[0].Close()
	j.peers[2].Close()

	// Copy 1 has missed an event.
	local, here, err := Serve(t.Context(), j.store, time.Minute, quiet)
	if err != nil {
		t.Fatal(err)
	}
	if got := ids(t, j.connect(here)); !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
	if _, _, err := Serve(t.Context(), j.store, 100*time.Millisecond, quiet); !slices.Contains(system.Kinds(err), problem.Locked) {
		t.Errorf("a second server of the copies: %v", err)
	}
	local.Close()
	for _, k := range []int{0, 2} {
		if err := os.RemoveAll(CopyDir(j.store, k)); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := Serve(t.Context(), j.store, time.Minute, quiet); err == nil {
		t.Error("one copy is served as the log")
	}
}

// Two commands start together after a job. Each serves all copies in its turn.
func TestCommandsTakeTurns(t *testing.T) {
	t.Parallel()
	j, l := newLog(t)
	l.Close()
	for _, p := range j.peers {
		p.Close()
	}
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			local, _, err := Serve(t.Context(), j.store, time.Minute, quiet)
			if err != nil {
				t.Error(err)
				return
			}
			if n := len(local.peers); n != Copies {
				t.Errorf("%d copies are served", n)
			}
			local.Close()
		})
	}
	both.Wait()
}

func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for !done() {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			t.Fatalf("not in time: %s", what)
		}
	}
}

// A copy that is gone does not come back empty: with another, it would outvote the copy
// that knows the log.
func TestLostCopyStaysLost(t *testing.T) {
	t.Parallel()
	j, _ := newLog(t)
	j.peers[2].Close()
	if err := os.RemoveAll(CopyDir(j.store, 2)); err != nil {
		t.Fatal(err)
	}
	c := config(j.store, 2)
	c.Formed = true
	if _, _, err := Join(t.Context(), c); !errors.Is(err, ErrCopyLost) {
		t.Errorf("an empty copy joins: %v", err)
	}
}

// A copy whose port another process has taken since it was chosen leaves a card with other ports.
func TestPortTaken(t *testing.T) {
	t.Parallel()
	c := config(t.TempDir(), 0)
	if err := os.MkdirAll(joinDir(c.Store), 0o700); err != nil {
		t.Fatal(err)
	}
	s, err := sharedSecret(c.Store)
	if err != nil {
		t.Fatal(err)
	}
	f := &formation{Config: c, secret: s}
	if err := f.enter(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.Formed = true // does not wait for the others
	all, err := cards(c.Store)
	if err != nil {
		t.Fatal(err)
	}
	taken, err := net.Listen("tcp", all[0].Client)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	if _, err := f.step(t.Context(), all); err != nil || f.peer != nil {
		t.Fatalf("on a taken port: %v", err)
	}
	now, err := cards(c.Store)
	if err != nil || *now[0] == *all[0] {
		t.Fatalf("no other card: %+v, %v", now[0], err)
	}
	if _, err := f.step(t.Context(), now); err != nil || f.peer == nil {
		t.Fatalf("on other ports: %v", err)
	}
	f.peer.Close()
}

// Two peers of three do not form a log. Their errors name the missing peer.
func TestMajorityDoesNotForm(t *testing.T) {
	t.Parallel()
	store := t.TempDir()
	var wg sync.WaitGroup
	for k := range 2 {
		wg.Go(func() {
			c := config(store, k)
			c.Wait = time.Second
			_, _, err := Join(t.Context(), c)
			if !slices.Contains(system.Kinds(err), problem.Unavailable) {
				t.Errorf("peer %d: %v", k, err)
			}
		})
	}
	wg.Wait()
}

// A client without the token, and a server without the certificate, are not let in. A
// process that has made its own secret is such a server.
func TestStrangers(t *testing.T) {
	t.Parallel()
	j, l := newLog(t)
	bad := j.access
	bad.Token = "another token, which is as long as it should be"
	if l, err := jetlog.Connect(t.Context(), jetlog.Options{URL: bad.URL, Token: bad.Token, TLS: bad.TLS, Timeout: time.Second}); err == nil {
		l.Close()
		t.Error("a client with another token is let in")
	}
	if l, err := jetlog.Connect(t.Context(), jetlog.Options{URL: j.access.URL, Token: j.access.Token, Timeout: time.Second}); err == nil {
		l.Close()
		t.Error("a client trusts a certificate that it does not know")
	}
	all, err := cards(j.store)
	if err != nil {
		t.Fatal(err)
	}
	stranger, err := newSecret(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	mine, err := newCard("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	known, err := readSecret(j.store)
	if err != nil {
		t.Fatal(err)
	}
	stranger.Token, stranger.trust = known.Token, known.trust // only the certificate differs
	all[2] = &mine
	dir := t.TempDir()
	h, err := holdCopy(t.Context(), dir, stranger.copy(2), false, time.Minute, quiet)
	if err != nil {
		t.Fatal(err)
	}
	p, err := startPeer(t.Context(), 2, h, all, stranger, quiet)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	await(t, "a peer that has refused it", func() bool { return j.refused.Load() > 0 || p.ns.NumRoutes() > 0 })
	if n := p.ns.NumRoutes(); n != 0 {
		t.Errorf("the stranger has %d routes", n)
	}
	if _, err := l.Append(t.Context(), fact(t, "after the strangers")); err != nil {
		t.Fatal(err)
	}
}

// counter counts the messages about TLS of a server, and passes on what its handler takes.
type counter struct {
	slog.Handler
	n *atomic.Int32
}

// Enabled implements [slog.Handler].
func (counter) Enabled(context.Context, slog.Level) bool { return true }

// Handle implements [slog.Handler].
func (c counter) Handle(ctx context.Context, r slog.Record) error {
	if strings.Contains(r.Message, "TLS route handshake error") {
		c.n.Add(1)
	}
	if !c.Handler.Enabled(ctx, r.Level) {
		return nil
	}
	return c.Handler.Handle(ctx, r)
}

// WithAttrs implements [slog.Handler].
func (c counter) WithAttrs(attrs []slog.Attr) slog.Handler {
	return counter{c.Handler.WithAttrs(attrs), c.n}
}

// Of three peers with cards, one accepts connections. Clients try it first.
func TestFind(t *testing.T) {
	t.Parallel()
	store := t.TempDir()
	if err := os.MkdirAll(joinDir(store), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := sharedSecret(store); err != nil {
		t.Fatal(err)
	}
	var all [Copies]card
	for k := range all {
		c, err := newCard("127.0.0.1")
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(c)
		if err == nil {
			err = os.WriteFile(cardPath(store, k), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		all[k] = c
	}
	if _, err := Find(t.Context(), store); !slices.Contains(system.Kinds(err), problem.Unavailable) {
		t.Errorf("no peer answers: %v", err)
	}
	l, err := net.Listen("tcp", all[2].Client)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }() // the process ends
	a, err := Find(t.Context(), store)
	want := "tls://" + strings.Join([]string{all[2].Client, all[0].Client, all[1].Client}, ",tls://")
	if err != nil || a.URL != want {
		t.Errorf("found %s (%v), want %s", a.URL, err, want)
	}
}
