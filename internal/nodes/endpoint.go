package nodes

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// defaultTimeout is T.
const defaultTimeout = 10 * time.Second

// The timeouts that users may give. Beats and ticks are parts of T, and waits are multiples of it.
const leastTimeout, mostTimeout = 100 * time.Millisecond, 24 * time.Hour

// CheckTimeout returns an error that names the bounds if users may not give a timeout.
func CheckTimeout(t time.Duration) error {
	if t < leastTimeout || t > mostTimeout {
		return problem.Errorf(problem.Invalid, "%v: give a duration from %v to %v, such as %v", t, leastTimeout, mostTimeout, defaultTimeout)
	}
	return nil
}

// EndpointConfig configures an [Endpoint].
type EndpointConfig struct {
	Address string // HOST:PORT; the port may be 0
	// Dir is a directory that all nodes share. Listen makes it if it does not exist, and
	// writes Dir/JOB.json with the address, the token and the digest of the certificate.
	Dir string
	// Token, if set, is the token that agents must show; no file is written then.
	Token string

	Job, Run, Store, Version string

	Min, Max int             // nodes of a group, with this one unless it is a standby
	Self     Node            // the coordinator's own node; it needs no beats, and is no member if it is a standby
	Timeout  time.Duration   // T; 10 s if 0
	Welcome  json.RawMessage // given to each agent that joins
	// Excluded are machines that cannot join: those that an earlier coordinator has excluded. An
	// event follows for each, unless Succeeds is set.
	Excluded []Excluded
	// Ticked, if set, is called at first and each T/10 with the time and T, as long as this process
	// runs. It must not block.
	Ticked func(now time.Time, timeout time.Duration)
	// Verify, if set, is called when this process did not run for T, or for [maxPause] if that is less:
	// until it returns nil, agents get no answers. Another process may coordinate by now.
	Verify func(ctx context.Context) error
	// Succeeds is set if the agents of another coordinator of the same job join: their token
	// stays valid.
	Succeeds bool
	Logger   *slog.Logger // may be nil
	Now      func() time.Time

	machine machine
	wrap    func(net.Listener) net.Listener
}

// validate returns the configuration with its defaults.
func (c EndpointConfig) validate() (EndpointConfig, error) {
	c.Timeout = cmp.Or(c.Timeout, defaultTimeout)
	c.Logger = cmp.Or(c.Logger, slog.New(slog.DiscardHandler))
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.machine.lookup == nil {
		c.machine = thisMachine
	}
	c.Self = c.Self.here(rand.Text)
	c.Self.Version = cmp.Or(c.Self.Version, c.Version)
	c.Self.Store = cmp.Or(c.Self.Store, c.Store)
	switch {
	case c.Min < 1 || c.Max < 1:
		return c, problem.Errorf(problem.Invalid, "listen at endpoint: %d to %d nodes; a group has at least 1 node", c.Min, c.Max)
	case c.Min > c.Max:
		return c, problem.Errorf(problem.Invalid, "listen at endpoint: at least %d nodes and at most %d; give MIN:MAX with MIN ≤ MAX", c.Min, c.Max)
	case c.Timeout < 0:
		return c, problem.Errorf(problem.Invalid, "listen at endpoint: node timeout %v; give a positive one", c.Timeout)
	case c.Dir == "" && c.Token == "":
		return c, problem.Errorf(problem.Invalid, "listen at endpoint: neither a shared directory nor a token; give one of them")
	case !jobName.MatchString(c.Job):
		return c, problem.Errorf(problem.Invalid, "listen at endpoint: job ID %q; use letters, digits, '.', '_' and '-'", c.Job)
	case len(c.Welcome) > maxWelcome:
		return c, problem.Wrap(problem.Invalid, fmt.Errorf("listen at endpoint: welcome: %w", tooLarge(len(c.Welcome))))
	}
	return c, nil
}

// Endpoint is the coordinator's side of the control plane. Its methods can be called from
// all goroutines.
type Endpoint struct {
	c           EndpointConfig
	timeout     time.Duration // T by this node's clock; agents receive c.Timeout
	token       string
	certificate string // digest
	listener    net.Listener
	strangers   strangers
	server      *http.Server
	relay       *http.ServeMux
	events      *queue[Event]
	stop        context.CancelFunc
	background  sync.WaitGroup // the loops
	requests    sync.WaitGroup

	mu       sync.Mutex
	roster   *roster
	sessions map[string]*session
	conns    map[net.Conn]*conn
	changed  chan struct{} // closed at the next change of membership
	over     *ended
	doubt    bool // another process may coordinate: see EndpointConfig.Verify
	closed   bool // by Close
	down     bool // no request is taken any more
}

// session is the state of one joined agent process. Endpoint.mu guards it.
type session struct {
	index    int
	joining  uint64
	ctx      context.Context // ends with the membership
	stop     context.CancelFunc
	commands []Command // not acknowledged
	first    uint64    // number of the first of them
	wake     chan struct{}
	heard    uint64 // number of the last message
}

// Listen starts the endpoint of a job. ctx bounds the start only; [Endpoint.Close] ends
// the endpoint.
func Listen(ctx context.Context, c EndpointConfig) (*Endpoint, error) {
	c, err := c.validate()
	if err != nil {
		return nil, err
	}
	at, warning, err := c.machine.listenAt(ctx, c.Address)
	if err != nil {
		return nil, err
	}
	if warning != "" {
		c.Logger.Warn("endpoint host is not an address of this node", "endpoint", c.Address, "listen", at, "reason", warning)
	}
	certificate, err := newCertificate(c.Now())
	if err != nil {
		return nil, fmt.Errorf("make the certificate of the endpoint: %w", err)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", at)
	if err != nil {
		return nil, fmt.Errorf("listen at endpoint %s: %w; choose a free port and an address of this node", c.Address, err)
	}
	if _, port, err := net.SplitHostPort(c.Address); err == nil && port == "0" {
		c.Address = listener.Addr().String() // the port is known now
	}
	token := cmp.Or(c.Token, rand.Text()+rand.Text())
	if c.Succeeds && c.Token == "" {
		if before, err := readCredentials(c.Dir, c.Job); err == nil {
			token = before.Token
		} else if !absent(err) {
			return nil, errors.Join(err, listener.Close())
		}
	}
	e := &Endpoint{
		c: c, timeout: skewed(c.Timeout), token: token, certificate: digest(certificate.Certificate[0]), listener: listener,
		relay: http.NewServeMux(), events: newQueue[Event](), sessions: map[string]*session{}, conns: map[net.Conn]*conn{}, changed: make(chan struct{}),
		roster: newRoster(skewed(c.Timeout), c.Max, c.Now()),
	}
	if address, ok := numeric(listener.Addr()); e.c.Self.Address == "" && (ok || address != "") {
		e.c.Self.Address = address
	}
	if !e.c.Self.Standby {
		var self *entry
		if self, err = e.roster.join(c.Now(), e.c.Self, rand.Text()); err == nil {
			self.self = true
		}
	}
	if e.c.Self.Standby && !c.Succeeds {
		e.roster.aside = e.c.Self.Index
	}
	if err == nil {
		e.roster.out = nil // the caller knows its own node
		e.roster.inherit(c.Excluded)
		if c.Succeeds {
			// The job has them. Another node may have the index by now, and a second record would be of its stay.
			e.roster.out = nil
		}
		if c.Token == "" {
			// Agents look for the file after they have connected, so it exists then.
			err = credentials{Address: c.Address, Token: e.token, Certificate: e.certificate}.write(c.Dir, c.Job)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen at endpoint %s: %w", c.Address, err), listener.Close())
	}
	e.serve(certificate)
	return e, nil
}

// serve starts the goroutines of the endpoint.
func (e *Endpoint) serve(certificate tls.Certificate) {
	ctx, stop := context.WithCancel(context.Background())
	e.stop = stop
	slow := max(e.timeout, time.Second)
	e.server = &http.Server{
		Handler:           e.handler(),
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13},
		ReadHeaderTimeout: slow,
		IdleTimeout:       6 * slow,
		MaxHeaderBytes:    smallBody,
		// A dead connection must not hold a request until TCP notices.
		HTTP2:       &http.HTTP2Config{SendPingTimeout: slow, PingTimeout: slow, WriteByteTimeout: slow, MaxConcurrentStreams: 4096},
		ErrorLog:    slog.NewLogLogger(e.c.Logger.Handler(), slog.LevelDebug),
		BaseContext: func(net.Listener) context.Context { return ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, e.open(c))
		},
		ConnState: func(c net.Conn, state http.ConnState) {
			if state == http.StateClosed || state == http.StateHijacked {
				e.disconnected(c)
			}
		},
	}
	listener := e.listener
	if e.c.wrap != nil {
		listener = e.c.wrap(listener)
	}
	e.strangers.Listener = listener
	e.ticked()                                                              // a group may start, and this process stop, before the first tick
	e.background.Go(func() { _ = e.server.ServeTLS(&e.strangers, "", "") }) // until Close
	e.background.Go(func() { e.events.run(ctx) })
	e.background.Go(func() { e.ticks(ctx) })
}

// ticked tells the caller that this process runs.
func (e *Endpoint) ticked() {
	if e.c.Ticked != nil {
		e.c.Ticked(time.Now(), e.timeout)
	}
}

// ticks judges the nodes each T/10.
func (e *Endpoint) ticks(ctx context.Context) {
	ticker := time.NewTicker(e.roster.interval())
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		e.ticked()
		e.mu.Lock()
		if e.paused() && !e.doubt {
			e.doubt = true
			e.background.Go(func() { e.verify(ctx) })
		}
		e.roster.tick(e.c.Now())
		e.settle()
		e.mu.Unlock()
	}
}

// paused reports whether this process did not run for so long that another may coordinate by now. The
// caller holds e.mu.
func (e *Endpoint) paused() bool {
	return e.c.Verify != nil && (e.doubt || e.c.Now().Sub(e.roster.ticked) > min(e.timeout, maxPause))
}

// maxPause is how long a coordinator may not run without a doubt that it still coordinates. Its lease
// was renewed at most 5 s before, if the log had answered, and lasts 15 s. A shorter pause proves
// nothing: while the log does not answer, no other process can take its place either.
const maxPause = 10 * time.Second

// verify ends the doubt once the caller is sure.
func (e *Endpoint) verify(ctx context.Context) {
	for ctx.Err() == nil {
		err := e.c.Verify(ctx)
		if err == nil {
			e.mu.Lock()
			e.doubt = false
			e.mu.Unlock()
			return
		}
		e.c.Logger.Warn("coordinator was paused, and answers no node before it knows that no other has taken its place", "error", err)
		if pauseFor(ctx, e.roster.interval()) != nil {
			return
		}
	}
}

// settle follows a change of the roster: it ends the sessions of nodes that are no
// members, and passes the events on. Its caller holds e.mu.
func (e *Endpoint) settle() {
	if len(e.roster.out) == 0 {
		return
	}
	for _, event := range e.roster.out {
		e.log(event)
	}
	e.events.put(e.roster.out...)
	e.roster.out = nil
	e.announce()
}

// announce ends the sessions that the roster has ended, and wakes Gather and Close. Its
// caller holds e.mu.
func (e *Endpoint) announce() {
	for id, s := range e.sessions {
		if member := e.roster.sessions[id]; member == nil || member.lost != "" {
			s.stop()
			delete(e.sessions, id)
		}
	}
	close(e.changed)
	e.changed = make(chan struct{})
}

func (e *Endpoint) log(event Event) {
	switch event := event.(type) {
	case Joined:
		e.c.Logger.Info("node joined", "node", event.Member.Index, "host", event.Member.Host, "pid", event.Member.PID, "address", event.Member.Address)
	case Rejoined:
		e.c.Logger.Info("node rejoined", "node", event.Member.Index, "host", event.Member.Host, "pid", event.Member.PID, "address", event.Member.Address)
	case Left:
		e.c.Logger.Info("node left", "node", event.Node, "reason", event.Reason)
	case Suspect:
		e.c.Logger.Warn("node suspect", "node", event.Node, "reason", event.Why)
	case Recovered:
		e.c.Logger.Info("node recovered", "node", event.Node)
	case Lost:
		e.c.Logger.Warn("node lost", "node", event.Node, "reason", event.Why)
	case Excluded:
		e.c.Logger.Warn("node excluded", "node", event.Node, "host", event.Host, "reason", event.Why)
	case Paused:
		e.c.Logger.Warn("coordinator paused", "for", event.For)
	}
}

// Members returns all known nodes, ordered by index.
func (e *Endpoint) Members() []Member {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.roster.members(e.c.Now())
}

// Events returns the channel of events. It is closed by [Endpoint.Close]. While the
// caller does not receive, messages wait at their nodes.
func (e *Endpoint) Events() <-chan Event { return e.events.out }

// Addr returns the address at which the endpoint listens.
func (e *Endpoint) Addr() net.Addr { return e.listener.Addr() }

// Changed returns a channel that is closed at the next change of membership.
func (e *Endpoint) Changed() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.changed
}

// Desert closes the endpoint without a word to its agents: they have another coordinator.
func (e *Endpoint) Desert() error {
	e.mu.Lock()
	was := e.closed
	e.closed, e.down = true, true
	for _, s := range e.sessions {
		s.stop()
	}
	e.mu.Unlock()
	if was {
		return nil
	}
	e.stop()
	err := e.server.Close()
	e.background.Wait()
	return err
}

// Release reports that the group of these nodes has ended: they are ready again. Lost
// ones are removed from the members.
func (e *Endpoint) Release(nodes []int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.roster.release(nodes)
	e.announce()
}

// Expel ends the membership of a node that does not obey, by its joining. Its agent gets the reason with
// its next request, and may join again. [Lost] or [Rejoined] follows.
func (e *Endpoint) Expel(node int, joining uint64, why string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.roster.expel(node, joining, why); err != nil {
		return err
	}
	e.c.Logger.Warn("node expelled", "node", node, "reason", why)
	e.announce()
	return nil
}

// Send appends a command to those of a node. It is retried until the agent acknowledges
// it or is lost, and the agent gets it once, in order. An error means that the node is no
// member, that it is the coordinator's own, or that it does not take its commands.
func (e *Endpoint) Send(node int, kind string, body any) error {
	return e.send(node, func(*entry) bool { return true }, kind, body)
}

// SendTo is [Endpoint.Send] to one joining of a node: if its agent has joined again since, SendTo returns an error, as for a
// node that is no member.
func (e *Endpoint) SendTo(node int, joining uint64, kind string, body any) error {
	return e.send(node, func(member *entry) bool { return member.joining == joining }, kind, body)
}

func (e *Endpoint) send(node int, meant func(*entry) bool, kind string, body any) error {
	data, err := encode(body)
	if err != nil {
		return fmt.Errorf("send %s to node %d: %w", kind, node, err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	member := e.roster.entries[node]
	if member == nil || member.lost != "" || !meant(member) {
		return problem.Errorf(problem.Gone, "send %s to node %d: it is no member; wait until it joins again", kind, node)
	}
	s := e.sessions[member.session]
	switch {
	case member.self:
		return problem.Errorf(problem.Invalid, "send %s to node %d: it is the coordinator's own node; call it directly", kind, node)
	case s == nil:
		return problem.Errorf(problem.Gone, "send %s to node %d: it has ended", kind, node)
	case len(s.commands) >= maxCommands:
		return problem.Errorf(problem.Unavailable, "send %s to node %d: %d commands are not acknowledged; look at the trainer on %s", kind, node, len(s.commands), member.node.Host)
	}
	s.commands = append(s.commands, Command{kind, data})
	s.notify()
	return nil
}

// notify wakes the requests that wait for commands.
func (s *session) notify() {
	close(s.wake)
	s.wake = make(chan struct{})
}

// End tells all agents that the job has ended, with the coordinator's last words. It
// returns when each has confirmed or is lost, or when ctx ends. Later joins are refused.
func (e *Endpoint) End(ctx context.Context, reason string, code int) error {
	e.mu.Lock()
	if e.over == nil {
		e.over = &ended{reason, code}
	}
	for _, s := range e.sessions {
		s.notify()
	}
	e.announce()
	for {
		left, changed := len(e.sessions), e.changed
		e.mu.Unlock()
		if left == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("end the job: %d nodes have not confirmed it: %w", left, ctx.Err())
		}
		e.mu.Lock()
	}
}

// Close ends the endpoint. Agents that have not learned the end of the job by
// [Endpoint.End] get a short time to learn it now.
func (e *Endpoint) Close() error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil
	}
	e.closed = true
	e.mu.Unlock()
	grace := min(2*e.roster.interval(), 2*time.Second)
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	_ = e.End(ctx, "the coordinator has stopped", 1) // agents that do not answer notice the silence
	cancel()
	var err error
	if e.c.Token == "" {
		if now, rerr := readCredentials(e.c.Dir, e.c.Job); rerr != nil || same(now.Certificate, e.certificate) { // otherwise another coordinator's
			if err = os.Remove(credentialsPath(e.c.Dir, e.c.Job)); errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		}
	}
	e.mu.Lock()
	e.down = true
	for _, s := range e.sessions {
		s.stop()
	}
	e.mu.Unlock()
	answered := make(chan struct{})
	e.background.Go(func() {
		e.requests.Wait()
		close(answered)
	})
	select { // the last answers
	case <-answered:
	case <-time.After(grace):
	}
	e.stop()
	if closed := e.server.Close(); closed != nil && !errors.Is(closed, net.ErrClosed) {
		err = errors.Join(err, closed)
	}
	e.background.Wait()
	return err
}

// warnings lists the differences between a node and the coordinator's that are allowed.
func (e *Endpoint) warnings(n Node) []string {
	var list []string
	if own := e.c.Self; own.Command != n.Command && own.Command != "" && n.Command != "" {
		list = append(list, fmt.Sprintf("node %s runs another command than %s; start all nodes with the same command", n.describe(), own.describe()))
	}
	if own := e.c.Self; own.Nodes != n.Nodes && own.Nodes != "" && n.Nodes != "" {
		list = append(list, fmt.Sprintf("node %s was started for %s nodes, %s for %s, which counts; start all nodes with the same number of nodes", n.describe(), n.Nodes, own.describe(), own.Nodes))
	}
	if own := e.c.Self; own.Procs != n.Procs && own.Procs != 0 && n.Procs != 0 {
		list = append(list, fmt.Sprintf("node %s has %d workers, %s has %d", n.describe(), n.Procs, own.describe(), own.Procs))
	}
	return slices.Clip(list)
}
