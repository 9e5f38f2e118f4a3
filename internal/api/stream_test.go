package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// message is a server-sent event, or a comment with a name of ":".
type message struct {
	name, id, data string
}

// follow reads a stream until its end, a limit of a minute, or until visit returns false.
func (h *harness) follow(ctx context.Context, query string, visit func(message) bool, headers ...string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, h.url+Prefix+"/stream"+query, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+readToken1)
	for _, header := range headers {
		name, value, _ := strings.Cut(header, ": ")
		req.Header.Set(name, value)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		return fmt.Errorf("%s, %s", resp.Status, resp.Header.Get("Content-Type"))
	}
	var m message
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		field, value, _ := strings.Cut(lines.Text(), ": ")
		switch {
		case lines.Text() == "":
			if !visit(m) {
				return nil
			}
			m = message{}
		case field == "event":
			m.name = value
		case field == "id":
			m.id = value
		case field == "data":
			m.data = value
		case strings.HasPrefix(lines.Text(), ":"):
			m.name = ":"
		default:
			return fmt.Errorf("line %q", lines.Text())
		}
	}
	return lines.Err()
}

// TestStream: a client gets each event once, in order, from where it asks; caught-up follows
// the last old one; filters hold.
func TestStream(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	h.train("bert", 1)
	last, err := h.st.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		query   string
		headers []string
		first   uint64
	}{
		{"?after=0", nil, 1}, {"?after=5", nil, 6}, {"", []string{"Last-Event-ID: 7"}, 8}, {"?after=3", []string{"Last-Event-ID: 9"}, 10}, {"", nil, 0}, {"?after=1", []string{"Last-Event-ID: 2"}, 3},
	} {
		next, caught := c.first, false
		if next == 0 { // the end of the log
			next = last + 1
		}
		err := h.follow(t.Context(), c.query, func(m message) bool {
			switch {
			case m.name == "caught-up":
				if caught || next != last+1 {
					t.Errorf("%q: caught-up before event %d of %d", c.query, next, last)
				}
				caught = true
				h.record("other", "main", &events.JobStarted{Job: "j"})
			case m.id != strconv.FormatUint(next, 10) || !strings.Contains(m.data, `"specversion":"1.0"`):
				t.Errorf("%q: event %s, want %d: %s", c.query, m.id, next, m.data)
			default:
				next++
			}
			return !caught || next <= last+1
		}, c.headers...)
		if err != nil || !caught {
			t.Errorf("%q: %v", c.query, err)
		}
		if last, err = h.st.Log.Last(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	var types []string
	err = h.follow(t.Context(), "?after=0&run=bert&type=checkpoint.*&type=trial.created", func(m message) bool {
		if m.name != "" {
			return m.name != "caught-up"
		}
		_, after, _ := strings.Cut(m.data, `"type":"ckpt.`)
		name, _, _ := strings.Cut(after, `"`)
		types = append(types, name)
		return true
	})
	if want := "[trial.created.v1 checkpoint.begun.v1 checkpoint.committed.v1]"; err != nil || fmt.Sprint(types) != want {
		t.Errorf("selected %v, want %s: %v", types, want, err)
	}
	h.refusedAs("a bad position", h.call("GET", Prefix+"/stream?after=x", readToken1, ""), 400, "after")
	h.refusedAs("the future", h.call("GET", Prefix+"/stream?after=99999", readToken1, ""), 404, "the log ends at")
	h.refusedAs("a bad type", h.call("GET", Prefix+"/stream?type=x", readToken1, ""), 404, "type")
}

// TestStreamComments: a quiet stream has comments.
func TestStreamComments(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{comments: 10 * time.Millisecond})
	comments := 0
	if err := h.follow(t.Context(), "", func(m message) bool {
		if m.name == ":" {
			comments++
		}
		return comments < 3
	}); err != nil {
		t.Error(err)
	}
}

// TestStreamCommentsOfOldEvents: a client that wants none of many old events gets comments
// while the server reads them.
func TestStreamCommentsOfOldEvents(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{comments: time.Microsecond})
	h.train("bert", 20)
	comments := 0
	if err := h.follow(t.Context(), "?after=0&run=none", func(m message) bool {
		if m.name == ":" {
			comments++
		}
		return m.name != "caught-up"
	}); err != nil {
		t.Error(err)
	}
	if comments == 0 {
		t.Error("no comment before caught-up")
	}
}

// TestHubClose: the hub ends under the lock under which clients start its reader, so that none
// starts while close waits for it.
func TestHubClose(t *testing.T) {
	t.Parallel()
	b := newHub(&Handler{store: newHarness(t, Options{}).st})
	end := b.end
	b.end = func() {
		if b.mu.TryLock() {
			b.mu.Unlock()
			t.Error("the hub ends without its lock")
		}
		end()
	}
	b.close()
	if b.join(0); b.stop != nil {
		t.Error("a reader started after the end")
	}
}

// TestStreamOfSlowClients: a client that takes nothing is cut, and seven others get every event.
func TestStreamOfSlowClients(t *testing.T) {
	t.Parallel()
	const more = 3000
	h := newHarness(t, Options{writeLimit: 300 * time.Millisecond})
	last, err := h.st.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	type result struct {
		got []uint64
		err error
	}
	until := last + more
	quick, joined := make(chan result, 7), make(chan struct{}, 8)
	for range cap(quick) {
		go func() {
			var r result
			next := last
			r.err = h.resume(t.Context(), &next, until, joined, func(seq uint64) { r.got = append(r.got, seq) })
			quick <- r
		}()
	}
	// This one reads its head, and then nothing.
	u, err := url.Parse(h.url)
	if err != nil {
		t.Fatal(err)
	}
	stalled, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stalled.Close() }()
	fmt.Fprintf(stalled, "GET %s/stream?after=0 HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n", Prefix, u.Host, readToken1)
	if _, err := bufio.NewReaderSize(stalled, 16).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	for range cap(quick) {
		<-joined
	}
	text := strings.Repeat("x", 2000)
	var facts []events.Fact
	for i := range more {
		f, err := events.NewFact(events.Stamp{ID: fmt.Sprintf("m-%d", i), Source: "test", Time: time.Now()}, events.Scope{Run: "r", Trial: "main", Actor: events.Node(0)},
			&events.Metrics{Attempt: 1, Iteration: i + 1, Step: int64(i), Metrics: map[string]any{"text": text}})
		if err != nil {
			t.Fatal(err)
		}
		if facts = append(facts, f); len(facts) == 50 {
			if _, err := h.st.Log.Append(t.Context(), facts...); err != nil {
				t.Fatal(err)
			}
			facts = facts[:0]
		}
	}
	for range cap(quick) {
		r := <-quick
		if r.err != nil || len(r.got) != more || r.got[0] != last+1 || r.got[more-1] != until {
			t.Errorf("a client got %d events, %v", len(r.got), r.err)
			continue
		}
		for i, seq := range r.got {
			if seq != last+1+uint64(i) {
				t.Errorf("event %d is %d", i, seq)
				break
			}
		}
	}
	// The server has cut the stalled client: what the system had buffered is not all.
	if err := stalled.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	read := 0
	for buffer := make([]byte, 64<<10); ; {
		n, err := stalled.Read(buffer)
		read += n
		if err != nil {
			if timeout := net.Error(nil); asError(err, &timeout) && timeout.Timeout() {
				t.Error("the stalled client was not cut")
			}
			break
		}
	}
	if read >= more*len(text) {
		t.Errorf("the stalled client got %d bytes", read)
	}
}

// TestLagged: a client that reads, but too slowly for the ring, gets lagged as its last message
// and continues by a new stream.
func TestLagged(t *testing.T) {
	t.Parallel()
	const ring, more = 16, 3000
	h := newHarness(t, Options{ring: ring})
	text := strings.Repeat("x", 4000)
	next, until, lagged, appended := uint64(0), uint64(0), false, false
	for !lagged {
		err := h.follow(t.Context(), "?after="+fmt.Sprint(next), func(m message) bool {
			if m.name == "caught-up" && !appended {
				appended = true
				for i := range more / 50 { // while this client does not read
					var facts []events.Fact
					for j := range 50 {
						n := 50*i + j
						f, err := events.NewFact(events.Stamp{ID: fmt.Sprintf("m-%d", n), Source: "test", Time: time.Now()}, events.Scope{Run: "r", Trial: "main", Actor: events.Node(0)},
							&events.Metrics{Attempt: 1, Iteration: n + 1, Step: int64(n), Metrics: map[string]any{"text": text}})
						if err != nil {
							t.Error(err)
						}
						facts = append(facts, f)
					}
					all, err := h.st.Log.Append(t.Context(), facts...)
					if err != nil {
						t.Error(err)
						return false
					}
					until = all[len(all)-1]
				}
			}
			if m.name == "lagged" {
				lagged = true
				if want := fmt.Sprintf(`{"next":%d}`, next+1); m.data != want {
					t.Errorf("lagged with %s, want %s", m.data, want)
				}
			}
			if m.id != "" {
				if m.id != fmt.Sprint(next+1) {
					t.Errorf("event %s after %d", m.id, next)
				}
				next++
			}
			return next < until || until == 0
		})
		if err != nil {
			t.Fatal(err)
		}
		if next == until {
			break
		}
	}
	if !lagged {
		t.Fatalf("the client got all %d events in time", next)
	}
	joined := make(chan struct{}, 1)
	if err := h.resume(t.Context(), &next, until, joined, func(uint64) {}); err != nil || next != until {
		t.Errorf("after lagged: until event %d of %d: %v", next, until, err)
	}
}

// resume follows the log from an event until another one, by as many streams as it takes.
func (h *harness) resume(ctx context.Context, next *uint64, until uint64, joined chan<- struct{}, visit func(uint64)) error {
	first := true
	for *next < until {
		err := h.follow(ctx, "", func(m message) bool {
			if m.name == "caught-up" && first {
				first = false
				joined <- struct{}{}
			}
			if seq, err := strconv.ParseUint(m.id, 10, 64); err == nil {
				*next = seq
				visit(seq)
			}
			return *next < until
		}, "Last-Event-ID: "+strconv.FormatUint(*next, 10))
		if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) { // on a slow machine, any client may be cut
			return err
		}
	}
	return nil
}

// TestRingOfLargeEvents: what is kept for clients that follow is bounded in bytes.
func TestRingOfLargeEvents(t *testing.T) {
	t.Parallel()
	b := newHub(&Handler{})
	defer b.close()
	b.first, b.next = 1, 1
	body := json.RawMessage(`"` + strings.Repeat("x", 1<<20) + `"`)
	const last = 100
	for seq := uint64(1); seq <= last; seq++ {
		if err := b.add(t.Context(), events.Recorded{Sequence: seq, Event: events.Event{Kind: "worker.exited", Data: body}}); err != nil {
			t.Fatal(err)
		}
	}
	held := 0
	for _, f := range b.ring {
		held += len(f.text) + len(f.event.Data)
	}
	if held > ringBytes || held < ringBytes/2 || b.bytes != held {
		t.Errorf("%d bytes are kept, %d counted, at most %d are wanted", held, b.bytes, ringBytes)
	}
	if _, lost, _ := b.take(1); !lost {
		t.Error("the first event is kept")
	}
	if got, lost, _ := b.take(last); lost || len(got) != 1 || got[0].event.Sequence != last || len(got[0].text) < len(body) {
		t.Errorf("the last event: %d, lost %v", len(got), lost)
	}
}

// TestMostStreams: a stream more than the server has is refused, and taken when another one has ended.
func TestMostStreams(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{streams: 2})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	open, ended := make(chan struct{}, 2), make(chan error, 2)
	for range 2 {
		go func() {
			ended <- h.follow(ctx, "", func(m message) bool {
				if m.name == "caught-up" {
					open <- struct{}{}
				}
				return true
			})
		}()
	}
	for range 2 {
		select {
		case <-open:
		case err := <-ended:
			t.Fatal(err)
		}
	}
	if r := h.call(http.MethodGet, Prefix+"/stream", readToken1, ""); r.status != http.StatusServiceUnavailable || !strings.Contains(r.body, "2 streams") {
		t.Errorf("a third stream: %d %s", r.status, r.body)
	}
	if r := h.call(http.MethodGet, Prefix+"/store", readToken1, ""); r.status != http.StatusOK {
		t.Errorf("a request: %d %s", r.status, r.body)
	}
	cancel()
	for range 2 {
		if err := <-ended; err == nil {
			t.Error("a stream has ended by itself")
		}
	}
	deadline := time.Now().Add(time.Minute)
	for {
		err := h.follow(t.Context(), "", func(message) bool { return false })
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after the others have ended: %v", err)
		}
	}
}
