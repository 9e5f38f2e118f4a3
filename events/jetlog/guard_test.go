package jetlog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go/jetstream"
)

// Within a process, one decision of a lane is under way at a time; decisions of other
// lanes are not delayed.
func TestOneDecisionOfALane(t *testing.T) {
	_, s := newLog(t)
	entered, leave := make(chan struct{}, 3), make(chan struct{})
	l := connectTo(t, Options{Dial: dial(s), Deciding: func() {
		entered <- struct{}{}
		select {
		case <-leave:
		case <-time.After(5 * time.Second): // fail the test instead of hanging
		}
	}})
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	decide := func(ctx context.Context, d events.Decision, want error) {
		wg.Go(func() {
			if _, err := l.Decide(ctx, d, 0); !errors.Is(err, want) {
				t.Errorf("%v, want %v", err, want)
			}
		})
	}
	enter := func() {
		t.Helper()
		select {
		case <-entered:
		case <-time.After(10 * time.Second):
			t.Fatal("no decision is under way")
		}
	}
	decide(t.Context(), begun(t, "step-1"), nil)
	enter()
	second := begun(t, "step-2")
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := l.Decide(short, second, 0); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "wait for an earlier decision") {
		t.Errorf("a second decision of the lane: %v", err)
	}
	decide(t.Context(), decision(t, events.Aggregate{Run: "run.1", Trial: "u"}, events.TrialCreated{}), nil)
	enter()
	decide(t.Context(), second, ErrConflict)
	close(leave)
	enter()
	wg.Wait()
}

// cutConn passes on a number of facts and is then dead, like all later connections.
type cutConn struct {
	net.Conn
	facts *int
	mu    *sync.Mutex
}

func (c cutConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	const fact = "HPUB ckpt.run%2E1.t.r0."
	for at := 0; ; {
		next := bytes.Index(p[at:], []byte(fact))
		if next < 0 {
			return c.Conn.Write(p)
		}
		if *c.facts == 0 {
			n, err := c.Conn.Write(p[:at+next])
			return n, errors.Join(err, c.Close(), net.ErrClosed)
		}
		*c.facts--
		at += next + len(fact)
	}
}

// A batch that is cut between its messages leaves nothing.
func TestBatchIsAllOrNothing(t *testing.T) {
	t.Parallel()
	l, s := newLog(t)
	for _, passed := range []int{1, 5, 11} {
		mu, facts := &sync.Mutex{}, passed
		broken := connectTo(t, Options{Dial: func(context.Context) (net.Conn, error) {
			c, err := s.Dial()
			return cutConn{c, &facts, mu}, err
		}})
		if _, _, err := broken.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		if _, err := broken.Append(ctx, factsOf(t, 12)...); !errors.Is(err, ErrUnacknowledged) {
			t.Errorf("cut after %d facts: %v", passed, err)
		}
		cancel()
		mu.Lock()
		left := facts
		mu.Unlock()
		if last, err := l.Last(t.Context()); err != nil || last != 1 || left != 0 {
			t.Errorf("cut after %d facts: the log has %d events, want 1; %d were not sent: %v", passed, last, left, err)
		}
		broken.Close()
	}
}

// A batch is retried after a later one was acknowledged. Each event is in the log once,
// at the sequence that its writer received.
func TestRetriesOutOfOrder(t *testing.T) {
	t.Parallel()
	for name, n := range map[string]int{"single": 1, "batch": 12} {
		t.Run(name, func(t *testing.T) {
			other, s := newLog(t)
			d := &lossy{s: s}
			gate := make(chan struct{}, 1)
			gate <- struct{}{} // for the first connection
			l := connectTo(t, Options{Dial: func(ctx context.Context) (net.Conn, error) {
				select {
				case <-gate:
					gate <- struct{}{}
					return d.dial(ctx)
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}})
			if _, _, err := l.Open(t.Context()); err != nil {
				t.Fatal(err)
			}
			first, second := factsOf(t, n), factsOf(t, n)
			<-gate // closed until the second batch is acknowledged
			d.loseNext("ckpt.run%2E1.t.r0.")
			told := make(chan []uint64, 1)
			go func() {
				seqs, err := l.Append(t.Context(), first...)
				if err != nil {
					t.Error(err)
				}
				told <- seqs
			}()
			await(t, "the first batch to be stored", func() bool {
				last, err := other.Last(t.Context())
				return err == nil && last == uint64(n)+1
			})
			later, err := other.Append(t.Context(), second...)
			if err != nil {
				t.Fatal(err)
			}
			gate <- struct{}{}
			seqs := <-told
			// Both again, the later one first, as late copies would come.
			for range 2 {
				for _, again := range []struct {
					facts []events.Fact
					want  []uint64
				}{{second, later}, {first, seqs}} {
					got, err := l.Append(t.Context(), again.facts...)
					if err != nil || len(got) != n || got[0] != again.want[0] || got[n-1] != again.want[n-1] {
						t.Errorf("again: %v, want %v: %v", got, again.want, err)
					}
				}
			}
			if d.lost() != 1 {
				t.Errorf("%d acknowledgements were lost", d.lost())
			}
			all := append(first, second...)
			seqs = append(seqs, later...)
			for i, e := range readAll(t, other, 2, uint64(2*n)+1) {
				if e.ID != all[i].ID || seqs[i] != e.Sequence {
					t.Errorf("event %d is %s, acknowledged as %d", e.Sequence, e.ID, seqs[i])
				}
			}
			if last, err := other.Last(t.Context()); err != nil || last != uint64(2*n)+1 {
				t.Errorf("the log has %d events: %v", last, err)
			}
		})
	}
}

// A decision is never in a batch, whatever is appended at the same time. If a foreign
// client puts a decision into a batch with another, the server refuses it, or a check
// finds it.
func TestDecisionsAreNotBatched(t *testing.T) {
	l, _ := newLog(t)
	var wg sync.WaitGroup
	for range 4 {
		facts := factsOf(t, 60)
		wg.Go(func() {
			for i := 0; i < len(facts); i += 12 {
				if _, err := l.Append(t.Context(), facts[i:i+12]...); err != nil {
					t.Error(err)
				}
			}
		})
	}
	end := uint64(0)
	for range 6 {
		seq, err := l.Decide(t.Context(), begun(t, "step"), end)
		if err != nil {
			t.Fatal(err)
		}
		m, err := l.getStored(t.Context(), Stream, msgGet{Seq: seq})
		if err != nil {
			t.Fatal(err)
		}
		if header, err := m.header(); err != nil || header.Get(headerBatchID) != "" {
			t.Errorf("decision %d is in batch %q: %v", seq, header.Get(headerBatchID), err)
		}
		end = seq
	}
	wg.Wait()

	// Two decisions of one batch that were made after the same event.
	for i, d := range []events.Decision{begun(t, "x"), begun(t, "y")} {
		m := message(d.Event)
		m.Header[jetstream.ExpectedLastSubjSeqHeader] = []string{fmt.Sprint(end)}
		m.Header["Nats-Expected-Last-Subject-Sequence-Subject"] = []string{trial.Lane()}
		m.Header[headerBatchID] = []string{"strange"}
		m.Header[headerBatchSequence] = []string{fmt.Sprint(uint64(i) + 1)}
		if i == 1 {
			m.Header[headerBatchCommit] = []string{"1"}
			reply, err := l.nc.RequestMsgWithContext(t.Context(), m)
			if err != nil {
				t.Fatal(err)
			}
			now, err := l.LaneEnd(t.Context(), trial)
			if err != nil {
				t.Fatal(err)
			}
			_, found := checkAll(t, l, CheckOptions{})
			t.Logf("the server replied %s", reply.Data)
			if now == end && found != "" || now != end && !strings.Contains(found, "of its lane, and follows event") {
				t.Errorf("the lane went from %d to %d, the check found %q", end, now, found)
			}
		} else if err := l.nc.PublishMsg(m); err != nil {
			t.Fatal(err)
		}
	}
}
