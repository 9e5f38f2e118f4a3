package jetlog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// behind is a connection to the server of a log that seems to have three copies. Its next
// answers may be those of a leader that is behind, or was deposed.
type behind struct {
	s  *Server
	mu sync.Mutex

	last, stale string // of the stream; the next answers have stale in place of last
	answers     int
	refuse      int // decisions whose condition is spoiled on the way
}

func (b *behind) dial(context.Context) (net.Conn, error) {
	c, err := b.s.Dial()
	return &behindConn{c, b}, err
}

type behindConn struct {
	net.Conn
	b *behind
}

// Read implements [net.Conn].
func (c *behindConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	if at := bytes.Index(p[:n], []byte(`"num_replicas":1`)); at >= 0 {
		copy(p[at:], `"num_replicas":3`)
	}
	if at := bytes.Index(p[:n], []byte(`"last_seq":`+c.b.last)); at >= 0 && c.b.answers > 0 {
		c.b.answers--
		copy(p[at:], `"last_seq":`+c.b.stale)
		if at := bytes.Index(p[:n], []byte(`"messages":`+c.b.last)); at >= 0 {
			copy(p[at:], `"messages":`+c.b.stale)
		}
	}
	return n, err
}

// Write implements [net.Conn].
func (c *behindConn) Write(p []byte) (int, error) {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	name := []byte("Nats-Expected-Last-Subject-Sequence: ")
	if at := bytes.Index(p, name); at >= 0 && c.b.refuse > 0 {
		c.b.refuse--
		p = bytes.Clone(p)
		p[at+len(name)]++
	}
	return c.Conn.Write(p)
}

// A server of a replicated log that has fewer events than were seen is asked again: nothing
// is lost. A refusal of a decision is no conflict when the lane has not moved.
func TestLeaderThatIsBehind(t *testing.T) {
	t.Parallel()
	_, s := newLog(t)
	b := &behind{s: s}
	l := connectTo(t, Options{Dial: b.dial})
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Append(t.Context(), factsOf(t, 4)...); err != nil {
		t.Fatal(err)
	}
	set := func(answers, refuse int) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.last, b.stale, b.answers, b.refuse = "5", "3", answers, refuse
	}
	left := func() string {
		b.mu.Lock()
		defer b.mu.Unlock()
		return fmt.Sprint(b.answers, b.refuse)
	}
	set(3, 0)
	if last, err := l.Last(t.Context()); err != nil || last != 5 {
		t.Errorf("the log ends at %d, %v", last, err)
	}
	set(2, 0)
	if n := len(readAll(t, l, 1, 5)); n != 5 {
		t.Errorf("%d events", n)
	}
	set(0, 2)
	at, err := l.Decide(t.Context(), begun(t, "step-1"), 0)
	if err != nil || at != 6 {
		t.Errorf("decided at %d, %v", at, err)
	}
	if left := left(); left != "0 0" {
		t.Errorf("%s answers were not used", left)
	}
}

// A replicated log that stays behind was rolled back, and is reported as damaged after the
// patience. A decision that stays refused is a conflict.
func TestLogThatStaysBehind(t *testing.T) {
	t.Parallel()
	_, s := newLog(t)
	b := &behind{s: s}
	l := connectTo(t, Options{Dial: b.dial})
	l.patience = 300 * time.Millisecond
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Append(t.Context(), factsOf(t, 4)...); err != nil {
		t.Fatal(err)
	}
	b.mu.Lock()
	b.last, b.stale, b.answers, b.refuse = "5", "3", 1<<30, 1<<30
	b.mu.Unlock()
	begin := time.Now()
	_, err := l.Last(t.Context())
	if took := time.Since(begin); !errors.Is(err, ErrGap) || took < l.patience {
		t.Errorf("after %v: %v", took, err)
	}
	for _, err := range l.Read(t.Context(), 6, 6) {
		if !errors.Is(err, ErrGap) {
			t.Errorf("read: %v", err)
		}
	}
	var conflict *ConflictError
	if _, err := l.Decide(t.Context(), begun(t, "step-1"), 0); !errors.As(err, &conflict) {
		t.Errorf("decide: %v", err)
	}
}

// A stale answer long after another one has its own patience.
func TestStaleAnswerAgain(t *testing.T) {
	t.Parallel()
	l := &Log{patience: time.Minute, seen: 5}
	info := &jetstream.StreamInfo{Config: jetstream.StreamConfig{Replicas: 3}, State: jetstream.StreamState{LastSeq: 3}}
	if err := l.upToDate(info); err == nil {
		t.Error("the first stale answer is taken")
	}
	l.behind, l.stale = l.behind.Add(-time.Hour), l.stale.Add(-time.Hour)
	if err := l.upToDate(info); err == nil {
		t.Error("a stale answer an hour later is taken")
	}
	l.behind = l.behind.Add(-time.Hour)
	if err := l.upToDate(info); err != nil {
		t.Errorf("after the patience: %v", err)
	}
}

// counting is a connection that counts the messages that are requested one by one.
type counting struct {
	s  *Server
	mu sync.Mutex
	n  int
}

func (c *counting) dial(context.Context) (net.Conn, error) {
	conn, err := c.s.Dial()
	return &countingConn{conn, c}, err
}

type countingConn struct {
	net.Conn
	c *counting
}

// Write implements [net.Conn].
func (c *countingConn) Write(p []byte) (int, error) {
	c.c.mu.Lock()
	c.c.n += bytes.Count(p, []byte("PUB $JS.API.STREAM.MSG.GET."))
	c.c.mu.Unlock()
	return c.Conn.Write(p)
}

// A decision that has seen nothing of a long lane is refused without reading it: the time
// for that may be longer than an attempt may take, and no attempt would ever end.
func TestLateDecisionReadsNoLane(t *testing.T) {
	t.Parallel()
	l, s := newLog(t)
	end := uint64(0)
	for i := range 50 {
		var err error
		if end, err = l.Decide(t.Context(), begun(t, fmt.Sprint("step-", i)), end); err != nil {
			t.Fatal(err)
		}
	}
	c := &counting{s: s}
	late := connectTo(t, Options{Dial: c.dial})
	if _, _, err := late.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	c.n = 0
	c.mu.Unlock()
	var conflict *ConflictError
	if _, err := late.Decide(t.Context(), begun(t, "late"), 0); !errors.As(err, &conflict) || conflict.Actual != end {
		t.Errorf("a late decision: %v, want a conflict at %d", err, end)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == 0 || c.n > 4 {
		t.Errorf("%d messages were requested", c.n)
	}
}
