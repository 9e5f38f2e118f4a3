package nodes

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// Errors of [Link.Err]. Test with errors.Is.
var (
	// ErrExpelled reports that the coordinator no longer counts this node as a member:
	// it was lost, replaced or expelled. The caller ends its group and joins again.
	ErrExpelled = problem.New(problem.Gone, "this node is no member of the job")
	// ErrNoContact reports that the endpoint did not answer for [JoinConfig.Wait], also to [Join].
	ErrNoContact = problem.New(problem.Unavailable, "no contact with the coordinator")
	// ErrRestarted reports that another coordinator answers at the endpoint. The caller
	// ends its group and joins again.
	ErrRestarted = problem.New(problem.Gone, "another coordinator answers at the endpoint")
)

// EndedError reports the end of the job: the last words of the coordinator.
type EndedError struct {
	Reason string
	Code   int // exit code for the agent's process
}

func (e *EndedError) Error() string { return "the job has ended: " + e.Reason }

// Link is an agent's side of the control plane. It ends by itself when the job ends,
// when the node is no member, or when no endpoint answers for Wait: see [Link.Done]. Its
// methods can be called from all goroutines.
type Link struct {
	c        JoinConfig
	base     string // of the first endpoint; the connections go to the current one
	index    int
	timeout  time.Duration // T
	welcome  json.RawMessage
	beats    *connections // has no other requests, so that none delays a beat
	rest     *connections
	commands *queue[Command]
	ctx      context.Context
	stop     context.CancelFunc
	done     chan struct{} // closed when the goroutines have ended
	work     sync.WaitGroup

	mu       sync.Mutex
	as       credential
	moves    int    // how often it has moved to another endpoint
	toward   string // HOST:PORT of the endpoint that it could not join yet, with session
	session  string
	at       string // HOST:PORT of the endpoint
	err      error
	ended    bool
	port     int
	answered time.Time // when the last answered beat was sent
	silent   chan struct{}
	contact  chan struct{}
	quiet    bool // silent is closed

	told    []message // not acknowledged
	first   uint64    // number of the first of them
	flushed chan struct{}
	push    chan struct{} // holds a value when told may not be empty
	hurry   chan struct{} // holds a value when a beat must not wait
}

// newLink starts a link. The join request, sent at that time, was its first beat.
func newLink(c JoinConfig, of joined) *Link {
	self, as, certificate, answer, sent := of.self, of.as, of.certificate, of.answer, of.sent
	ctx, stop := context.WithCancel(context.Background())
	timeout := skewed(answer.Timeout)
	patience := max(timeout/4, 500*time.Millisecond)
	l := &Link{
		c: c, base: "https://" + c.Address, at: c.Address, as: as, index: answer.Index, timeout: timeout, welcome: answer.Welcome,
		beats: connect(c.dial, certificate, patience), rest: connect(c.dial, certificate, patience),
		commands: newQueue[Command](), ctx: ctx, stop: stop, done: make(chan struct{}),
		port: self.Port, answered: sent, silent: make(chan struct{}), contact: make(chan struct{}),
		first: 1, flushed: make(chan struct{}), push: make(chan struct{}, 1), hurry: make(chan struct{}, 1),
	}
	l.c.Self = self
	close(l.contact)
	if c.Answered != nil {
		c.Answered(sent, l.timeout)
	}
	for _, run := range []func(){l.beat, l.watch, l.poll, l.send, func() { l.commands.run(ctx) }} {
		l.work.Go(run)
	}
	go func() {
		<-ctx.Done()
		l.beats.close()
		l.rest.close()
		l.work.Wait()
		close(l.done)
	}()
	return l
}

// Move joins another endpoint of the same job, which has taken the place of the one before, and
// keeps the link: its commands continue, and messages that the endpoint before has not acknowledged
// are sent again, after the one of first. No request begins or ends while first is called,
// so it must not block. On an error nothing has changed.
func (l *Link) Move(ctx context.Context, address string, first func() (kind string, body any)) error {
	c := l.c
	c.Address, c.Self.Index = address, l.index
	l.mu.Lock()
	c.Self.Port = l.port
	if l.toward != address {
		l.toward, l.session = address, rand.Text()
	}
	session := l.session // the same as before, if the answer to that was lost: the endpoint has this node then
	l.mu.Unlock()
	c.patience, c.quiet = cmp.Or(c.patience, min(defaultPatience, c.Wait/2)), cmp.Or(c.quiet, quietTime)
	a := &attempt{JoinConfig: c, session: session, started: time.Now()}
	of, err := a.try(ctx)
	if err == nil || slices.Contains(problem.Kinds(err), problem.Gone) {
		l.mu.Lock()
		l.toward = ""
		l.mu.Unlock()
	}
	switch {
	case err != nil:
		return fmt.Errorf("join endpoint %s from node %s: %w", address, c.Self.describe(), err)
	case of.answer.Index != l.index || skewed(of.answer.Timeout) != l.timeout:
		return problem.Errorf(problem.Conflict, "join endpoint %s: this node is %d there with the timeout %v, and was %d with %v", address, of.answer.Index, of.answer.Timeout, l.index, l.timeout)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	kind, body := first()
	data, err := encode(body)
	if err != nil {
		return fmt.Errorf("tell %s: %w", kind, err)
	}
	l.as, l.at, l.answered = of.as, address, of.sent
	l.moves++
	l.told, l.first = append([]message{{kind, data}}, l.told...), 1
	l.beats.move(address, of.certificate)
	l.rest.move(address, of.certificate)
	if l.quiet && time.Since(of.sent) < l.timeout/2 {
		l.quiet, l.silent = false, make(chan struct{})
		close(l.contact)
	}
	signal(l.push)
	l.c.Logger.Info("another node coordinates", "endpoint", address)
	if l.c.Answered != nil {
		l.c.Answered(of.sent, l.timeout)
	}
	return nil
}

// credential returns what requests bear now, and how often the link has moved.
func (l *Link) credential() (as credential, moves int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.as, l.moves
}

// moved reports whether the link has moved since: an answer from before means nothing.
func (l *Link) moved(since int) bool {
	_, now := l.credential()
	return now != since
}

// Endpoint returns the address of the endpoint, HOST:PORT.
func (l *Link) Endpoint() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.at
}

// Answered returns when the last answered beat was sent.
func (l *Link) Answered() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.answered
}

// Index returns the index that the coordinator assigned to this node.
func (l *Link) Index() int { return l.index }

// Self returns the node as its agent declared it, with the address that others use.
func (l *Link) Self() Node { return l.c.Self }

// Timeout returns T.
func (l *Link) Timeout() time.Duration { return l.timeout }

// Welcome returns [EndpointConfig.Welcome].
func (l *Link) Welcome() json.RawMessage { return l.welcome }

// Commands returns the channel of commands: each once, in order. It is closed when the
// link ends; commands that were not received are dropped then.
func (l *Link) Commands() <-chan Command { return l.commands.out }

// Done returns a channel that is closed when the link has ended. [Link.Err] has the
// reason.
func (l *Link) Done() <-chan struct{} { return l.done }

// Err returns why the link has ended: an [*EndedError], [ErrExpelled], [ErrNoContact] or
// [ErrRestarted]. It is nil before the end, and after Leave and Close.
func (l *Link) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx.Err() == nil {
		return nil
	}
	return l.err
}

// Ending reports whether the end of the link is decided: [Link.Done] follows.
func (l *Link) Ending() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ended
}

// decide notes the reason of the end, unless there is one already. Its caller ends the link
// if it returns true.
func (l *Link) decide(err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return false
	}
	l.ended, l.err = true, err
	return true
}

// end ends the link for a reason.
func (l *Link) end(err error) {
	if l.decide(err) {
		l.stop()
	}
}

// Abandon ends the link for a reason that [Link.Err] returns. The coordinator is not told.
func (l *Link) Abandon(why error) { l.end(why) }

// Close ends the link without a word to the coordinator, which loses the node after T.
func (l *Link) Close() {
	l.decide(nil)
	l.stop()
	<-l.done
}

// Leave sends all messages, tells the coordinator that this node ends, and ends the link,
// also if that fails.
func (l *Link) Leave(ctx context.Context, reason string) error {
	defer l.Close()
	if err := l.Flush(ctx); err != nil {
		return fmt.Errorf("leave the job: %w", err)
	}
	l.decide(nil) // answers to other requests may report first that this node has left
	if err := l.goodbye(ctx, reason); err != nil {
		return fmt.Errorf("leave the job: %w", err)
	}
	return nil
}

// goodbye repeats a leave request until it is answered.
func (l *Link) goodbye(ctx context.Context, reason string) error {
	for {
		_, err := request[nothing](ctx, l, l.rest, l.soon(), "/v1/leave", leaveRequest{reason})
		refused := &refusal{}
		if err == nil || errors.As(err, &refused) && refused.Kind == problem.Gone {
			return nil // an earlier answer was lost
		}
		if ctx.Err() != nil || l.ctx.Err() != nil {
			return err
		}
		if err := pauseFor(ctx, l.interval()); err != nil {
			return err
		}
	}
}

// Tell sends a message to the coordinator. It returns at once; the message is retried
// until the coordinator has it or the link ends. An error means that the body cannot be
// encoded or is too large.
func (l *Link) Tell(kind string, body any) error {
	data, err := encode(body)
	if err != nil {
		return fmt.Errorf("tell %s: %w", kind, err)
	}
	l.mu.Lock()
	l.told = append(l.told, message{kind, data})
	l.mu.Unlock()
	signal(l.push)
	return nil
}

// Flush waits until the coordinator has all messages of earlier calls of Tell.
func (l *Link) Flush(ctx context.Context) error {
	l.mu.Lock()
	last := l.first + uint64(len(l.told))
	for l.first < last {
		flushed := l.flushed
		l.mu.Unlock()
		select {
		case <-flushed:
		case <-l.ctx.Done():
			return fmt.Errorf("flush messages: the link has ended: %w", errors.Join(l.Err(), l.ctx.Err()))
		case <-ctx.Done():
			return fmt.Errorf("flush messages: %w", context.Cause(ctx))
		}
		l.mu.Lock()
	}
	l.mu.Unlock()
	return nil
}

// SetPort changes the port of this node, see [Node.Port]. The coordinator knows it before
// it gets messages of later calls of Tell.
func (l *Link) SetPort(port int) {
	l.mu.Lock()
	l.port = port
	l.mu.Unlock()
	signal(l.hurry)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// URL returns the address of a relayed request: of a path of [Endpoint.Handle].
func (l *Link) URL(path string) string { return l.base + relayPrefix + path }

// Client returns a client for relayed requests. It has no timeout of its own, and fails
// requests to other servers.
func (l *Link) Client() *http.Client {
	return &http.Client{Transport: relayTransport{l}, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// relayTransport adds the credentials to requests to the endpoint.
type relayTransport struct{ *Link }

var _ http.RoundTripper = relayTransport{}

// RoundTrip implements [http.RoundTripper].
func (t relayTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if !strings.HasPrefix(r.URL.String(), t.base+relayPrefix+"/") {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return nil, fmt.Errorf("relay to %s: it is not the endpoint; use Link.URL", r.URL.Host)
	}
	r = r.Clone(r.Context())
	as, _ := t.credential()
	as.set(r)
	return t.rest.RoundTrip(r)
}
