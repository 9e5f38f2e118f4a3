package jetlog

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func TestOpenMissing(t *testing.T) {
	s := startServer(t, t.TempDir())
	l := connectTo(t, Options{Dial: dial(s)})
	if _, _, err := l.Open(t.Context()); !errors.Is(err, ErrNoLog) {
		t.Fatalf("open: %v", err)
	}
	if _, err := l.js.Stream(t.Context(), Stream); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Fatalf("opening made a stream: %v", err)
	}
}

// A first boot that was cut between stream and first event is finished.
func TestOpenEmpty(t *testing.T) {
	s := startServer(t, t.TempDir())
	l := connectTo(t, Options{Dial: dial(s)})
	if _, err := l.js.CreateStream(t.Context(), streamConfig(1)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := l.Open(t.Context()); !errors.Is(err, ErrNoLog) {
		t.Fatalf("open: %v", err)
	}
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	store, info, err := l.Open(t.Context())
	if err != nil || store.Store != "store-1" || info.First != 1 || info.Last != 1 || info.Created.IsZero() {
		t.Fatalf("open: %+v, %+v, %v", store, info, err)
	}
}

func TestCreateTwice(t *testing.T) {
	l, s := newLog(t)
	again := connectTo(t, Options{Dial: dial(s)})
	if err := again.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatalf("the same store: %v", err)
	}
	err := again.Create(t.Context(), created(t, "store-2"))
	if !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), "store-1") {
		t.Fatalf("another store: %v", err)
	}
	if last, _ := l.Last(t.Context()); last != 1 {
		t.Fatalf("the log has %d events, want 1", last)
	}
	if err := again.Create(t.Context(), begun(t, "x")); err == nil {
		t.Fatal("created with another first event")
	}
}

func TestOpenForeign(t *testing.T) {
	s := startServer(t, t.TempDir())
	l := connectTo(t, Options{Dial: dial(s)})
	if _, err := l.js.CreateStream(t.Context(), streamConfig(1)); err != nil {
		t.Fatal(err)
	}
	if _, err := l.publish(t.Context(), message(fact(t, 1).Event)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := l.Open(t.Context()); !errors.Is(err, ErrForeign) {
		t.Fatalf("open: %v", err)
	}
	if err := l.Create(t.Context(), created(t, "store-1")); !errors.Is(err, ErrForeign) {
		t.Fatalf("create: %v", err)
	}
}

func TestOpenUnsafe(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*jetstream.StreamConfig)
		want   string
	}{
		"expiry":    {func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour }, "expire"},
		"discard":   {func(c *jetstream.StreamConfig) { c.Discard = jetstream.DiscardOld }, "discards"},
		"deletion":  {func(c *jetstream.StreamConfig) { c.DenyDelete = false }, "deletion"},
		"purging":   {func(c *jetstream.StreamConfig) { c.DenyPurge = false }, "purging"},
		"rollup":    {func(c *jetstream.StreamConfig) { c.AllowRollup, c.DenyPurge = true, false }, "rollups"},
		"ttl":       {func(c *jetstream.StreamConfig) { c.AllowMsgTTL = true }, "expire"},
		"memory":    {func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage }, "memory"},
		"subject":   {func(c *jetstream.StreamConfig) { c.MaxMsgsPerSubject = 1 }, "limits messages"},
		"subjects":  {func(c *jetstream.StreamConfig) { c.Subjects = append(c.Subjects, "x.>") }, "subjects"},
		"batches":   {func(c *jetstream.StreamConfig) { c.AllowAtomicPublish = false }, "atomic"},
		"size":      {func(c *jetstream.StreamConfig) { c.MaxMsgSize = 1000 }, "refuses messages"},
		"duplicate": {func(c *jetstream.StreamConfig) { c.Duplicates = time.Second }, "duplicates"},
		"async": {func(c *jetstream.StreamConfig) {
			c.PersistMode, c.AllowAtomicPublish = jetstream.AsyncPersistMode, false
		}, "before it persists"},
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t, t.TempDir())
			l := connectTo(t, Options{Dial: dial(s)})
			config := streamConfig(1)
			tc.change(&config)
			if _, err := l.js.CreateStream(t.Context(), config); err != nil {
				t.Fatal(err)
			}
			_, _, err := l.Open(t.Context())
			if !errors.Is(err, ErrUnsafe) || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("open: %v", err)
			}
			if err := l.Create(t.Context(), created(t, "store-1")); !errors.Is(err, ErrUnsafe) {
				t.Fatalf("create: %v", err)
			}
		})
	}
}

// The loss is noticed everywhere if an administrator lifts the guards and deletes.
func TestDeletionIsNoticed(t *testing.T) {
	l, s := newLog(t)
	if _, err := l.Append(t.Context(), factsOf(t, 5)...); err != nil {
		t.Fatal(err)
	}
	if err := l.js.DeleteStream(t.Context(), Stream); err != nil {
		t.Fatal(err)
	}
	config := streamConfig(1)
	config.DenyDelete = false
	var stream jetstream.Stream
	await(t, "the stream is recreated", func() (made bool) {
		var err error
		stream, err = l.js.CreateStream(t.Context(), config)
		// The server may still be removing the files of the old stream.
		if err != nil && !strings.Contains(err.Error(), "error creating store for stream") {
			t.Fatal(err)
		}
		return err == nil
	})
	if _, err := l.Last(t.Context()); !errors.Is(err, ErrForeign) {
		t.Errorf("state of a recreated log: %v", err)
	}
	if _, err := readError(t, l, 1, 1); !errors.Is(err, ErrForeign) {
		t.Errorf("reading a recreated log: %v", err)
	}

	fresh := connectTo(t, Options{Dial: dial(s)})
	for _, f := range factsOf(t, 5) {
		if _, err := fresh.publish(t.Context(), message(f.Event)); err != nil {
			t.Fatal(err)
		}
	}
	if err := stream.DeleteMsg(t.Context(), 3); err != nil {
		t.Fatal(err)
	}
	if _, err := readError(t, fresh, 1, 5); !errors.Is(err, ErrGap) {
		t.Errorf("reading a log with a deleted event: %v", err)
	}
	if _, err := fresh.Last(t.Context()); !errors.Is(err, ErrGap) {
		t.Errorf("state of a log with a deleted event: %v", err)
	}
}

// After a reconnect to the server of another store, nothing is written there.
func TestReconnectToAnotherStore(t *testing.T) {
	_, a := newLog(t)
	other, b := newLog(t)
	var now atomic.Pointer[Server]
	now.Store(a)
	lost := make(chan error, 10)
	l := connectTo(t, Options{
		Dial:         func(context.Context) (net.Conn, error) { return now.Load().Dial() },
		OnDisconnect: func(err error) { lost <- err },
	})
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	now.Store(b)
	a.Shutdown()
	if err, ok := <-lost; !ok {
		t.Fatal(err)
	}
	if _, err := l.Append(t.Context(), fact(t, 1)); !errors.Is(err, ErrForeign) {
		t.Errorf("append: %v", err)
	}
	if _, err := l.Decide(t.Context(), begun(t, "x"), 0); !errors.Is(err, ErrForeign) {
		t.Errorf("decide: %v", err)
	}
	if _, err := readError(t, l, 1, 1); !errors.Is(err, ErrForeign) {
		t.Errorf("read: %v", err)
	}
	if last, _ := other.Last(t.Context()); last != 1 {
		t.Errorf("the other store has %d events, want 1", last)
	}
}

// The same, before the library has announced the new connection.
func TestReconnectUnheard(t *testing.T) {
	_, a := newLog(t)
	other, b := newLog(t)
	var now atomic.Pointer[Server]
	now.Store(a)
	lost, heard := make(chan struct{}, 1), make(chan struct{})
	l := connectTo(t, Options{
		Dial: func(context.Context) (net.Conn, error) { return now.Load().Dial() },
		// The library's announcements after this wait for it.
		OnDisconnect: func(error) {
			lost <- struct{}{}
			<-heard
		},
	})
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	now.Store(b)
	a.Shutdown()
	<-lost
	if _, err := l.Append(t.Context(), fact(t, 1)); !errors.Is(err, ErrForeign) {
		t.Errorf("append: %v", err)
	}
	close(heard)
	if last, _ := other.Last(t.Context()); last != 1 {
		t.Errorf("the other store has %d events, want 1", last)
	}
}

// The wire, as other programs see it: canonical spelling, one value each.
func TestStoredHeaders(t *testing.T) {
	l, _ := newLog(t)
	d := begun(t, "step-1")
	facts := factsOf(t, 2)
	if _, err := l.Append(t.Context(), facts...); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Decide(t.Context(), d, 0); err != nil {
		t.Fatal(err)
	}
	common := []string{"Nats-Expected-Stream", "Nats-Msg-Id", "ce-datacontenttype", "ce-id", "ce-source", "ce-specversion", "ce-time", "ce-type"}
	for seq, tc := range map[uint64]struct {
		event events.Event
		extra []string
	}{
		2: {facts[0].Event, []string{"Nats-Batch-Id", "Nats-Batch-Sequence"}},
		3: {facts[1].Event, []string{"Nats-Batch-Commit", "Nats-Batch-Id", "Nats-Batch-Sequence"}},
		4: {d.Event, []string{"Nats-Expected-Last-Subject-Sequence", "Nats-Expected-Last-Subject-Sequence-Subject", "Nats-Expected-Stream"}},
	} {
		m, err := l.getStored(t.Context(), Stream, msgGet{Seq: seq})
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(string(m.Headers), "NATS/1.0\r\n") {
			t.Fatalf("message %d: headers %q", seq, m.Headers)
		}
		var names []string
		for line := range strings.SplitSeq(strings.TrimSpace(string(m.Headers)), "\r\n") {
			if name, value, ok := strings.Cut(line, ": "); ok {
				names = append(names, name)
				if want, ok := events.Encode(tc.event).Header[name]; ok && want[0] != value {
					t.Errorf("message %d: header %s is %q, want %q", seq, name, value, want[0])
				}
			}
		}
		want := append(slices.Clone(common[1:]), tc.extra...)
		slices.Sort(names)
		slices.Sort(want)
		if !slices.Equal(names, want) {
			t.Errorf("message %d: headers\n%q, want\n%q", seq, names, want)
		}
		if m.Subject != events.Subject(tc.event.Scope, tc.event.Kind) || string(m.Data) != string(tc.event.Data) {
			t.Errorf("message %d: %s %s", seq, m.Subject, m.Data)
		}
	}
}

// Whatever a subject of the log holds, a reader skips a message that is not an event.
func TestReadStranger(t *testing.T) {
	for name, m := range map[string]*nats.Msg{
		"subject": {Subject: "ckpt.greetings", Data: []byte("hello")},
		"headers": {Subject: "ckpt.run.t.r0.report.metrics", Data: []byte("{}")},
	} {
		t.Run(name, func(t *testing.T) {
			l, _ := newLog(t)
			if _, err := l.js.PublishMsg(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			if _, err := l.Append(t.Context(), fact(t, 7)); err != nil {
				t.Fatal(err)
			}
			got := readAll(t, l, 1, 3)
			body, err := got[1].Body()
			if void, ok := body.(*events.Void); err != nil || !ok || void.Subject != m.Subject {
				t.Fatalf("event 2 is %+v, %v", body, err)
			}
			if again, err := l.At(t.Context(), 2); err != nil || again.ID != got[1].ID || string(again.Data) != string(got[1].Data) {
				t.Errorf("event 2 is %+v, %v; it was %+v", again, err, got[1])
			}
		})
	}
}
