package jetlog

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// checkAll checks l, and returns the outcome and the findings as text.
func checkAll(t *testing.T, l *Log, o CheckOptions) (Checked, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	c, err := l.Check(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, f := range c.Findings {
		found = append(found, f.String())
	}
	return c, strings.Join(found, "\n")
}

// A complete log has no finding: batches, late repetitions of facts, and lanes in which
// retries were refused.
func TestCheckWhole(t *testing.T) {
	l, _ := newLog(t)
	after := uint64(0)
	for i := range 3 {
		if _, err := l.Append(t.Context(), factsOf(t, 12)...); err != nil {
			t.Fatal(err)
		}
		d, end := begun(t, fmt.Sprint("step-", i)), after
		for range 2 { // the second check reads the same events again
			seq, err := l.Decide(t.Context(), d, after)
			if err != nil {
				t.Fatal(err)
			}
			end = seq
		}
		after = end
	}
	var bytes, seen int64
	c, found := checkAll(t, l, CheckOptions{
		Each: func(e events.Recorded) []string {
			if seen++; e.Sequence != uint64(seen) {
				t.Errorf("event %d after %d", e.Sequence, seen-1)
			}
			return nil
		},
		Pace: func(_ context.Context, n int64) error { bytes += n; return nil },
	})
	if found != "" || c.Events != 40 || c.First != 1 || c.Last != 40 || c.Decisions != 4 || c.Repeated != 0 || seen != 40 || bytes == 0 {
		t.Errorf("%+v, %d events seen, %d bytes", c, seen, bytes)
	}
}

// Damaged events are named, and the events after them are read.
func TestCheckDamaged(t *testing.T) {
	for name, c := range map[string]struct {
		seq    int
		events uint64
		says   string
	}{
		"in the middle": {6, 9, "event 6: it is not there, or cannot be read"},
		"at the end":    {10, 9, "event 10: it is not there, or cannot be read"},
	} {
		t.Run(name, func(t *testing.T) {
			l := damage(t, c.seq, false)
			got, found := checkAll(t, l, CheckOptions{})
			if !strings.HasPrefix(found, c.says) || len(got.Findings) != 1 || got.Events != c.events {
				t.Errorf("%d events, found %q; want %d and %q", got.Events, found, c.events, c.says)
			}
		})
	}
	t.Run("what the server knows", func(t *testing.T) {
		l := connectTo(t, startServer(t, t.TempDir()).OwnerOptions())
		config := streamConfig(1)
		config.DenyDelete = false
		stream, err := l.js.CreateStream(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range factsOf(t, 5) {
			if _, err := l.publish(t.Context(), message(f.Event)); err != nil {
				t.Fatal(err)
			}
		}
		for _, seq := range []uint64{2, 3} {
			if err := stream.DeleteMsg(t.Context(), seq); err != nil {
				t.Fatal(err)
			}
		}
		got, found := checkAll(t, l, CheckOptions{})
		if !strings.Contains(found, "2 of 5 events are deleted") || !strings.Contains(found, "events 2 to 3: it is not there") || got.Events != 3 {
			t.Errorf("%+v: %s", got, found)
		}
	})
}

// Events written against the rules are found.
func TestCheckStrangers(t *testing.T) {
	for name, c := range map[string]struct {
		write func(t *testing.T, l *Log)
		says  string
	}{
		"no event": {func(t *testing.T, l *Log) {
			if _, err := l.js.PublishMsg(t.Context(), &nats.Msg{Subject: "ckpt.greetings"}); err != nil {
				t.Fatal(err)
			}
		}, "void: not of the form"},
		"another message ID": {func(t *testing.T, l *Log) {
			m := message(fact(t, 1).Event)
			m.Header[events.HeaderMsgID] = []string{"other"}
			if _, err := l.js.PublishMsg(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}, `void: header Nats-Msg-Id is "other"`},
		"unconditional": {func(t *testing.T, l *Log) {
			if _, err := l.publish(t.Context(), message(begun(t, "step-2").Event)); err != nil {
				t.Fatal(err)
			}
		}, "void: checkpoint.begun is a decision, and was appended without the condition of its lane"},
		"a second beginning": {func(t *testing.T, l *Log) {
			m := message(created(t, "store-2").Event)
			m.Header[jetstream.ExpectedLastSubjSeqHeader] = []string{"1"}
			m.Header[jetstream.ExpectedLastSubjSeqSubjHeader] = []string{events.Aggregate{}.Lane()}
			if _, err := l.js.PublishMsg(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}, "void: store.created is event 1 and no other"},
		"after another": {func(t *testing.T, l *Log) {
			other := events.Aggregate{Run: "other", Trial: "main"}
			m := message(decision(t, other, events.CheckpointBegun{Attempt: 1, Checkpoint: "step-2.a1", Name: "step-2", WorldSize: 1, Participants: []int{0}}).Event)
			m.Header[jetstream.ExpectedLastSubjSeqHeader] = []string{"0"}
			m.Header[jetstream.ExpectedLastSubjSeqSubjHeader] = []string{other.Lane()}
			m.Header[headerFollows] = []string{"1"} // of another lane
			if _, err := l.js.PublishMsg(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}, "was made after event 1 of its lane, and follows event 0"},
		"on the condition of another lane": {func(t *testing.T, l *Log) {
			m := message(begun(t, "step-2").Event)
			m.Header[jetstream.ExpectedLastSubjSeqHeader] = []string{"2"}
			m.Header[jetstream.ExpectedLastSubjSeqSubjHeader] = []string{"ckpt.>"}
			if _, err := l.js.PublishMsg(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}, "void: checkpoint.begun is a decision, and was appended without the condition of its lane"},
		"a decision twice": {func(t *testing.T, l *Log) {
			d := begun(t, "step-2")
			if _, err := l.Decide(t.Context(), d, 2); err != nil {
				t.Fatal(err)
			}
			m := message(d.Event)
			m.Header.Del(events.HeaderMsgID)
			m.Header[jetstream.ExpectedLastSubjSeqHeader] = []string{"3"}
			m.Header[jetstream.ExpectedLastSubjSeqSubjHeader] = []string{trial.Lane()}
			if _, err := l.js.PublishMsg(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}, ""},
		"a fact as a decision": {func(t *testing.T, l *Log) {
			m := message(fact(t, 1).Event)
			m.Subject = events.Subject(events.Scope{Run: trial.Run, Trial: trial.Trial, Actor: events.Server}, events.Metrics{}.Kind())
			if _, err := l.js.PublishMsg(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}, "void: report.metrics cannot have the actor s"},
		"a decision as a fact": {func(t *testing.T, l *Log) {
			e := begun(t, "step-2").Event
			e.Scope.Actor = events.Rank(0)
			if _, err := l.js.PublishMsg(t.Context(), message(e)); err != nil {
				t.Fatal(err)
			}
		}, "void: checkpoint.begun cannot have the actor r0"},
		"a condition in another spelling": {func(t *testing.T, l *Log) {
			m := message(begun(t, "step-2").Event)
			m.Header[jetstream.ExpectedLastSubjSeqHeader] = []string{"02"}
			m.Header[jetstream.ExpectedLastSubjSeqSubjHeader] = []string{trial.Lane()}
			if _, err := l.js.PublishMsg(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}, "void: checkpoint.begun is a decision, and was appended without the condition of its lane"},
		"of another millennium": {func(t *testing.T, l *Log) {
			m := message(fact(t, 1).Event)
			m.Header[events.HeaderTime] = []string{"9999-12-31T23:59:59-23:59"}
			if _, err := l.js.PublishMsg(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}, "void: header ce-time is"},
		"a deep body": {func(t *testing.T, l *Log) {
			m := message(fact(t, 1).Event)
			m.Data = []byte(`{"metrics":{"x":` + strings.Repeat("[", 200) + strings.Repeat("]", 200) + `}}`)
			if _, err := l.js.PublishMsg(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}, "lie in one another"},
		"of the caller": {func(*testing.T, *Log) {}, "event 2: I do not like it"},
	} {
		t.Run(name, func(t *testing.T) {
			l, _ := newLog(t)
			if _, err := l.Decide(t.Context(), begun(t, "step-1"), 0); err != nil {
				t.Fatal(err)
			}
			c.write(t, l)
			if _, err := l.Append(t.Context(), fact(t, 7)); err != nil {
				t.Fatal(err)
			}
			got, found := checkAll(t, l, CheckOptions{Each: func(e events.Recorded) []string {
				if e.Sequence == 2 && name == "of the caller" {
					return []string{"I do not like it"}
				}
				body, err := e.Body()
				if void, ok := body.(*events.Void); ok {
					return []string{"void: " + void.Why}
				}
				if err != nil {
					t.Error(err)
				}
				return nil
			}})
			if !strings.Contains(found, c.says) || c.says == "" && (found != "" || got.Repeated != 1) || got.Last < 3 {
				t.Errorf("found %q, %d repeated, want %q", found, got.Repeated, c.says)
			}
		})
	}
}

// A cancelled check returns the cause, not findings.
func TestCheckCalledOff(t *testing.T) {
	l, _ := newLog(t)
	off := errors.New("off")
	if c, err := l.Check(t.Context(), CheckOptions{Pace: func(context.Context, int64) error { return off }}); !errors.Is(err, off) || len(c.Findings) > 0 {
		t.Errorf("%+v, %v", c, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if c, err := l.Check(ctx, CheckOptions{}); !errors.Is(err, context.Canceled) || len(c.Findings) > 0 {
		t.Errorf("%+v, %v", c, err)
	}
}

// The server's count is compared with the events read.
func TestCheckCounts(t *testing.T) {
	for stored, want := range map[uint64]int{2: 1, 3: 0, 4: 1} {
		c := &checker{out: Checked{Events: 3}}
		if c.count(stored); len(c.out.Findings) != want {
			t.Errorf("3 of %d events were read: %v", stored, c.out.Findings)
		}
	}
}
