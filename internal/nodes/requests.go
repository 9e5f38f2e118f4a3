package nodes

import (
	"context"
	"crypto/tls"
	"math"
	"net"
	"net/http"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// slowRequest bounds how long a control request's body and answer may take.
const slowRequest = 30 * time.Second

type (
	connKey struct{} // of the *conn of a request
	nodeKey struct{} // of the index of a relayed request's node
)

// conn is a connection of an agent. Endpoint.mu guards it.
type conn struct {
	raw      net.Conn // under TLS
	sessions map[string]bool
	closed   bool
}

// From returns the index of the node that sent a relayed request, -1 for other requests.
func From(ctx context.Context) int {
	if index, ok := ctx.Value(nodeKey{}).(int); ok {
		return index
	}
	return -1
}

// Handle registers a handler for relayed requests of joined agents, with a pattern of
// [http.ServeMux]. Its requests have the index of their node, see [From]; their contexts end
// with the node's membership. The handler bounds the body.
func (e *Endpoint) Handle(pattern string, h http.Handler) { e.relay.Handle(pattern, h) }

// handler returns the routes of the endpoint.
func (e *Endpoint) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/job", e.job)
	mux.Handle("POST /v1/join", e.authorized(e.join))
	mux.Handle("POST /v1/beat", e.joined(e.beat))
	mux.Handle("POST /v1/next", e.joined(e.next))
	mux.Handle("POST /v1/tell", e.joined(e.tell))
	mux.Handle("POST /v1/leave", e.joined(e.leave))
	mux.Handle(relayPrefix+"/", e.joined(e.relayed))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		limit(w) // also if it is refused: the server reads what is left of its body
		e.mu.Lock()
		down := e.down
		if !down {
			e.requests.Add(1)
		}
		e.mu.Unlock()
		if down {
			httpkit.Refuse(w, problem.Errorf(problem.Unavailable, "the coordinator has stopped"))
			return
		}
		defer e.requests.Done()
		mux.ServeHTTP(w, r)
	})
}

// limit limits the time that a request may take to arrive and its answer to leave.
func limit(w http.ResponseWriter) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(slowRequest)) // best effort
	_ = control.SetWriteDeadline(time.Now().Add(slowRequest))
}

// unlimit lifts these limits, for a handler that has its own.
func unlimit(w http.ResponseWriter) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{}) // best effort, as above
	_ = control.SetWriteDeadline(time.Time{})
}

// sessionHandler answers a request of a joined agent.
type sessionHandler func(w http.ResponseWriter, r *http.Request, id string, s *session)

// authorized passes on requests that bear the job's token.
func (e *Endpoint) authorized(do http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !httpkit.Authorized(r, e.token) {
			httpkit.Refuse(w, problem.Errorf(problem.Unauthorized, "the token is not that of job %s; give all nodes the same token, or the same shared directory", e.c.Job))
			return
		}
		do(w, r)
	})
}

// joined passes on requests of members. Each counts as a beat.
func (e *Endpoint) joined(do sessionHandler) http.Handler {
	return e.authorized(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get(sessionHeader)
		e.mu.Lock()
		if e.paused() {
			e.mu.Unlock()
			httpkit.Refuse(w, problem.Errorf(problem.Unavailable, "the coordinator was paused, and another may have taken its place"))
			return
		}
		_, err := e.roster.hear(e.c.Now(), id)
		s := e.sessions[id]
		if err == nil && s != nil {
			e.connected(r, id)
		}
		e.settle()
		e.mu.Unlock()
		if err == nil && s == nil { // the coordinator's own session, which has no agent
			err = problem.Errorf(problem.Denied, "this session is not an agent's")
		}
		if err != nil {
			httpkit.Refuse(w, err)
			return
		}
		do(w, r, id, s)
	})
}

// connected counts the connection of a request for its session. Its caller holds e.mu.
func (e *Endpoint) connected(r *http.Request, id string) {
	if c, ok := r.Context().Value(connKey{}).(*conn); ok && !c.closed && !c.sessions[id] {
		c.sessions[id] = true
		trust(c.raw)
		e.roster.connect(id)
	}
}

func (e *Endpoint) open(c net.Conn) *conn {
	opened := &conn{sessions: map[string]bool{}}
	if over, ok := c.(*tls.Conn); ok {
		opened.raw = over.NetConn()
	}
	e.mu.Lock()
	e.conns[c] = opened
	e.mu.Unlock()
	return opened
}

func (e *Endpoint) disconnected(c net.Conn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	closed := e.conns[c]
	delete(e.conns, c)
	if closed == nil {
		return
	}
	closed.closed = true
	for id := range closed.sessions {
		e.roster.disconnect(id)
	}
	e.settle()
}

// job answers which job this is. With the agent's nonce it proves that it holds the
// token.
func (e *Endpoint) job(w http.ResponseWriter, r *http.Request) {
	info := jobInfo{Job: e.c.Job, Protocol: Protocol, Version: e.c.Version, Shared: e.c.Token == ""}
	if nonce := r.URL.Query().Get("nonce"); nonce != "" {
		info.Proof = proof(e.token, nonce, e.certificate)
	}
	_ = httpkit.Reply(w, info) // a disconnected client needs no answer
}

func (e *Endpoint) join(w http.ResponseWriter, r *http.Request) {
	in, err := httpkit.Request[joinRequest](w, r, smallBody)
	var out joinAnswer
	if err == nil {
		out, err = e.admit(r, in)
	}
	if err != nil {
		if status := httpkit.DetailsOf(err).Kind; status == problem.Conflict {
			w.Header().Set(retryHeader, (e.c.Timeout + e.c.Timeout/2).String())
		}
		e.c.Logger.Warn("join refused", "host", in.Node.Host, "pid", in.Node.PID, "err", err)
		httpkit.Refuse(w, err)
		return
	}
	for _, warning := range out.Warnings {
		e.c.Logger.Warn("node differs", "node", out.Index, "difference", warning)
	}
	_ = httpkit.Reply(w, out) // the agent repeats the request
}

// admit makes an agent a member.
func (e *Endpoint) admit(r *http.Request, in joinRequest) (joinAnswer, error) {
	if err := e.acceptable(in); err != nil {
		return joinAnswer{}, err
	}
	local, useful := "", false
	if a, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		local, useful = numeric(a)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over != nil {
		return joinAnswer{}, problem.Errorf(problem.Gone, "join: job %s has ended: %s", e.c.Job, e.over.Reason)
	}
	member, err := e.roster.join(e.c.Now(), in.Node, in.Session)
	if err != nil {
		return joinAnswer{}, err
	}
	if e.sessions[in.Session] == nil {
		ctx, stop := context.WithCancel(context.Background())
		e.sessions[in.Session] = &session{index: member.node.Index, joining: member.joining, ctx: ctx, stop: stop, first: 1, wake: make(chan struct{})}
	}
	for _, own := range e.roster.entries {
		// The address at which an agent reaches this node is one for the others too.
		if own.self && own.node.Address == "" && useful {
			own.node.Address = local
		}
	}
	e.settle()
	return joinAnswer{member.node.Index, e.c.Timeout, e.c.Welcome, e.warnings(in.Node)}, nil
}

// acceptable refuses agents that cannot be part of this job.
func (e *Endpoint) acceptable(in joinRequest) error {
	own, n := e.c.Self, in.Node
	switch {
	case len(in.Session) < 16 || len(in.Session) > 128:
		return problem.Errorf(problem.Invalid, "join: node %s: malformed session; use the same version of the program on all nodes", n.describe())
	case in.Protocol != Protocol:
		return problem.Errorf(problem.Invalid, "join: node %s has protocol %d, %s has %d; use the same version of the program on all nodes", n.describe(), in.Protocol, own.describe(), Protocol)
	case n.size() > maxNode:
		return problem.Errorf(problem.Invalid, "join: node %.64q: its description has %d bytes, at most %d are allowed; give it shorter names", n.Host, n.size(), maxNode)
	case n.Procs < 0 || n.Procs > maxProcs:
		return problem.Errorf(problem.Invalid, "join: node %s has %d workers, at most %d are allowed", n.describe(), n.Procs, maxProcs)
	case !isPort(n.Port) || !isPort(n.PeerPort):
		return problem.Errorf(problem.Invalid, "join: node %s has the ports %d and %d; a port is from 0 to %d", n.describe(), n.Port, n.PeerPort, math.MaxUint16)
	case n.Version != e.c.Version:
		return problem.Errorf(problem.Invalid, "join: node %s has version %q of the program, %s has %q; use the same version on all nodes", n.describe(), n.Version, own.describe(), e.c.Version)
	case n.Store != e.c.Store && n.Store != "" && e.c.Store != "":
		return problem.Errorf(problem.Foreign, "join: node %s opens store %s, %s opens store %s at the same path; mount the same directory on all nodes", n.describe(), n.Store, own.describe(), e.c.Store)
	}
	return nil
}

func (e *Endpoint) beat(w http.ResponseWriter, r *http.Request, id string, _ *session) {
	in, err := httpkit.Request[beatRequest](w, r, smallBody)
	if err != nil {
		httpkit.Refuse(w, err)
		return
	}
	e.port(id, in.Port)
	_ = httpkit.Reply(w, nothing{}) // the agent beats again
}

// port notes the port of a node.
func (e *Endpoint) port(id string, port int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if member := e.roster.sessions[id]; member != nil && isPort(port) {
		member.node.Port = port
	}
}

// next waits for commands that the agent does not have.
func (e *Endpoint) next(w http.ResponseWriter, r *http.Request, id string, s *session) {
	in, err := httpkit.Request[nextRequest](w, r, smallBody)
	if err != nil {
		httpkit.Refuse(w, err)
		return
	}
	timer := time.NewTimer(longPoll)
	defer timer.Stop()
	for {
		e.mu.Lock()
		for len(s.commands) > 0 && s.first <= in.After {
			s.commands, s.first = s.commands[1:], s.first+1
		}
		out := nextAnswer{First: s.first, Commands: batch(s.commands, func(c Command) int { return len(c.Body) })}
		if len(out.Commands) == 0 {
			out.Ended = e.over
		}
		wake := s.wake
		e.mu.Unlock()
		if len(out.Commands) > 0 || out.Ended != nil {
			_ = httpkit.Reply(w, out) // the agent asks again
			return
		}
		select {
		case <-wake:
		case <-timer.C:
			_ = httpkit.Reply(w, out)
			return
		case <-s.ctx.Done():
			e.mu.Lock()
			out.Ended = e.over
			err := e.roster.gone(id)
			e.mu.Unlock()
			if out.Ended != nil {
				_ = httpkit.Reply(w, out)
				return
			}
			httpkit.Refuse(w, err)
			return
		case <-r.Context().Done():
			return
		}
	}
}

// tell takes messages. It skips those that it has.
func (e *Endpoint) tell(w http.ResponseWriter, r *http.Request, id string, s *session) {
	in, err := httpkit.Request[tellRequest](w, r, batchBody)
	if err == nil && e.events.size() > maxEvents {
		err = problem.Errorf(problem.Unavailable, "the coordinator has %d events to work on; send the messages again", e.events.size())
	}
	if err != nil {
		httpkit.Refuse(w, err)
		return
	}
	e.port(id, in.Port)
	e.mu.Lock()
	if e.sessions[id] != s {
		err = e.roster.gone(id)
	} else if in.First > s.heard+1 {
		err = problem.Errorf(problem.Invalid, "messages %d to %d are missing", s.heard+1, in.First-1)
	} else {
		for i, m := range in.Messages {
			if number := in.First + uint64(i); number > s.heard {
				s.heard = number
				e.events.put(Message{s.index, s.joining, m.Kind, m.Body})
			}
		}
	}
	heard := s.heard
	e.mu.Unlock()
	if err != nil {
		httpkit.Refuse(w, err)
		return
	}
	_ = httpkit.Reply(w, tellAnswer{heard}) // the agent sends the messages again
}

func (e *Endpoint) leave(w http.ResponseWriter, r *http.Request, id string, _ *session) {
	in, err := httpkit.Request[leaveRequest](w, r, smallBody)
	if err != nil {
		httpkit.Refuse(w, err)
		return
	}
	e.mu.Lock()
	e.roster.leave(id, in.Reason)
	e.settle()
	e.mu.Unlock()
	_ = httpkit.Reply(w, nothing{})           // the agent repeats the request
	_ = http.NewResponseController(w).Flush() // before the endpoint closes
}

// relayed passes a request on to the caller's handlers.
func (e *Endpoint) relayed(w http.ResponseWriter, r *http.Request, _ string, s *session) {
	unlimit(w)
	ctx, cancel := context.WithCancel(context.WithValue(r.Context(), nodeKey{}, s.index))
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	http.StripPrefix(relayPrefix, e.relay).ServeHTTP(w, r.WithContext(ctx))
}

// tooLarge refuses a body that no request can hold.
func tooLarge(size int) error {
	return problem.Errorf(problem.Invalid, "%d bytes, at most %d are allowed; use a relayed request", size, maxBody)
}
