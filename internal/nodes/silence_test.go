package nodes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
)

// silenceT is T in tests that wait for silence.
const silenceT = 500 * time.Millisecond

func short(c *EndpointConfig) { c.Timeout = silenceT }

// ticks is a coordinator's clock that moves by T/10 at each tick, as long as a test allows it.
type ticks struct{ allowed, passed atomic.Int64 }

func (k *ticks) set(c *EndpointConfig) {
	short(c)
	c.Ticked = func(time.Time, time.Duration) {
		if k.passed.Load() < k.allowed.Load() {
			k.passed.Add(1)
		}
	}
	c.Now = func() time.Time { return epoch.Add(time.Duration(k.passed.Load()) * silenceT / 10) }
}

func (k *ticks) allow(n int64) { k.allowed.Add(n) }

// The caller learns when the endpoint begins that its process runs: the ranks of a coordinating process that is
// stopped before the first tick must have a deadline too.
func TestTickedAtFirst(t *testing.T) {
	t.Parallel()
	var at atomic.Pointer[time.Time]
	listen(t, func(c *EndpointConfig) {
		c.Timeout = mostTimeout
		c.Ticked = func(now time.Time, _ time.Duration) { at.Store(&now) }
	})
	if at.Load() == nil {
		t.Error("no tick before the first tenth of the timeout has passed")
	}
}

// TestSilence cuts the network of an agent without closing a connection. Both sides
// notice: the agent after T/2, the coordinator after T. When the network is back, the
// agent learns that it is lost, and can join again.
func TestSilence(t *testing.T) {
	t.Parallel()
	j := listen(t, short)
	n := newNetwork(t)
	c := j.agent("a", -1)
	c.dial = n.dial
	l := join1(t, c)
	closed(t, "contact", l.Contact())
	n.sever()
	closed(t, "silence of the agent", l.Silent())
	select {
	case <-l.Contact(): // by an answer from before, if a busy machine had made the agent silent already
		closed(t, "silence of the agent", l.Silent())
	default:
	}
	select {
	case <-l.Contact():
		t.Error("contact during silence")
	default:
	}
	if got := await[Lost](t, j.Endpoint); got.Node != 1 || !strings.Contains(got.Why, "nothing was received") {
		t.Errorf("%+v", got)
	}
	if err := j.Send(1, "do", nil); err == nil {
		t.Error("a command was sent to a lost node")
	}
	select {
	case <-l.Done():
		t.Fatalf("the link has ended: %v", l.Err())
	default:
	}
	n.mend()
	closed(t, "the end of the link", l.Done())
	if !errors.Is(l.Err(), ErrExpelled) {
		t.Error(l.Err())
	}
	if again := join1(t, c); again.Index() != 1 {
		t.Errorf("index %d", again.Index())
	}
	await[Rejoined](t, j.Endpoint)
}

// TestShortSilence: a cut shorter than T leaves the agent a member. Commands and messages
// of the meantime arrive, once each, over new connections.
func TestShortSilence(t *testing.T) {
	t.Parallel()
	clock := &ticks{}
	j := listen(t, clock.set)
	n := newNetwork(t)
	c := j.agent("a", -1)
	c.dial = n.dial
	l := join1(t, c)
	for round := range 3 {
		n.sever()
		if err := errors.Join(l.Tell("message", round), j.Send(1, "command", round)); err != nil {
			t.Fatal(err)
		}
		if round == 0 {
			clock.allow(8)
			if got := await[Suspect](t, j.Endpoint); got.Node != 1 {
				t.Errorf("%+v", got)
			}
			waitFor(t, func() bool { return clock.passed.Load() == clock.allowed.Load() })
		}
		n.mend()
		if round == 0 {
			await[Recovered](t, j.Endpoint)
		}
		if got := await[Message](t, j.Endpoint); string(got.Body) != fmt.Sprint(round) {
			t.Errorf("%s in round %d", got.Body, round)
		}
		select {
		case got := <-l.Commands():
			if string(got.Body) != fmt.Sprint(round) {
				t.Errorf("%s in round %d", got.Body, round)
			}
		case <-within(t).Done():
			t.Fatal("no command")
		}
	}
	if l.Err() != nil {
		t.Error(l.Err())
	}
}

// TestSilentAgain: after contact is back, the next silence is reported too.
func TestSilentAgain(t *testing.T) {
	t.Parallel()
	// The coordinator's clock stands still, so that it judges no node.
	j := listen(t, func(c *EndpointConfig) {
		short(c)
		c.Now = func() time.Time { return epoch }
	})
	n := newNetwork(t)
	c := j.agent("a", -1)
	c.dial = n.dial
	var beats atomic.Int64
	c.Answered = func(time.Time, time.Duration) { beats.Add(1) }
	l := join1(t, c)
	for range 2 {
		closed(t, "contact", l.Contact())
		silent := l.Silent()
		n.sever()
		closed(t, "silence", silent)
		before := beats.Load()
		contact := l.Contact()
		n.mend()
		closed(t, "contact again", contact)
		if beats.Load() == before && !waitFor(t, func() bool { return beats.Load() > before }) {
			t.Error("contact without an answered beat")
		}
	}
}

// waitFor polls a condition that has no event.
func waitFor(t *testing.T, ok func() bool) bool {
	t.Helper()
	ctx := within(t)
	for !ok() {
		if pauseFor(ctx, 5*time.Millisecond) != nil {
			return false
		}
	}
	return true
}

// TestNoContact: a link ends when no endpoint answers for Wait.
func TestNoContact(t *testing.T) {
	t.Parallel()
	j := listen(t, short)
	n := newNetwork(t)
	c := j.agent("a", -1)
	c.dial = n.dial
	c.Wait = 2 * silenceT
	l := join1(t, c)
	n.sever()
	closed(t, "the end of the link", l.Done())
	if !errors.Is(l.Err(), ErrNoContact) || !strings.Contains(l.Err().Error(), j.Addr().String()) {
		t.Error(l.Err())
	}
	if err := l.Tell("late", nil); err != nil {
		t.Error(err)
	}
	if err := l.Flush(within(t)); !errors.Is(err, ErrNoContact) {
		t.Error(err)
	}
}

// TestPause: a coordinator whose clock jumps reports it, and loses no node for it.
func TestPause(t *testing.T) {
	t.Parallel()
	var jump atomic.Int64
	j := listen(t, func(c *EndpointConfig) {
		c.Now = func() time.Time { return time.Now().Add(time.Duration(jump.Load())) }
	})
	join1(t, j.agent("a", -1))
	jump.Store(int64(time.Hour))
	if got := await[Paused](t, j.Endpoint); got.For < 59*time.Minute {
		t.Errorf("%+v", got)
	}
	if got := j.Members()[1]; got.State == StateLost {
		t.Errorf("%+v", got)
	}
}

// TestClosedConnections: the end of an agent's process makes its node suspect at once.
func TestClosedConnections(t *testing.T) {
	t.Parallel()
	j := listen(t, func(c *EndpointConfig) { c.Timeout = time.Hour })
	l := join1(t, j.agent("a", -1))
	if err := l.Tell("hello", nil); err != nil {
		t.Fatal(err)
	}
	await[Message](t, j.Endpoint)
	l.Close()
	if got := await[Suspect](t, j.Endpoint); got.Node != 1 || !strings.Contains(got.Why, "connections are closed") {
		t.Errorf("%+v", got)
	}
}

// TestRelay: a relayed request has the index of its node, and ends with the membership.
func TestRelay(t *testing.T) {
	t.Parallel()
	j := listen(t, nil)
	ended := make(chan struct{})
	j.Handle("POST /echo/{name}", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := httpkit.Read(w, r, 100)
		if err != nil {
			httpkit.Refuse(w, err)
			return
		}
		fmt.Fprintf(w, "%d %s %s", From(r.Context()), r.PathValue("name"), body)
	}))
	j.Handle("GET /wait", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		close(ended)
	}))
	l := join1(t, j.agent("a", -1))
	reply, err := l.Client().Post(l.URL("/echo/x"), httpkit.JSON, strings.NewReader("hello"))
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(reply.Body)
	_ = reply.Body.Close()
	if err != nil || string(body) != "1 x hello" || reply.ProtoMajor != 2 {
		t.Errorf("%s, %v, HTTP/%d", body, err, reply.ProtoMajor)
	}
	if _, err := l.Client().Get("https://" + j.Addr().String() + "/v1/job"); err == nil {
		t.Error("a request that is not relayed was sent with the token")
	}
	if From(context.Background()) != -1 {
		t.Error("a request without a node has an index")
	}
	reply, err = l.Client().Get(l.URL("/wait"))
	if err != nil {
		t.Fatal(err)
	}
	defer reply.Body.Close()
	if err := j.Expel(1, j.Members()[1].Joining, "a test"); err != nil {
		t.Fatal(err)
	}
	closed(t, "the end of the request", ended)
}
