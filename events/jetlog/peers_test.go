package jetlog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/natstest"
)

// serverPeer in the environment makes the test binary one server of a cluster.
const serverPeer = "JETLOG_TEST_SERVER_PEER"

// peers is a cluster of three servers, each a process that can be killed.
type peers struct {
	t   *testing.T
	all []*peer
}

type peer struct {
	natstest.Peer
	t     *testing.T
	mu    sync.Mutex
	cmd   *exec.Cmd // nil: it is not running
	stdin io.Closer
}

func startPeers(t *testing.T) *peers {
	t.Helper()
	host := fmt.Sprintf("127.%d.%d.%d", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254))
	dir := t.TempDir()
	list, err := natstest.Peers(3, host, func(name string) string { return filepath.Join(dir, name) })
	if err != nil {
		t.Fatal(err)
	}
	c := &peers{t: t}
	for _, p := range list {
		one := &peer{Peer: p, t: t}
		c.all = append(c.all, one)
		one.start()
		t.Cleanup(one.kill)
	}
	return c
}

func (p *peer) start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), serverPeer+"="+p.Text())
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		p.t.Error(err)
		return
	}
	p.cmd, p.stdin = cmd, stdin
}

// kill is kill -9.
func (p *peer) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	_ = p.stdin.Close()
	p.cmd = nil
}

// signal stops or continues the server.
func (p *peer) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Error(err)
	}
}

// options connect to the cluster; the peer in front is asked first.
func (c *peers) options(front int) Options {
	var urls []string
	for i := range c.all {
		urls = append(urls, c.all[(front+i)%len(c.all)].URL())
	}
	return Options{URL: strings.Join(urls, ","), Timeout: time.Second}
}

// connect opens the log through a server of its own choice.
func (c *peers) connect(front int) *Log {
	c.t.Helper()
	l := connectTo(c.t, c.options(front))
	if _, _, err := l.Open(c.t.Context()); err != nil {
		c.t.Fatal(err)
	}
	return l
}

// create makes a log of three copies, as soon as the cluster can.
func (c *peers) create() *Log {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	o := c.options(0)
	o.Replicas = 3
	for {
		l, err := Connect(ctx, o)
		if err == nil {
			c.t.Cleanup(l.Close)
			if err = l.Create(ctx, created(c.t, "store-1")); err == nil {
				return l
			}
			l.Close()
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			c.t.Fatalf("no log of three copies: %v", err)
		}
	}
}

// leader returns the server that leads the log, nil while there is none.
func (c *peers) leader(ctx context.Context, l *Log) *peer {
	once, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	s, err := l.js.Stream(once, Stream)
	if err != nil || s.CachedInfo().Cluster == nil {
		return nil
	}
	name := s.CachedInfo().Cluster.Leader
	if i := slices.IndexFunc(c.all, func(p *peer) bool { return p.Name == name }); i >= 0 {
		return c.all[i]
	}
	return nil
}

// awaitLeader waits for a leader.
func (c *peers) awaitLeader(ctx context.Context, l *Log) *peer {
	for {
		if p := c.leader(ctx, l); p != nil {
			return p
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return nil
		}
	}
}

// whole waits until all three copies are current: a cluster that has lost one may lose the
// next one only then.
func (c *peers) whole(ctx context.Context, l *Log) bool {
	for {
		once, cancel := context.WithTimeout(ctx, time.Second)
		s, err := l.js.Stream(once, Stream)
		cancel()
		if err == nil && s.CachedInfo().Cluster != nil {
			current := 0
			for _, r := range s.CachedInfo().Cluster.Replicas {
				if r.Current && !r.Offline {
					current++
				}
			}
			if s.CachedInfo().Cluster.Leader != "" && current == 2 {
				return true
			}
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return false
		}
	}
}

// kills is the number of leaders that a test kills: JETLOG_KILLS.
func kills(t *testing.T, usual int) int {
	t.Helper()
	text := os.Getenv("JETLOG_KILLS")
	if text == "" {
		return usual
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// The leader of the log is killed again and again while decisions compete and facts are
// appended, at moments that a seed chooses. No acknowledged event is lost or stored twice,
// no decision is accepted that has not seen the last one, and every call ends.
func TestLeaderKilledAgainAndAgain(t *testing.T) {
	t.Parallel()
	c := startPeers(t)
	l := c.create()
	n := kills(t, 4)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute+time.Duration(n)*time.Minute)
	defer cancel()
	seed := uint64(time.Now().UnixNano()) //nolint:gosec // any number
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // for tests
	h := &history{}
	var over atomic.Bool
	var wg sync.WaitGroup
	for who := range 3 {
		l := c.connect(who)
		wg.Go(func() {
			for !over.Load() && ctx.Err() == nil {
				h.decide(ctx, t, l, who, 1)
			}
		})
	}
	for who := range 3 {
		l := c.connect(who)
		wg.Go(func() {
			for !over.Load() && ctx.Err() == nil {
				h.append(ctx, t, l, 2)
			}
		})
	}
	for range n {
		select {
		case <-time.After(time.Duration(random.IntN(1500)) * time.Millisecond):
		case <-ctx.Done():
		}
		began := time.Now()
		p := c.awaitLeader(ctx, l)
		if p == nil {
			t.Error("no leader")
			break
		}
		found := time.Since(began)
		p.kill()
		select {
		case <-time.After(time.Duration(random.IntN(1000)) * time.Millisecond):
		case <-ctx.Done():
		}
		p.start()
		again := time.Now()
		if !c.whole(ctx, l) {
			t.Error("the copies are not whole again")
			break
		}
		t.Logf("%s killed after %v; whole %v after its start, with %d events", p.Name, found.Round(time.Millisecond), time.Since(again).Round(time.Millisecond), h.len())
	}
	over.Store(true)
	wg.Wait()
	h.check(t, l)
	p50, p99, worst := h.gaps()
	t.Logf("%d leaders killed, %d events acknowledged, %d conflicts; between two acknowledgements p50 %v p99 %v at most %v",
		n, h.len(), h.conflicts, p50, p99, worst)
	if h.conflicts == 0 {
		t.Error("no decision met another")
	}
}

// gaps returns times between acknowledgements that follow each other.
func (h *history) gaps() (p50, p99, worst time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var at []time.Time
	for _, a := range h.acked {
		at = append(at, a.returned)
	}
	slices.SortFunc(at, time.Time.Compare)
	at = slices.Compact(at)
	var all []time.Duration
	for i := 1; i < len(at); i++ {
		all = append(all, at[i].Sub(at[i-1]))
	}
	if len(all) == 0 {
		return 0, 0, 0
	}
	slices.Sort(all)
	return all[len(all)/2], all[len(all)*99/100], all[len(all)-1]
}

// Two of three servers are gone: nothing is acknowledged, and each call ends at its
// deadline. When they are back, the same events are stored once.
func TestQuorumAwayAndBack(t *testing.T) {
	t.Parallel()
	c := startPeers(t)
	l := c.create()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	before, f, d := fact(t, 1), fact(t, 2), begun(t, "step-1")
	if _, err := l.Append(ctx, before); err != nil {
		t.Fatal(err)
	}
	if !c.whole(ctx, l) {
		t.Fatal("the copies are not whole")
	}
	p := c.awaitLeader(ctx, l)
	other := c.all[0]
	if other == p {
		other = c.all[1]
	}
	p.kill()
	other.kill()

	for what, call := range map[string]func(context.Context) error{
		"append": func(ctx context.Context) error { _, err := l.Append(ctx, f); return err },
		"decide": func(ctx context.Context) error { _, err := l.Decide(ctx, d, 0); return err },
	} {
		short, cancel := context.WithTimeout(ctx, 2*time.Second)
		if err := call(short); !errors.Is(err, ErrUnacknowledged) {
			t.Errorf("%s without a quorum: %v", what, err)
		}
		cancel()
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := l.Append(ctx, f)
		waiting <- err
	}()
	p.start()
	other.start()
	if err := <-waiting; err != nil {
		t.Fatal(err)
	}
	at, err := l.Decide(ctx, d, 0)
	if err != nil {
		t.Fatal(err)
	}
	again, err := l.Decide(ctx, d, 0)
	if err != nil || again != at {
		t.Errorf("decided again: %d, %v, want %d", again, err, at)
	}
	last, err := l.Last(ctx)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for _, e := range readAll(t, l, 1, last) {
		count[e.ID]++
	}
	for _, id := range []string{before.ID, f.ID, d.ID} {
		if count[id] != 1 {
			t.Errorf("event %s is stored %d times", id, count[id])
		}
	}
	if last != 4 {
		t.Errorf("the log has %d events, want 4", last)
	}
}

// The server that a client is connected to is stopped, not ended: its connections stay
// open. The client moves to another server within the deadline of an append.
func TestClientOfStoppedServer(t *testing.T) {
	t.Parallel()
	c := startPeers(t)
	l := c.create()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	if !c.whole(ctx, l) {
		t.Fatal("the copies are not whole")
	}
	i := slices.IndexFunc(c.all, func(p *peer) bool { return p.Name == l.nc.ConnectedServerName() })
	stopped := c.all[i]
	stopped.signal(syscall.SIGSTOP)
	defer stopped.signal(syscall.SIGCONT)
	stopped.awaitStopped(ctx)
	began := time.Now()
	if _, err := l.Append(ctx, fact(t, 1)); err != nil {
		t.Fatal(err)
	}
	t.Logf("appended %v after the stop", time.Since(began))
	if now := l.nc.ConnectedServerName(); now == stopped.Name {
		t.Errorf("the client is still connected to the stopped server %s", now)
	}
}

// awaitStopped returns when each thread of the process has stopped: until then, it still works.
func (p *peer) awaitStopped(ctx context.Context) {
	p.t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid))
		if err != nil || len(threads) == 0 {
			p.t.Fatalf("the threads of the server: %v, %v", threads, err)
		}
		if !slices.ContainsFunc(threads, func(path string) bool {
			text, err := os.ReadFile(path)
			_, state, _ := strings.Cut(string(text), ") ")
			return err == nil && !strings.HasPrefix(state, "T")
		}) {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			p.t.Fatal("the server does not stop")
		}
	}
}

// A decision whose answer the leader took to its grave is found by its retry under the next
// leader, also when another decision came in between.
func TestDecisionOfDeadLeader(t *testing.T) {
	t.Parallel()
	c := startPeers(t)
	l := c.create()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	if !c.whole(ctx, l) {
		t.Fatal("the copies are not whole")
	}
	d, f := begun(t, "step-1"), fact(t, 1)
	at, err := l.Decide(ctx, d, 0)
	if err != nil {
		t.Fatal(err)
	}
	first, err := l.Append(ctx, f)
	if err != nil {
		t.Fatal(err)
	}
	p := c.awaitLeader(ctx, l)
	p.kill()
	other := c.connect(1)
	next := begun(t, "step-2")
	if _, err := other.Decide(ctx, next, at); err != nil {
		t.Fatal(err)
	}
	if again, err := other.Decide(ctx, d, 0); err != nil || again != at {
		t.Errorf("the first decision again: %d, %v, want %d", again, err, at)
	}
	if again, err := other.Append(ctx, f); err != nil || again[0] != first[0] {
		t.Errorf("the fact again: %d, %v, want %d", again, err, first)
	}
	var conflict *ConflictError
	if _, err := other.Decide(ctx, begun(t, "late"), at); !errors.As(err, &conflict) {
		t.Errorf("a decision that has not seen the last one: %v", err)
	}
	p.start()
	if !c.whole(ctx, other) {
		t.Fatal("the copies are not whole again")
	}
	if end, err := l.LaneEnd(ctx, trial); err != nil || end != first[0]+1 {
		t.Errorf("the lane ends at %d, %v, want %d", end, err, first[0]+1)
	}
}

// After a change of the leader, which may have another clock, a lease lasts a whole term
// from that change: its holder could not renew it meanwhile.
func TestLeaseAfterLeaderChange(t *testing.T) {
	t.Parallel()
	c := startPeers(t)
	l := c.create()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	const term = time.Second // less than an election takes
	if _, err := l.Lease(ctx, "job", []byte("a"), term); err != nil {
		t.Fatal(err)
	}
	if !c.whole(ctx, l) {
		t.Fatal("the copies are not whole")
	}
	if held, err := l.LeaseHolder(ctx, "job"); err != nil || held == nil || held.Elected {
		t.Errorf("before the change: holder %+v, %v", held, err)
	}
	s, err := l.js.Stream(ctx, leaseStream)
	if err != nil {
		t.Fatal(err)
	}
	name := s.CachedInfo().Cluster.Leader
	i := slices.IndexFunc(c.all, func(p *peer) bool { return p.Name == name })
	killed := time.Now()
	c.all[i].kill()
	other := c.connect(i + 1)
	held, err := other.LeaseHolder(ctx, "job")
	if err != nil || held == nil {
		t.Fatalf("holder %v, %v", held, err)
	}
	if s, err = other.js.Stream(ctx, leaseStream); err != nil {
		t.Fatal(err)
	}
	elected := *s.CachedInfo().Cluster.LeaderSince
	if !held.Elected {
		t.Errorf("the term does not count from the election: %+v", held)
	}
	if until := elected.Add(term); held.Until.Before(until.Add(-term / 4)) {
		t.Errorf("the lease lasts until %v after the kill, its leader was elected after %v", held.Until.Sub(killed), elected.Sub(killed))
	}
}
