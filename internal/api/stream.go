package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

const (
	// ringSize is how many events the hub keeps for its clients.
	ringSize = 8192
	// ringBytes bounds the text of these events.
	ringBytes = 64 << 20
	// writeLimit bounds a write to a client. A client that takes nothing for this long is cut.
	writeLimit = 30 * time.Second
	// commentEvery is the time between two comments, by which proxies and clients see that the
	// connection lives.
	commentEvery = 15 * time.Second
	// hubPause is the pause after the log could not be read.
	hubPause = time.Second
)

// frame is an event as it is written to clients.
type frame struct {
	event events.Recorded // without its body
	text  []byte
}

// frameOf returns an event as a server-sent event.
func frameOf(r events.Recorded) (frame, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return frame{}, fmt.Errorf("encode event %d: %w", r.Sequence, err)
	}
	f := frame{r, fmt.Appendf(nil, "id: %d\ndata: %s\n\n", r.Sequence, body)}
	f.event.Data = nil
	return f, nil
}

// hub reads the log once for all clients of the stream, while there are any. The newest events
// are in its ring. A client that needs older ones reads them from the log itself, until it
// reaches the ring. A client that has reached the ring and falls out of it again is too slow.
type hub struct {
	h    *Handler
	life context.Context
	end  context.CancelFunc
	work sync.WaitGroup

	mu      sync.Mutex
	ring    []frame
	first   uint64 // sequence of the oldest event in the ring
	next    uint64 // sequence of the next event; first if the ring is empty
	bytes   int    // of the texts in the ring
	clients int
	stop    context.CancelFunc // of the reader; nil while none runs
	news    chan struct{}      // closed at the next event
}

func newHub(h *Handler) *hub {
	size := h.o.ring
	if size == 0 {
		size = ringSize
	}
	b := &hub{h: h, news: make(chan struct{}), ring: make([]frame, size)}
	b.life, b.end = context.WithCancel(context.Background())
	return b
}

func (b *hub) size() uint64 { return uint64(len(b.ring)) }

// close ends the reader and the streams. No reader starts later: join looks at life under the
// same lock.
func (b *hub) close() {
	b.mu.Lock()
	b.end()
	b.mu.Unlock()
	b.work.Wait()
}

// join counts a client in. The first one starts the reader at the end of the log.
func (b *hub) join(last uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.clients++; b.stop != nil || b.life.Err() != nil {
		return
	}
	// What was read for earlier clients is kept if nothing is missing after it.
	if last+1 > b.next+b.size()/2 || b.next == 0 || b.next > last+1 {
		b.first, b.next, b.bytes = last+1, last+1, 0
		clear(b.ring)
	}
	ctx, stop := context.WithCancel(b.life)
	b.stop = stop
	from := b.next
	b.work.Go(func() { b.read(ctx, from) })
}

// leave counts a client out. The last one stops the reader.
func (b *hub) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.clients--; b.clients == 0 && b.stop != nil {
		b.stop()
		b.stop = nil
	}
}

// read follows the log. The log survives changes of its owner; whatever else happens, the
// reader continues at the same event.
func (b *hub) read(ctx context.Context, from uint64) {
	for {
		for r, err := range b.h.store.Log.Read(ctx, from, 0) {
			if err == nil {
				err = b.add(ctx, r)
			}
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				b.h.o.Logger.Warn("event stream interrupted; retrying", "from", from, "error", err)
				break
			}
			from = r.Sequence + 1
		}
		timer := time.NewTimer(hubPause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// add puts an event into the ring and wakes the clients.
func (b *hub) add(ctx context.Context, r events.Recorded) error {
	f, err := frameOf(r)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if ctx.Err() != nil || r.Sequence != b.next {
		return ctx.Err() // a reader that was stopped
	}
	at := &b.ring[r.Sequence%b.size()]
	b.bytes += len(f.text) - len(at.text)
	*at = f
	b.next++
	b.first = max(b.first, b.next-min(b.next, b.size()))
	for ; b.bytes > ringBytes && b.first+1 < b.next; b.first++ {
		oldest := &b.ring[b.first%b.size()]
		b.bytes -= len(oldest.text)
		*oldest = frame{}
	}
	close(b.news)
	b.news = make(chan struct{})
	return nil
}

// take returns events from a sequence on that are in the ring, at most a few at a time. lost is
// set if the ring begins later. Without events, news is closed when there are some.
func (b *hub) take(from uint64) (got []frame, lost bool, news <-chan struct{}) {
	const few = 64
	b.mu.Lock()
	defer b.mu.Unlock()
	if from < b.first {
		return nil, true, b.news
	}
	for seq := from; seq < b.next && len(got) < few; seq++ {
		got = append(got, b.ring[seq%b.size()])
	}
	return got, false, b.news
}

// begins returns the sequence of the oldest event in the ring.
func (b *hub) begins() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.first
}

// client is one stream.
type client struct {
	h      *Handler
	w      http.ResponseWriter
	out    *http.ResponseController
	wanted wanted
	next   uint64           // sequence of the next event
	last   uint64           // the end of the log when the client came
	caught bool             // it got the message caught-up
	whole  bool             // the last message was written to its end
	ctx    context.Context  // of the stream
	tick   <-chan time.Time // when a comment is due
}

// stream answers GET /stream.
func (h *Handler) stream(w http.ResponseWriter, r *http.Request) {
	select {
	case h.streams <- struct{}{}:
		defer func() { <-h.streams }()
	default:
		httpkit.Refuse(w, problem.Errorf(problem.Unavailable, "this server has %d streams open, its limit: close some, or ask again later", cap(h.streams)))
		return
	}
	c := &client{h: h, w: w, out: http.NewResponseController(w), whole: true}
	if err := c.begin(r); err != nil {
		httpkit.Refuse(w, err)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // for proxies
	w.Header().Set("Connection", "close")     // the end of a stream is the end of the connection
	// The deadline of the request ends here: a client of a stream sends nothing more, for hours.
	if err := c.out.SetReadDeadline(time.Time{}); err != nil {
		httpkit.Refuse(w, err)
		return
	}
	w.WriteHeader(http.StatusOK)
	if err := c.out.Flush(); err != nil {
		return
	}
	h.hub.join(c.last)
	defer h.hub.leave()
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer context.AfterFunc(h.hub.life, func() { cancel(nil) })()
	c.ctx = ctx
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		c.watch(ctx, cancel, r)
	}()
	err := c.run(ctx)
	if barred := context.Cause(ctx); c.whole && errors.Is(barred, errBarred) {
		err = errors.Join(barred, c.farewell(barred))
	}
	cancel(nil)
	<-watching
	if !errors.Is(err, context.Canceled) { // which is the end of the client or of the server
		h.o.Logger.Info("event stream ended", "user", userOf(ctx).Name, "next", c.next, "error", err)
	}
}

// begin reads the parameters.
func (c *client) begin(r *http.Request) (err error) {
	if err := c.h.needsLog(); err != nil {
		return err
	}
	q := r.URL.Query()
	if c.wanted, err = wantedOf(q.Get("run"), q["type"]); err != nil {
		return err
	}
	if c.last, err = c.h.last(r.Context()); err != nil {
		return err
	}
	after, name := r.Header.Get("Last-Event-ID"), "Last-Event-ID" // the header is newer than the URL
	if after == "" {
		after, name = q.Get("after"), "after"
	}
	c.next = c.last + 1
	if after != "" {
		seq, err := strconv.ParseUint(after, 10, 64)
		if err != nil {
			return problem.Errorf(problem.Invalid, "%s %q: want a sequence", name, after)
		}
		if seq > c.last {
			return problem.Errorf(problem.NotFound, "%s %d: the log ends at %d: it is another one, or was rolled back; begin without it", name, seq, c.last)
		}
		c.next = seq + 1
	}
	return nil
}

// recheckEvery bounds how long a stream stays open after its token was revoked or has expired.
const recheckEvery = 250 * time.Millisecond

// farewellLimit bounds the last write to a client that is no longer admitted.
const farewellLimit = 250 * time.Millisecond

// errBarred is the cause of the end of a stream whose token no longer has the right to it.
var errBarred = errors.New("the stream ends")

// watch ends the stream when its token is revoked, expires, or has another role. A write that
// waits for the client ends as well.
func (c *client) watch(ctx context.Context, cancel context.CancelCauseFunc, r *http.Request) {
	tick := time.NewTicker(recheckEvery)
	defer tick.Stop()
	user := userOf(ctx)
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		now, err := c.h.o.Users.Of(user.digest)
		if err == nil && (now.Name != user.Name || now.Role != user.Role) {
			err = problem.Errorf(problem.Unauthorized, "the token of %s has the role %s now: connect again", now.Name, now.Role)
		}
		if err != nil {
			cancel(fmt.Errorf("%w: %w", errBarred, err))
			_ = c.out.SetWriteDeadline(time.Now().Add(farewellLimit)) // the stream ends in any case
			return
		}
	}
}

// farewell writes the last message to a client that is no longer admitted.
func (c *client) farewell(why error) error {
	body, err := json.Marshal(httpkit.DetailsOf(fmt.Errorf("%w: %s", why, another)))
	if err != nil {
		return err
	}
	if err := c.out.SetWriteDeadline(time.Now().Add(farewellLimit)); err != nil {
		return err
	}
	return c.send(fmt.Appendf(nil, "event: unauthorized\ndata: %s\n\n", body))
}

// errLagged reports a client that is too slow.
var errLagged = errors.New("the client is too slow")

// run writes events until the client or the server leaves.
func (c *client) run(ctx context.Context) error {
	every := c.h.o.comments
	if every == 0 {
		every = commentEvery
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	c.tick = tick.C
	live := false // the client has reached the ring
	for {
		if err := c.catchUp(); err != nil {
			return err
		}
		got, lost, news := c.h.hub.take(c.next)
		switch {
		case lost && live:
			return errors.Join(errLagged, c.write(fmt.Appendf(nil, "event: lagged\ndata: {\"next\":%d}\n\n", c.next)))
		case lost:
			if err := c.old(ctx, c.h.hub.begins()-1); err != nil {
				return err
			}
			continue
		case len(got) > 0:
			live = true
			for _, f := range got {
				if err := c.event(f); err != nil {
					return err
				}
			}
			continue
		}
		live = true
		select {
		case <-news:
		case <-c.tick:
			if err := c.comment(); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// catchUp writes the message caught-up once, after the events that were in the log when the
// client came. A client cannot tell a quiet log from a slow server without it.
func (c *client) catchUp() error {
	if c.caught || c.next <= c.last {
		return nil
	}
	c.caught = true
	return c.write(fmt.Appendf(nil, "event: caught-up\ndata: {\"sequence\":%d}\n\n", c.last))
}

// old writes events that are no longer in the ring, from the log.
func (c *client) old(ctx context.Context, until uint64) error {
	for r, err := range c.h.store.Log.Read(ctx, c.next, until) {
		if err != nil {
			return err
		}
		f, err := frameOf(r)
		if err != nil {
			return err
		}
		if err := c.event(f); err != nil {
			return err
		}
		if err := c.catchUp(); err != nil {
			return err
		}
		select {
		case <-c.tick: // the client may want none of many events
			if err := c.comment(); err != nil {
				return err
			}
		default:
		}
	}
	return nil
}

// comment writes a comment.
func (c *client) comment() error { return c.write([]byte(": \n\n")) }

// event writes an event, if the client wants it.
func (c *client) event(f frame) error {
	c.next = f.event.Sequence + 1
	if !c.wanted.has(f.event) {
		return nil
	}
	return c.write(f.text)
}

// write writes to the client. It returns an error if the client does not take the bytes in
// time: nothing is buffered for it but what the system buffers.
func (c *client) write(text []byte) error {
	limit := c.h.o.writeLimit
	if limit == 0 {
		limit = writeLimit
	}
	if err := c.out.SetWriteDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	// The deadline of watch, which comes after the end of ctx, is not to be replaced.
	if err := c.ctx.Err(); err != nil {
		return err
	}
	return c.send(text)
}

// send writes and flushes.
func (c *client) send(text []byte) error {
	c.whole = false
	if _, err := c.w.Write(text); err != nil {
		return err
	}
	err := c.out.Flush()
	c.whole = err == nil
	return err
}
