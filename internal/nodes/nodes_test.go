package nodes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/internal/problem"
)

func TestMain(m *testing.M) {
	// These tests wait for time limits more than they compute. A number on the command line
	// takes precedence.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// patient bounds waits for events that come.
const patient = time.Minute

// within returns a context with that bound.
func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	t.Cleanup(cancel)
	return ctx
}

// records is the log output of a test.
type records struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (r *records) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(p)
}

func (r *records) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.String()
}

func (r *records) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(r, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// job is a coordinator in a test.
type job struct {
	*Endpoint
	dir string
	log *records
}

// listen starts an endpoint on loopback.
func listen(t *testing.T, change func(*EndpointConfig)) *job {
	t.Helper()
	j := &job{dir: t.TempDir(), log: &records{}}
	c := EndpointConfig{
		Address: "127.0.0.1:0", Dir: j.dir, Job: "job-1", Run: "run", Store: "store-1", Version: "v1",
		Min: 1, Max: 4, Self: Node{Key: "self", Index: 0, Host: "alpha", Procs: 2, Command: "c1"},
		Welcome: json.RawMessage(`{"hello":1}`), Logger: j.log.logger(),
	}
	if change != nil {
		change(&c)
	}
	e, err := Listen(within(t), c)
	if err != nil {
		t.Fatal(err)
	}
	j.Endpoint = e
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if text := j.log.String(); strings.Contains(text, e.token) {
			t.Error("the token is in the log")
		}
	})
	return j
}

// agent is the configuration of an agent of the job.
func (j *job) agent(key string, index int) JoinConfig {
	return JoinConfig{
		Address: j.Addr().String(), Dir: j.dir, Logger: j.log.logger(), Wait: patient, patience: 200 * time.Millisecond,
		Self: Node{Key: key, Index: index, Host: "host-" + key, Boot: "boot-" + key, PID: 10, Procs: 2, Version: "v1", Store: "store-1", Command: "c1"},
	}
}

// join1 joins, or fails the test. At its end the node leaves, so that the endpoint does not wait
// for it.
func join1(t *testing.T, c JoinConfig) *Link {
	t.Helper()
	l, err := Join(within(t), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = l.Leave(ctx, "the test has ended") // not if the link has ended
	})
	return l
}

// await receives the next event of a type, and drops others.
func await[E Event](t *testing.T, e *Endpoint) E {
	t.Helper()
	ctx := within(t)
	for {
		select {
		case event, ok := <-e.Events():
			if !ok {
				t.Fatal("the events have ended")
			}
			if found, ok := event.(E); ok {
				return found
			}
		case <-ctx.Done():
			t.Fatalf("no event %T", *new(E))
		}
	}
}

// closed waits for a channel to be closed.
func closed(t *testing.T, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-within(t).Done():
		t.Fatalf("%s: it did not happen", what)
	}
}

// network is a network that can be cut without closing a connection: its connections
// pass no bytes any more. After mending it, new connections work, and old ones stay
// dead.
type network struct {
	mu     sync.Mutex
	cut    chan struct{} // closed while the network is cut
	isCut  bool
	buried []net.Conn // they must not send FIN while the test runs
}

func newNetwork(t *testing.T) *network {
	n := &network{cut: make(chan struct{})}
	t.Cleanup(func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		for _, c := range n.buried {
			_ = c.Close()
		}
	})
	return n
}

func (n *network) sever() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.isCut = true
	close(n.cut)
}

func (n *network) mend() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.isCut, n.cut = false, make(chan struct{})
}

func (n *network) dial(ctx context.Context, network, address string) (net.Conn, error) {
	n.mu.Lock()
	isCut, cut := n.isCut, n.cut
	n.mu.Unlock()
	if isCut {
		<-ctx.Done() // no answer to SYN
		return nil, ctx.Err()
	}
	raw, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &wire{Conn: raw, of: n, cut: cut, closed: make(chan struct{})}, nil
}

// wire is a connection of a network.
type wire struct {
	net.Conn
	of     *network
	cut    chan struct{}
	once   sync.Once
	closed chan struct{}
}

func (w *wire) dead() bool {
	select {
	case <-w.cut:
		return true
	default:
		return false
	}
}

func (w *wire) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if w.dead() {
		<-w.closed
		return 0, net.ErrClosed
	}
	return n, err
}

func (w *wire) Write(p []byte) (int, error) {
	if w.dead() {
		return len(p), nil
	}
	return w.Conn.Write(p)
}

// Close lets the other end believe that the connection is open, if the network is cut.
func (w *wire) Close() error {
	w.once.Do(func() { close(w.closed) })
	if w.dead() {
		// Reset later, by the end of the test: the descriptor is leaked until then.
		w.of.mu.Lock()
		w.of.buried = append(w.of.buried, w.Conn)
		w.of.mu.Unlock()
		return w.Conn.SetReadDeadline(time.Unix(1, 0))
	}
	return w.Conn.Close()
}

func kindOf(err error) problem.Kind {
	if kinds := problem.Kinds(err); len(kinds) > 0 {
		return kinds[0]
	}
	return ""
}

// TestTwoNodes runs two agents on 127.0.0.1 through a group: join, gather, commands,
// messages, relayed requests, end.
func TestTwoNodes(t *testing.T) {
	t.Parallel()
	j := listen(t, func(c *EndpointConfig) { c.Min, c.Max = 3, 3 })
	var answered []time.Time
	var mu sync.Mutex
	c := j.agent("a", -1)
	c.Answered = func(sent time.Time, timeout time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		answered = append(answered, sent)
		if timeout != 10*time.Second {
			t.Errorf("T is %v", timeout)
		}
	}
	a, b := join1(t, c), join1(t, j.agent("b", 2))
	if a.Index() != 1 || b.Index() != 2 || string(a.Welcome()) != `{"hello":1}` || a.Self().Address != "127.0.0.1" || a.Timeout() != 10*time.Second {
		t.Errorf("%d, %d, %s, %+v", a.Index(), b.Index(), a.Welcome(), a.Self())
	}
	mu.Lock()
	if len(answered) == 0 {
		t.Error("joining is not counted as a beat")
	}
	mu.Unlock()
	group, err := j.Gather(within(t), patient, patient, 0)
	if err != nil || len(group) != 3 {
		t.Fatalf("%+v, %v", group, err)
	}
	for i, m := range group {
		if m.Index != i || m.Place != i || m.State != StateActive || m.Address != "127.0.0.1" {
			t.Errorf("member %d: %+v", i, m)
		}
	}
	for i := range 200 {
		if err := j.Send(1, "step", i); err != nil {
			t.Fatal(err)
		}
		if err := a.Tell("done", i); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 200 {
		select {
		case got := <-a.Commands():
			if got.Kind != "step" || string(got.Body) != fmt.Sprint(i) {
				t.Fatalf("command %d is %s %s", i, got.Kind, got.Body)
			}
		case <-within(t).Done():
			t.Fatalf("no command %d", i)
		}
		if got := await[Message](t, j.Endpoint); got.Node != 1 || got.Kind != "done" || string(got.Body) != fmt.Sprint(i) {
			t.Fatalf("message %d is %+v", i, got)
		}
	}
	if err := a.Flush(within(t)); err != nil {
		t.Error(err)
	}
	b.SetPort(4711)
	if err := b.Tell("ready", nil); err != nil {
		t.Error(err)
	}
	await[Message](t, j.Endpoint)
	if got := j.Members()[2].Port; got != 4711 {
		t.Errorf("port %d", got)
	}
	if err := b.Leave(within(t), "finished"); err != nil || b.Err() != nil {
		t.Errorf("%v, %v", err, b.Err())
	}
	if got := await[Left](t, j.Endpoint); got.Node != 2 || got.Reason != "finished" {
		t.Errorf("%+v", got)
	}
	if err := j.End(within(t), "max steps", 3); err != nil {
		t.Error(err)
	}
	closed(t, "the end of a link", a.Done())
	if over := (*EndedError)(nil); !errors.As(a.Err(), &over) || over.Code != 3 || over.Reason != "max steps" {
		t.Errorf("%v", a.Err())
	}
	if _, err := Join(within(t), j.agent("late", -1)); kindOf(err) != problem.Gone || !strings.Contains(err.Error(), "max steps") {
		t.Errorf("joined after the end: %v", err)
	}
}

// TestSendRefuses lists the commands that no agent can get.
func TestSendRefuses(t *testing.T) {
	t.Parallel()
	j := listen(t, nil)
	l := join1(t, j.agent("a", 1))
	for _, c := range []struct {
		node int
		body any
		kind problem.Kind
	}{{7, nil, problem.Gone}, {0, nil, problem.Invalid}, {1, strings.Repeat("x", maxBody), problem.Invalid}} {
		if err := j.Send(c.node, "do", c.body); kindOf(err) != c.kind {
			t.Errorf("node %d: %v", c.node, err)
		}
	}
	if err := j.Send(1, "do", func() {}); err == nil {
		t.Error("a function was sent")
	}
	if err := l.Tell("do", func() {}); err == nil {
		t.Error("a function was sent")
	}
	if err := l.Tell("do", strings.Repeat("x", maxBody)); kindOf(err) != problem.Invalid {
		t.Error(err)
	}
	// Large bodies are sent in several requests.
	for range 5 {
		if err := errors.Join(l.Tell("large", strings.Repeat("x", maxBody-2)), j.Send(1, "large", strings.Repeat("x", maxBody-2))); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		if got := await[Message](t, j.Endpoint); len(got.Body) != maxBody {
			t.Errorf("%d bytes", len(got.Body))
		}
		if got := <-l.Commands(); len(got.Body) != maxBody {
			t.Errorf("%d bytes", len(got.Body))
		}
	}
}

// TestGather covers the waits of Gather.
func TestGather(t *testing.T) {
	t.Parallel()
	j := listen(t, func(c *EndpointConfig) { c.Min, c.Max = 2, 3 })
	_, err := j.Gather(within(t), 10*time.Millisecond, 0, 0)
	if kindOf(err) != problem.Late {
		t.Error(err)
	}
	for _, part := range []string{"1 of at least 2 nodes", "index 1", "start the missing agents"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("no %q in %v", part, err)
		}
	}
	ctx, cancel := context.WithCancelCause(within(t))
	cancel(errors.New("a signal"))
	if _, err := j.Gather(ctx, patient, 0, 0); err == nil || !strings.Contains(err.Error(), "a signal") {
		t.Error(err)
	}
	a := join1(t, j.agent("a", 1))
	group, err := j.Gather(within(t), patient, 10*time.Millisecond, 0)
	if err != nil || len(group) != 2 {
		t.Fatalf("%+v, %v", group, err)
	}
	b := join1(t, j.agent("b", -1))
	if got := j.Members()[2]; got.State != StateSpare || got.Index != 2 {
		t.Errorf("a join during a group: %+v", got)
	}
	if got := j.Members()[1]; got.State != StateActive {
		t.Errorf("a join has disturbed the group: %+v", got)
	}
	j.Release([]int{0, 1})
	join1(t, j.agent("c", -1))
	group, err = j.Gather(within(t), patient, patient, 0)
	if err != nil || len(group) != 3 || group[2].Key != "b" || j.Members()[3].State != StateSpare {
		t.Fatalf("%+v, %v", group, err)
	}
	if err := errors.Join(a.Leave(within(t), "done"), b.Leave(within(t), "done")); err != nil {
		t.Error(err)
	}
	if err := j.End(within(t), "over", 0); err != nil {
		t.Error(err)
	}
	if _, err := j.Gather(within(t), patient, patient, 0); kindOf(err) != problem.Unavailable {
		t.Error(err)
	}
}

// When the limit of the waiting comes before the last call, nodes that are enough make a group: the last of
// them may have come late.
func TestGatherAtLimit(t *testing.T) {
	t.Parallel()
	j := listen(t, func(c *EndpointConfig) { c.Min, c.Max = 2, 3 })
	join1(t, j.agent("a", 1))
	group, err := j.Gather(within(t), 10*time.Millisecond, patient, 0)
	if err != nil || len(group) != 2 {
		t.Errorf("%d nodes: %v", len(group), err)
	}
}

// A node that is missing is named by its index, and not by its place: the coordinator has an index and no place.
func TestMissingNodeNamed(t *testing.T) {
	t.Parallel()
	j := listen(t, func(c *EndpointConfig) { c.Self.Standby, c.Min, c.Max = true, 2, 2 })
	join1(t, j.agent("b", 2))
	_, err := j.Gather(within(t), 10*time.Millisecond, 0, 0)
	if kindOf(err) != problem.Late || !strings.Contains(err.Error(), "missing: index 1;") {
		t.Error(err)
	}
}

// TestRejoin: a new agent process of a key replaces the old one, whose link ends.
func TestRejoin(t *testing.T) {
	t.Parallel()
	j := listen(t, nil)
	a := join1(t, j.agent("a", -1))
	await[Joined](t, j.Endpoint)
	a.Close()
	if got := await[Suspect](t, j.Endpoint); got.Node != 1 {
		t.Errorf("%+v", got)
	}
	c := j.agent("a", -1)
	c.Self.PID = 11
	b := join1(t, c)
	if got := await[Rejoined](t, j.Endpoint); got.Member.PID != 11 || b.Index() != 1 {
		t.Errorf("%+v", got)
	}
}

// TestExpel: an expelled node learns it, and is lost no earlier than a silent one.
func TestExpel(t *testing.T) {
	t.Parallel()
	clock := &ticks{}
	j := listen(t, clock.set)
	l := join1(t, j.agent("a", -1))
	if err := j.Expel(1, j.Members()[1].Joining, "its GPU fails"); err != nil {
		t.Fatal(err)
	}
	closed(t, "the end of the link", l.Done())
	if !errors.Is(l.Err(), ErrExpelled) || !strings.Contains(l.Err().Error(), "its GPU fails") {
		t.Error(l.Err())
	}
	state := func() State { return j.Members()[1].State }
	if got := state(); got != StateSuspect {
		t.Errorf("an expelled node is %s", got)
	}
	clock.allow(11) // T has passed
	if lost := await[Lost](t, j.Endpoint); lost.Node != 1 || lost.Why != "its GPU fails" {
		t.Errorf("%+v", lost)
	}
	join1(t, j.agent("a", -1))
	if err := j.Expel(9, 1, ""); kindOf(err) != problem.NotFound {
		t.Error(err)
	}
}

// Gather waits for the word of nodes if the caller wants it, and names those that have joined without it.
func TestGatherAdmitted(t *testing.T) {
	t.Parallel()
	j := listen(t, func(c *EndpointConfig) { c.Min, c.Max = 2, 2 })
	j.AwaitAdmission()
	a := join1(t, j.agent("a", 1))
	_, err := j.Gather(within(t), 10*time.Millisecond, 0, 0)
	if kindOf(err) != problem.Late || !strings.Contains(err.Error(), "has joined, and has not opened the store yet") {
		t.Error(err)
	}
	if err := a.Tell("ready", nil); err != nil {
		t.Fatal(err)
	}
	told := await[Message](t, j.Endpoint)
	gathered := make(chan error, 1)
	go func() {
		_, err := j.Gather(within(t), patient, patient, 0)
		gathered <- err
	}()
	j.Admit(told.Node, told.Joining)
	if err := <-gathered; err != nil {
		t.Error(err)
	}
}

// A coordinator that takes over names the nodes that are missing by their indexes, which are not their
// places: the coordinator before had no place.
func TestTooFewAfterTakeover(t *testing.T) {
	t.Parallel()
	j := listen(t, func(c *EndpointConfig) {
		c.Min, c.Max, c.Succeeds = 3, 3, true
		c.Self.Index, c.Self.Standby = 1, true
	})
	join1(t, j.agent("a", 1))
	if _, gone := j.Activate(map[int]int{1: 0, 2: 1, 3: 2}); len(gone) != 2 {
		t.Fatalf("gone %v", gone)
	}
	j.Release([]int{1, 2, 3})
	_, err := j.Gather(within(t), time.Millisecond, 0, 0)
	if err == nil || !strings.Contains(err.Error(), "missing: index 2, 3;") {
		t.Error(err)
	}
}
