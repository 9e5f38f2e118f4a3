package jetlog

import (
	"bytes"
	"errors"
	"io"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/archive"
	"github.com/nats-io/nats.go/jetstream"
)

// Raw yields the stored bytes unchanged, including headers that another client library
// has written in another order, and without a space.
func TestRawIsWhatIsStored(t *testing.T) {
	l, s := newLog(t)
	if _, err := l.Append(t.Context(), factsOf(t, 3000)...); err != nil {
		t.Fatal(err)
	}
	conn, err := s.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	go func() { _, _ = io.Copy(io.Discard, conn) }()
	heads := "NATS/1.0\r\nzz: last\r\nNats-Msg-Id:odd\r\naa:  first \r\n\r\n"
	body := "{}"
	text := "CONNECT {\"headers\":true,\"verbose\":false}\r\nHPUB ckpt.a.main.r0.odd.one " + strconv.Itoa(len(heads)) + " " + strconv.Itoa(len(heads)+len(body)) + "\r\n" + heads + body + "\r\nPUB ckpt.a.main.r0.odd.bare 0\r\n\r\nPING\r\n"
	if _, err := conn.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	last := uint64(0)
	for last < 3003 {
		if last, err = l.Last(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	next := uint64(1)
	for m, err := range l.Raw(t.Context(), 1, last) {
		if err != nil {
			t.Fatal(err)
		}
		want, err := l.getStored(t.Context(), Stream, msgGet{Seq: next})
		if err != nil {
			t.Fatal(err)
		}
		if m.Sequence != next || m.Subject != want.Subject || !bytes.Equal(m.Header, want.Headers) || !bytes.Equal(m.Data, want.Data) || !m.Time.Equal(want.Time) {
			t.Fatalf("message %d is %+v, want %+v", next, m, want)
		}
		next++
	}
	if next != last+1 {
		t.Fatalf("it ends before message %d of %d", next, last)
	}
	for m, err := range l.Raw(t.Context(), last-1, last-1) {
		if err != nil || string(m.Header) != heads {
			t.Fatalf("headers %q, %v, want %q", m.Header, err, heads)
		}
	}
}

// A reader that is slower than the server loses no connection, however large the
// messages are.
func TestRawOfLargeMessages(t *testing.T) {
	t.Parallel()
	l, _ := newLog(t)
	big := strings.Repeat("x", 900<<10)
	var last uint64
	for i := range 120 {
		f, err := events.NewFact(stamp(), events.Scope{Run: "run.1", Trial: "t", Actor: events.Rank(0)},
			events.Metrics{Attempt: 1, Iteration: i + 1, Metrics: map[string]any{"x": big}})
		if err != nil {
			t.Fatal(err)
		}
		seqs, err := l.Append(t.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		last = seqs[0]
	}
	pause := time.NewTimer(time.Second) // in which the server sends everything requested
	next := uint64(1)
	for m, err := range l.Raw(t.Context(), 1, last) {
		if err != nil {
			t.Fatal(err)
		}
		if next++; m.Sequence == 1 {
			<-pause.C
		}
	}
	if next != last+1 {
		t.Errorf("it ends before message %d of %d", next, last)
	}
}

// cutLog seals all of a log and starts the server that continues it, in another
// directory.
func cutLog(t *testing.T, l *Log, store string) (next *Server, sealedIn string, link archive.Link) {
	t.Helper()
	dir := t.TempDir()
	last, err := l.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	like, err := l.TailConfig(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	had, err := l.Sealed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if link, err = archive.Seal(dir, store, had, archive.DefaultLimits, l.Raw(t.Context(), had.Last+1, last)); err != nil {
		t.Fatal(err)
	}
	if err := archive.Extend(dir, store, had, link); err != nil {
		t.Fatal(err)
	}
	next = startServer(t, filepath.Join(t.TempDir(), "next"))
	made := connectTo(t, Options{Dial: dial(next)})
	if err := made.CreateTail(t.Context(), store, link, like); err != nil {
		t.Fatal(err)
	}
	return next, dir, link
}

// An append for one tail is refused by the next: a decision in a lane that has no
// message in either has the same expectation in both.
func TestAppendForAnotherTail(t *testing.T) {
	l, _ := newLog(t)
	if _, err := l.Append(t.Context(), factsOf(t, 10)...); err != nil {
		t.Fatal(err)
	}
	next, dir, link := cutLog(t, l, l.store)
	n := connectTo(t, Options{Dial: dial(next), Archive: dir})
	if _, _, err := n.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	d := begun(t, "step-1")
	_, err := n.publishTo(t.Context(), Stream, message(d.Event), jetstream.WithExpectLastSequenceForSubject(0, events.Aggregate{Run: d.Scope.Run, Trial: d.Scope.Trial}.Lane()))
	if !errors.Is(err, errAgain) {
		t.Fatalf("a decision for %s in %s: %v", Stream, tailName(link.Last), err)
	}
	if last, err := n.Last(t.Context()); err != nil || last != link.Last {
		t.Fatalf("the log ends at %d, %v, want %d", last, err, link.Last)
	}
	if seq, err := n.Decide(t.Context(), d, 0); err != nil || seq != link.Last+1 {
		t.Fatalf("the decision has sequence %d, %v, want %d", seq, err, link.Last+1)
	}
}

// A server that goes away while it is asked for the log's next name has not answered
// that there is none.
func TestOpenWhileTheServerGoes(t *testing.T) {
	l, _ := newLog(t)
	next, dir, _ := cutLog(t, l, l.store)
	way := &lossy{s: next}
	n := connectTo(t, Options{Dial: way.dial, Archive: dir})
	way.loseNext("$JS.API.STREAM.NAMES")
	if _, _, err := n.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	if way.lost() != 1 {
		t.Fatal("no answer was lost")
	}
}

// A server that went away after it answered that it has no stream of a name has not
// answered that no other stream continues the log.
func TestServerGoesAfterItsAnswer(t *testing.T) {
	l, s := newLog(t)
	s.Shutdown()
	for tick := time.Tick(time.Millisecond); l.nc.IsConnected(); <-tick {
		if t.Context().Err() != nil {
			t.Fatal("the connection outlives its server")
		}
	}
	if _, err := l.successor(t.Context(), Stream, jetstream.ErrStreamNotFound); !transient(err) || errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("%v: want an error that asks for a retry", err)
	}
}

// Events that were sealed since the caller asked where they are, are not lost.
func TestRawOfWhatIsSealed(t *testing.T) {
	l, _ := newLog(t)
	if _, err := l.Append(t.Context(), factsOf(t, 10)...); err != nil {
		t.Fatal(err)
	}
	next, dir, link := cutLog(t, l, l.store)
	n := connectTo(t, Options{Dial: dial(next), Archive: dir})
	if _, _, err := n.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Append(t.Context(), factsOf(t, 10)...); err != nil {
		t.Fatal(err)
	}
	got := errStop
	for _, err := range n.Raw(t.Context(), link.Last-2, link.Last+5) {
		got = err
	}
	if !errors.Is(got, errAgain) || errors.Is(got, ErrGap) {
		t.Errorf("%v: want an error that asks to look again", got)
	}
}

// A stream whose metadata is impossible, or does not state where it begins, is refused.
func TestTailsThatLie(t *testing.T) {
	l, _ := newLog(t)
	if _, err := l.Append(t.Context(), factsOf(t, 10)...); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		change func(*jetstream.StreamConfig)
		is     error
	}{
		{"no metadata", func(c *jetstream.StreamConfig) { c.Metadata = nil }, ErrUnsafe},
		{"another end", func(c *jetstream.StreamConfig) { c.Metadata[metaSealed] = "7" }, ErrUnsafe},
		{"a digest that is none", func(c *jetstream.StreamConfig) { c.Metadata[metaDigest] = "ab" }, ErrUnsafe},
		{"another digest", func(c *jetstream.StreamConfig) { c.Metadata[metaDigest] = strings.Repeat("0", 64) }, ErrGap},
		{"another store", func(c *jetstream.StreamConfig) { c.Metadata[metaStore] = "other" }, ErrGap},
	} {
		t.Run(c.name, func(t *testing.T) {
			next, dir, link := cutLog(t, l, l.store)
			owner := next.OwnerOptions()
			owner.Archive = dir
			n := connectTo(t, owner)
			stream, err := n.js.Stream(t.Context(), tailName(link.Last))
			if err != nil {
				t.Fatal(err)
			}
			config := stream.CachedInfo().Config
			c.change(&config)
			if _, err := n.js.UpdateStream(t.Context(), config); err != nil {
				t.Fatal(err)
			}
			if _, _, err := n.Open(t.Context()); !errors.Is(err, c.is) {
				t.Errorf("open: %v, want %v", err, c.is)
			}
		})
	}
	t.Run("without the archive", func(t *testing.T) {
		next, _, _ := cutLog(t, l, l.store)
		n := connectTo(t, Options{Dial: dial(next)})
		if _, _, err := n.Open(t.Context()); !errors.Is(err, ErrArchive) {
			t.Errorf("open: %v", err)
		}
	})
}
