package nodes

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// A link moves to the endpoint of another coordinator of the job. It keeps its index and its token. What the
// first one had not acknowledged is sent again, after the first message; commands continue with those of
// the second one.
func TestLinkMoves(t *testing.T) {
	t.Parallel()
	first := listen(t, nil)
	l := join1(t, first.agent("a", 1))
	await[Joined](t, first.Endpoint)
	if err := first.Send(1, "old", nil); err != nil {
		t.Fatal(err)
	}
	if c := <-l.Commands(); c.Kind != "old" {
		t.Fatalf("command %q", c.Kind)
	}
	if err := first.Desert(); err != nil {
		t.Fatal(err)
	}
	if err := l.Tell("unheard", 1); err != nil {
		t.Fatal(err)
	}

	second := listen(t, func(c *EndpointConfig) {
		c.Dir, c.Succeeds = first.dir, true
		c.Self = Node{Key: "standby", Index: 1, Host: "beta", Standby: true}
	})
	if second.token != first.token {
		t.Error("another token")
	}
	err := l.Move(within(t), second.Addr().String(), func() (string, any) { return "inventory", 2 })
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Tell("later", 3); err != nil {
		t.Fatal(err)
	}
	var got []string
	for range 3 {
		m := await[Message](t, second.Endpoint)
		got = append(got, m.Kind+string(m.Body))
	}
	if text, _ := json.Marshal(got); string(text) != `["inventory2","unheard1","later3"]` {
		t.Errorf("messages %s", text)
	}
	if members := second.Members(); len(members) != 1 || members[0].Index != 1 || members[0].Key != "a" {
		t.Errorf("members %+v", members)
	}
	if err := second.Send(1, "new", nil); err != nil {
		t.Fatal(err)
	}
	if c := <-l.Commands(); c.Kind != "new" {
		t.Errorf("command %q", c.Kind)
	}
	if l.Endpoint() != second.Addr().String() || l.Err() != nil {
		t.Errorf("at %s, %v", l.Endpoint(), l.Err())
	}
}

// muted is a connection that brings no answer once it is mute.
type muted struct {
	net.Conn
	mute *atomic.Bool
}

func (m muted) Read(p []byte) (int, error) {
	n, err := m.Conn.Read(p)
	if m.mute.Load() {
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

// A link whose joining of another endpoint was not answered joins it once: a node that joins twice counts as started
// again, which ends a living group.
func TestLinkMovesOnce(t *testing.T) {
	t.Parallel()
	first := listen(t, nil)
	var mute atomic.Bool
	a := first.agent("a", 1)
	a.dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, address)
		return muted{c, &mute}, err
	}
	l := join1(t, a)
	await[Joined](t, first.Endpoint)
	if err := first.Desert(); err != nil {
		t.Fatal(err)
	}
	second := listen(t, func(c *EndpointConfig) {
		c.Dir, c.Succeeds = first.dir, true
		c.Self = Node{Key: "standby", Index: 1, Host: "beta", Standby: true}
		c.Logger = slog.New(joining{c.Logger.Handler(), func() { mute.Store(true) }})
	})
	inventory := func() (string, any) { return "inventory", 2 }
	if err := l.Move(within(t), second.Addr().String(), inventory); err == nil {
		t.Fatal("moved without an answer")
	}
	mute.Store(false)
	await[Joined](t, second.Endpoint)
	if err := l.Move(within(t), second.Addr().String(), inventory); err != nil {
		t.Fatal(err)
	}
	for {
		switch e := (<-second.Events()).(type) {
		case Suspect, Recovered:
			continue // on a busy machine
		case Message:
			if e.Kind != "inventory" {
				t.Errorf("message %+v", e)
			}
		default:
			t.Errorf("after the joining: %T %+v", e, e)
		}
		return
	}
}

// joining calls do when a node has joined, before it gets the answer.
type joining struct {
	slog.Handler
	do func()
}

// Handle implements [slog.Handler].
func (j joining) Handle(ctx context.Context, r slog.Record) error {
	if r.Message == "node joined" {
		j.do()
	}
	return j.Handler.Handle(ctx, r)
}

// A coordinator whose place another one has taken does not remove the other one's credentials.
func TestCredentialsOfSuccessorStay(t *testing.T) {
	t.Parallel()
	first := listen(t, nil)
	second := listen(t, func(c *EndpointConfig) { c.Dir, c.Succeeds = first.dir, true })
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := readCredentials(first.dir, "job-1"); err != nil {
		t.Errorf("after the end of the first one: %v", err)
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(credentialsPath(first.dir, "job-1")); !os.IsNotExist(err) {
		t.Errorf("after the end of the second one: %v", err)
	}
}

// A standby is no part of a group, whether it coordinates or waits.
func TestStandbyTakesNoPart(t *testing.T) {
	t.Parallel()
	j := listen(t, func(c *EndpointConfig) { c.Self.Standby, c.Min, c.Max = true, 2, 2 })
	for index, key := range []string{"", "a", "b", "c"} {
		if index == 0 {
			continue
		}
		a := j.agent(key, index)
		a.Self.Standby = key == "a"
		join1(t, a)
	}
	group, err := j.Gather(within(t), patient, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if len(group) != 2 || group[0].Index+group[1].Index != 2+3 {
		t.Errorf("group %+v", group)
	}
}

// A coordinator that did not run for T, or 10 s if that is less, answers no node before it is sure that no
// other has taken its place. After a shorter pause it answers: its lease has not ended, and the log may be away.
func TestPausedCoordinatorIsSureFirst(t *testing.T) {
	t.Parallel()
	var pause atomic.Int64
	var verified atomic.Bool
	sure := make(chan error)
	j := listen(t, func(c *EndpointConfig) {
		c.Timeout, c.Now = 20*time.Second, func() time.Time { return time.Now().Add(time.Duration(pause.Load())) }
		c.Verify = func(ctx context.Context) error {
			verified.Store(true)
			select {
			case err := <-sure:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	l := join1(t, j.agent("a", 1))
	pause.Store(int64(6 * time.Second))
	if _, err := request[nothing](within(t), l, l.rest, patient, "/v1/beat", beatRequest{}); err != nil || verified.Load() {
		t.Errorf("right after a short pause: %v, verified %v", err, verified.Load())
	}
	pause.Store(int64(20 * time.Second))
	_, err := request[nothing](within(t), l, l.rest, patient, "/v1/beat", beatRequest{})
	if kindOf(err) != problem.Unavailable {
		t.Errorf("right after a pause: %v", err)
	}
	sure <- problem.Errorf(problem.Conflict, "not yet")
	_, err = request[nothing](within(t), l, l.rest, patient, "/v1/beat", beatRequest{})
	if kindOf(err) != problem.Unavailable {
		t.Errorf("unsure: %v", err)
	}
	sure <- nil
	for {
		if _, err = request[nothing](within(t), l, l.rest, patient, "/v1/beat", beatRequest{}); err == nil {
			break
		}
		if kindOf(err) != problem.Unavailable {
			t.Fatalf("sure: %v", err)
		}
	}
}
