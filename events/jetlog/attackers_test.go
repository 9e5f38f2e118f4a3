package jetlog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/front"
)

// besieged returns a log with a listener, and a client of it.
func besieged(t *testing.T, admit func() error) (addr string, client *Log) {
	t.Helper()
	s, err := StartServer(t.Context(), ServerOptions{
		Dir: t.TempDir(), Unsynced: true, Listen: &Listen{Address: "127.0.0.1:0", Token: token}, Bounds: front.Limits{Comeback: 1}, Admit: admit,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Shutdown)
	l := connectTo(t, s.OwnerOptions())
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	if err := l.CreateBuckets(t.Context()); err != nil {
		t.Fatal(err)
	}
	at, err := s.Listen(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	client = connectTo(t, Options{URL: "nats://" + at.String(), Token: token})
	if _, _, err := client.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	return at.String(), client
}

// TestJudgedDecisionIsNotKeptBack checks that a decision that was judged while a run
// was free is passed on then. A client that sends a partial frame after it cannot delay
// it until another client has the run.
func TestJudgedDecisionIsNotKeptBack(t *testing.T) {
	t.Parallel()
	addr, trainer := besieged(t, nil)
	last, err := trainer.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	guess := last + 1 // the sequence of the trainer's next decision
	a := call(t, addr)
	a.enter()
	a.say("SUB _INBOX.0123456789abcdef.* 1\r\nPING\r\n")
	a.hears("PONG")
	m := events.Encode(decision(t, trial, events.CheckpointSuperseded{Checkpoint: "step-1.a1", Reason: "forged"}).Event)
	block := fmt.Sprintf("NATS/1.0\r\nNats-Expected-Stream: %s\r\nNats-Expected-Last-Subject-Sequence: %d\r\nNats-Expected-Last-Subject-Sequence-Subject: %s\r\n", Stream, guess, trial.Lane())
	for name, values := range m.Header {
		block += name + ": " + values[0] + "\r\n"
	}
	block += "\r\n"
	a.say("HPUB %s _INBOX.0123456789abcdef.x %d %d\r\n%s%s\r\nPI", m.Subject, len(block), len(block)+len(m.Data), block, m.Data)
	a.hears("wrong last sequence") // without the rest of the PING

	if _, err := trainer.Lease(t.Context(), RunLease(trial.Run), []byte("{}"), time.Minute); err != nil {
		t.Fatal(err)
	}
	seq, err := trainer.Decide(t.Context(), begun(t, "step-1"), 0)
	if err != nil || seq != guess {
		t.Fatalf("decided as event %d, want %d: %v", seq, guess, err)
	}
	a.say("NG\r\n")
	a.hears("PONG")
	if _, err := trainer.Decide(t.Context(), decision(t, trial, events.CheckpointStaged{Attempt: 1, Checkpoint: "step-1.a1"}), seq); err != nil {
		t.Error(err)
	}
}

// TestManyRequestsUnderWay checks that clients that send the most expensive request as
// fast as they can do not block another client.
func TestManyRequestsUnderWay(t *testing.T) {
	t.Parallel()
	addr, client := besieged(t, nil)
	for n := range 30 { // many subjects
		facts := make([]events.Fact, 100)
		for i := range facts {
			f, err := events.NewFact(stamp(), events.Scope{Run: fmt.Sprintf("run-%d", 100*n+i), Trial: "main", Actor: events.Rank(0)}, &events.Metrics{Attempt: 1, Iteration: 1})
			if err != nil {
				t.Fatal(err)
			}
			facts[i] = f
		}
		if _, err := client.Append(t.Context(), facts...); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var attackers sync.WaitGroup
	defer attackers.Wait()
	for n := range 4 {
		c := call(t, addr)
		c.enter()
		c.say("SUB _INBOX.0123456789abcde%d.* 1\r\n", n)
		body := `{"subjects_filter":">"}`
		many := strings.Repeat(fmt.Sprintf("PUB $JS.API.STREAM.INFO.CKPT _INBOX.0123456789abcde%d.a %d\r\n%s\r\n", n, len(body), body), 200)
		attackers.Go(func() { _, _ = io.Copy(io.Discard, c.conn) })
		attackers.Go(func() {
			for ctx.Err() == nil {
				if _, err := io.WriteString(c.conn, many); err != nil {
					return
				}
			}
		})
		defer func() { _ = c.conn.Close() }()
	}
	<-time.After(2 * time.Second) // by now the maximum number waits
	for range 5 {
		within, done := context.WithTimeout(t.Context(), 10*time.Second)
		if _, err := client.LaneEnd(within, trial); err != nil {
			t.Error(err)
		}
		done()
	}
}

// TestEntriesNeedRoom checks that a disk without room takes no new lease or cursor,
// while existing ones keep working.
func TestEntriesNeedRoom(t *testing.T) {
	t.Parallel()
	var full atomic.Bool
	_, l := besieged(t, func() error {
		if full.Load() {
			return fmt.Errorf("no room: %w", syscall.ENOSPC)
		}
		return nil
	})
	held, err := l.Lease(t.Context(), RunLease("one"), nil, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	full.Store(true)
	if err := held.Renew(t.Context()); err != nil {
		t.Errorf("a lease that is held: %v", err)
	}
	if _, err := l.Lease(t.Context(), RunLease("two"), nil, time.Minute); !errors.Is(err, ErrRefused) {
		t.Errorf("another lease: %v", err)
	}
}

// TestAnswersAreNotMixed checks that no other answer arrives on the subject of a
// request under way, which would free its slot too early.
func TestAnswersAreNotMixed(t *testing.T) {
	t.Parallel()
	addr, _ := besieged(t, nil)
	a := call(t, addr)
	a.enter()
	const reply = "_INBOX.0123456789abcdef.a"
	a.say("SUB _INBOX.0123456789abcdef.* 1\r\nPUB $JS.API.STREAM.INFO.CKPT %s 0\r\n\r\nPUB $JS.API.CONSUMER.MSG.NEXT.CKPT.x %s 0\r\n\r\n", reply, reply)
	a.hears(`Permissions Violation for Publish to "$JS.API.CONSUMER.MSG.NEXT.CKPT.x"`)
	a.hears("MSG " + reply)
}

// TestInboxOfAnOldConnection checks that frames which an old connection sent before its
// client reconnected are no sign of life, even if the owner reads them only now: it may
// have been stopped.
func TestInboxOfAnOldConnection(t *testing.T) {
	t.Parallel()
	addr, _ := besieged(t, nil)
	const private = "_INBOX.0123456789abcdef"
	old := call(t, addr)
	old.enter()
	old.say("SUB %s.* 1\r\nPING\r\n", private)
	old.hears("PONG")
	ended := make(chan struct{})
	go func() { // frames, but no answer to a PING
		defer close(ended)
		for tick := time.Tick(20 * time.Millisecond); ; <-tick {
			if _, err := io.WriteString(old.conn, "PING\r\n"); err != nil {
				return
			}
		}
	}()
	again := call(t, addr)
	again.enter()
	again.say("SUB %s.* 1\r\nPUB $JS.API.STREAM.NAMES %s.x 20\r\n{\"subject\":\"ckpt.>\"}\r\n", private, private)
	again.hears("MSG " + private + ".x 1")
	<-ended
}
