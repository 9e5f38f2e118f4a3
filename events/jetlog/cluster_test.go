package jetlog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats-server/v2/server"
)

// cluster is three servers of one cluster, each in its own directory.
type cluster struct {
	t       *testing.T
	servers []*server.Server
}

func startCluster(t *testing.T, n int) *cluster {
	t.Helper()
	c := &cluster{t: t}
	var routes []*url.URL
	for range n {
		// Every server must know the ports of all before it starts.
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		routes = append(routes, &url.URL{Scheme: "nats", Host: l.Addr().String()})
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for i, route := range routes {
		o := &server.Options{}
		if err := o.ProcessConfigString(accounts); err != nil {
			t.Fatal(err)
		}
		port, err := net.LookupPort("tcp", route.Port())
		if err != nil {
			t.Fatal(err)
		}
		o.ServerName, o.Host, o.Port, o.NoSigs, o.NoLog = fmt.Sprint("n", i), "127.0.0.1", server.RANDOM_PORT, true, true
		o.JetStream, o.StoreDir, o.SyncAlways = true, t.TempDir(), true
		o.Cluster = server.ClusterOpts{Name: "ckpt", Host: "127.0.0.1", Port: port}
		o.Routes = routes
		d := newDoorman(nil)
		o.CustomClientAuthentication = d
		ns, err := server.NewServer(o)
		if err != nil {
			t.Fatal(err)
		}
		if d.account, err = ns.LookupAccount(Account); err != nil {
			t.Fatal(err)
		}
		ns.Start()
		c.servers = append(c.servers, ns)
		t.Cleanup(func() {
			ns.Shutdown()
			ns.WaitForShutdown()
		})
	}
	c.wait("a leader and all peers", func() bool {
		for _, ns := range c.servers {
			if ns.JetStreamIsLeader() {
				return len(ns.JetStreamClusterPeers()) == n
			}
		}
		return false
	})
	return c
}

func (c *cluster) wait(what string, is func() bool) {
	c.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.After(20 * time.Second)
	for !is() {
		select {
		case <-tick.C:
		case <-late:
			c.t.Fatalf("no %s", what)
		}
	}
}

func (c *cluster) url() string {
	var all []string
	for _, ns := range c.servers {
		all = append(all, ns.ClientURL())
	}
	return strings.Join(all, ",")
}

// stopLeader stops the server that leads the log.
func (c *cluster) stopLeader() {
	c.t.Helper()
	c.wait("leader of the log", func() bool {
		for _, ns := range c.servers {
			if ns.Running() && ns.JetStreamIsStreamLeader(Account, Stream) {
				ns.Shutdown()
				return true
			}
		}
		return false
	})
}

// acked is an event with the sequence that its writer was told, and for a
// decision the end of the lane that it expected.
type acked struct {
	id              string
	sequence, after uint64
	decision        bool
}

// history is what the writers of a log were told.
type history struct {
	mu        sync.Mutex
	acked     []acked
	conflicts int
}

func (h *history) add(a ...acked) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.acked = append(h.acked, a...)
}

func (h *history) len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.acked)
}

// decide takes n decisions on one lane against everybody else's.
func (h *history) decide(ctx context.Context, t *testing.T, l *Log, who, n int) {
	for i := range n {
		d := begun(t, fmt.Sprintf("step-%d-%d", who, i))
		for {
			end, err := l.LaneEnd(ctx, trial)
			if err != nil {
				t.Error(err)
				return
			}
			seq, err := l.Decide(ctx, d, end)
			if errors.Is(err, ErrConflict) {
				h.mu.Lock()
				h.conflicts++
				h.mu.Unlock()
				continue
			}
			if err != nil {
				t.Error(err)
				return
			}
			h.add(acked{d.ID, seq, end, true})
			break
		}
	}
}

// append appends rounds of batches and single facts.
func (h *history) append(ctx context.Context, t *testing.T, l *Log, rounds int) {
	for i := range rounds {
		facts := []events.Fact{fact(t, i)}
		if i%2 == 0 {
			facts = factsOf(t, 30)
		}
		seqs, err := l.Append(ctx, facts...)
		if err != nil {
			t.Error(err)
			return
		}
		for j, f := range facts {
			h.add(acked{id: f.ID, sequence: seqs[j]})
		}
	}
}

// check compares what the writers were told with what is stored.
func (h *history) check(t *testing.T, l *Log) {
	t.Helper()
	last, err := l.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at := map[string]uint64{}
	before := map[string]uint64{} // of each decision: the end of the lane when it was stored
	end := uint64(0)
	for _, e := range readAll(t, l, 1, last) {
		if at[e.ID] != 0 {
			t.Errorf("event %s is at %d and at %d", e.ID, at[e.ID], e.Sequence)
		}
		at[e.ID] = e.Sequence
		if trial.Owns(e.Event) {
			before[e.ID], end = end, e.Sequence
		}
	}
	saw := map[uint64]string{}
	decisions := 0
	for _, a := range h.acked {
		if at[a.id] != a.sequence {
			t.Errorf("event %s is at %d, its writer was told %d", a.id, at[a.id], a.sequence)
		}
		if !a.decision {
			continue
		}
		decisions++
		if before[a.id] != a.after {
			t.Errorf("decision %s expected the lane at %d, it was at %d", a.id, a.after, before[a.id])
		}
		if other := saw[a.after]; other != "" {
			t.Errorf("decisions %s and %s both saw the lane at %d", a.id, other, a.after)
		}
		saw[a.after] = a.id
	}
	if decisions != len(before) {
		t.Errorf("%d decisions were acknowledged, %d are in the lane", decisions, len(before))
	}
	if len(h.acked)+1 != int(last) {
		t.Errorf("%d events were acknowledged, the log has %d", len(h.acked), last)
	}
}

const deciders = 8

// contend lets 8 deciders and 4 writers of facts at one log, each over a
// connection of its own.
func contend(t *testing.T, connect func() *Log, decisions, rounds int, meanwhile func(*history)) *history {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	h := &history{}
	var wg sync.WaitGroup
	for who := range deciders {
		l := connect()
		wg.Go(func() { h.decide(ctx, t, l, who, decisions) })
	}
	for range 4 {
		l := connect()
		wg.Go(func() { h.append(ctx, t, l, rounds) })
	}
	meanwhile(h)
	wg.Wait()
	return h
}

func TestLinearizable(t *testing.T) {
	t.Parallel()
	l, s := newLog(t)
	h := contend(t, func() *Log { return reopen(t, s) }, 10, 30, func(*history) {})
	h.check(t, l)
	if h.conflicts == 0 {
		t.Error("no decision met another")
	}
}

// On three servers, of which the leader stops in the middle.
func TestLinearizableReplicated(t *testing.T) {
	t.Parallel()
	c := startCluster(t, 3)
	o := Options{URL: c.url(), Timeout: time.Second}
	l := connectTo(t, o)
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	if info, err := l.Info(t.Context()); err != nil || info.Replicas != 3 {
		t.Fatalf("the log has %d copies, %v", info.Replicas, err)
	}
	h := contend(t, func() *Log {
		l := connectTo(t, o)
		if _, _, err := l.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		return l
	}, 10, 20, func(h *history) {
		c.wait("progress", func() bool { return h.len() > 200 })
		c.stopLeader()
	})
	h.check(t, l)
	if h.conflicts == 0 {
		t.Error("no decision met another")
	}
}

// How many copies a log gets.
func TestReplicas(t *testing.T) {
	t.Parallel()
	three := startCluster(t, 3)
	for name, tc := range map[string]struct {
		asked, got int // 0: refused
	}{
		"three of three": {3, 3},
		"one of three":   {1, 1},
		"five of three":  {5, 0},
		"by itself":      {0, 3},
	} {
		l := connectTo(t, Options{URL: three.url(), Replicas: tc.asked})
		err := l.Create(t.Context(), created(t, "store-1"))
		if tc.got == 0 {
			if !errors.Is(err, ErrReplicas) || !strings.Contains(err.Error(), "5 copies") {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		info, ierr := l.Info(t.Context())
		if err != nil || ierr != nil || info.Replicas != tc.got {
			t.Errorf("%s: %d copies, %v, %v", name, info.Replicas, err, ierr)
		}
		three.forget()
	}
	l, s := newLog(t)
	if info, err := l.Info(t.Context()); err != nil || info.Replicas != 1 {
		t.Errorf("one server by itself: %d copies, %v", info.Replicas, err)
	}
	lonely := connectTo(t, Options{Dial: dial(s), Replicas: 3})
	if err := lonely.js.DeleteStream(t.Context(), Stream); err != nil {
		t.Fatal(err)
	}
	if err := lonely.Create(t.Context(), created(t, "store-2")); !errors.Is(err, ErrReplicas) {
		t.Errorf("three of one: %v", err)
	}
}

// forget deletes the log from within a server, which clients cannot.
func (c *cluster) forget() {
	c.t.Helper()
	l := connectTo(c.t, Options{Dial: func(context.Context) (net.Conn, error) { return c.servers[0].InProcessConn() }})
	if err := l.js.DeleteStream(c.t.Context(), Stream); err != nil {
		c.t.Fatal(err)
	}
}

// TestConflictCodes: a replicated stream may refuse a decision by either code.
// What is pending is settled by asking again.
func TestConflictCodes(t *testing.T) {
	t.Parallel()
	_, s := newLog(t)
	for name, pending := range map[string]int{"10071": 0, "10164 once, then 10071": 1, "10164 three times": 3} {
		w := &pendings{s: s, left: pending}
		l := connectTo(t, Options{Dial: w.dial})
		if _, _, err := l.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		end, err := l.LaneEnd(t.Context(), trial)
		if err != nil {
			t.Fatal(err)
		}
		d := begun(t, name)
		at, err := l.Decide(t.Context(), d, end)
		if err != nil {
			t.Fatal(err)
		}
		// It finds itself, whatever the server says of it.
		if again, err := l.Decide(t.Context(), d, end); err != nil || again != at {
			t.Errorf("%s: again: %d, %v, want %d", name, again, err, at)
		}
		w.mu.Lock()
		w.left = pending
		w.mu.Unlock()
		var c *ConflictError
		if _, err := l.Decide(t.Context(), begun(t, "late"), end); !errors.As(err, &c) || c.Actual != at {
			t.Errorf("%s: %v", name, err)
		}
		if w.mu.Lock(); w.left != 0 {
			t.Errorf("%s: %d were not used", name, w.left)
		}
		w.mu.Unlock()
	}
}

// pendings is a way to a server that tells of conflicts as a replicated one
// may while another append is in flight.
type pendings struct {
	s    *Server
	mu   sync.Mutex
	left int
}

func (w *pendings) dial(context.Context) (net.Conn, error) {
	c, err := w.s.Dial()
	return &pendingConn{c, w}, err
}

type pendingConn struct {
	net.Conn
	w *pendings
}

func (c *pendingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if at := bytes.Index(p[:n], []byte(`"err_code":10071`)); at >= 0 && c.w.left > 0 {
		c.w.left--
		copy(p[at:], `"err_code":10164`)
	}
	return n, err
}
