package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/collective"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/peer"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/connections"
	"github.com/ckptstore/ckptstore/internal/session/handoff"
	"github.com/ckptstore/ckptstore/internal/session/outbox"
)

// maxBody bounds the body of a request, in bytes. Tensors do not travel here.
const maxBody = 1 << 30

// rankServer serves the socket of one rank of one attempt. Its methods named on…
// answer one request each; package client has the protocol.
type rankServer struct {
	*Group
	rank   int
	token  string
	socket string
	listen net.Listener
	http   *http.Server
	done   chan error

	relayed bool // the process of another node serves the socket, and has checked the token

	outbox *outbox.Outbox

	left  atomic.Bool // the rank has left
	once  sync.Once
	mu    sync.Mutex
	saves map[string]int // number of saves of each name
	plans localPlans
	conns connections.Tracker
}

func badRequest(format string, args ...any) error {
	return problem.Errorf(problem.Invalid, format, args...)
}

// headerLimit is how long a connection may take to send the head of its first
// request, as an idle connection holds a descriptor of the trainer. Between two
// requests a connection may idle without limit.
const headerLimit = 30 * time.Second

// serveRank opens the socket and serves it until close.
func (g *Group) serveRank(rank int, socket, token string) (*rankServer, error) {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, fmt.Errorf("open the socket of rank %d: %w", rank, err)
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("open the socket of rank %d: %w", rank, err)
	}
	s := &rankServer{Group: g, rank: rank, token: token, socket: socket, listen: l, done: make(chan error, 1), saves: map[string]int{}, plans: localPlans{said: map[string]bool{}}}
	s.outbox = outbox.New(g.work, s.recordAsRank, s.lost)
	mux := http.NewServeMux()
	mux.Handle("POST /v1/hello", handle(s, s.onHello))
	mux.Handle("POST /v1/save", handle(s, s.onSave))
	mux.Handle("POST /v1/seal", handle(s, s.onSeal))
	mux.Handle("POST /v1/abort", handle(s, s.onAbort))
	mux.Handle("POST /v1/slots", handle(s, s.onSlots))
	mux.Handle("POST /v1/wait", handle(s, s.onWait))
	mux.Handle("POST /v1/load", handle(s, s.onLoad))
	mux.Handle("POST /v1/loaded", handle(s, s.onLoaded))
	mux.Handle("POST /v1/heartbeat", handle(s, func(context.Context, struct{}) (struct{}, error) { return struct{}{}, nil }))
	mux.Handle("POST /v1/leave", handle(s, s.onLeave))
	mux.Handle("POST /v1/hold_signals", handle(s, s.onHoldSignals))
	mux.Handle("POST /v1/release_signals", handle(s, s.onReleaseSignals))
	mux.Handle("POST /v1/signaled", handle(s, s.onSignaled))
	mux.Handle("POST "+ServicePath, s.service())
	s.meet(mux)
	s.http = &http.Server{Handler: mux, ConnContext: peer.Context, ReadHeaderTimeout: headerLimit, ConnState: s.conns.Track}
	go func() { s.done <- s.http.Serve(l) }()
	return s, nil
}

// finish takes no new connections, and returns when the requests of the others are
// answered, or with the error of ctx.
func (s *rankServer) finish(ctx context.Context) error {
	return errors.Join(s.listen.Close(), s.conns.Settle(ctx))
}

// close ends the server and all its requests.
func (s *rankServer) close() error {
	err := s.http.Close()
	if errors.Is(err, net.ErrClosed) { // by finish
		err = nil
	}
	if serr := <-s.done; !errors.Is(serr, http.ErrServerClosed) && !errors.Is(serr, net.ErrClosed) {
		err = errors.Join(err, serr)
	}
	return err
}

type rawHandler func(r *http.Request, body []byte) ([]byte, error)

// raw checks the token, reads the body and writes the reply or the problem.
func (s *rankServer) raw(h rawHandler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reply, err := s.serve(w, r, h)
		if err != nil {
			httpkit.Refuse(w, err)
			return
		}
		_, _ = w.Write(reply) // a disconnected client needs no reply
	})
}

// authorized checks that the caller has the token of this socket.
func (s *rankServer) authorized(r *http.Request) error {
	if !s.relayed && !httpkit.Authorized(r, s.token) {
		return problem.Errorf(problem.Unauthorized, "this socket belongs to rank %d of attempt %d: wrong token", s.rank, s.Number)
	}
	return nil
}

// begin admits a request, and counts it as a sign of life until the caller calls
// answered.
func (s *rankServer) begin(r *http.Request) (answered func(), err error) {
	if err := s.authorized(r); err != nil {
		return nil, err
	}
	op := path.Base(r.URL.Path)
	if err := s.admit(op); err != nil {
		return nil, err
	}
	return s.pulses.Begin(s.rank, op), nil
}

func (s *rankServer) serve(w http.ResponseWriter, r *http.Request, h rawHandler) ([]byte, error) {
	answered, err := s.begin(r)
	if err != nil {
		return nil, err
	}
	defer answered()
	body, err := httpkit.Read(w, r, maxBody)
	if err != nil {
		return nil, err
	}
	return h(r, body)
}

// handle is raw with JSON on both sides.
func handle[In, Out any](s *rankServer, h func(context.Context, In) (Out, error)) http.Handler {
	return s.raw(func(r *http.Request, body []byte) ([]byte, error) { return decoded(r, body, h) })
}

// decoded answers one request in JSON.
func decoded[In, Out any](r *http.Request, body []byte, h func(context.Context, In) (Out, error)) ([]byte, error) {
	in, err := httpkit.Decode[In](body)
	if err != nil {
		return nil, err
	}
	out, err := h(r.Context(), in)
	if err != nil {
		return nil, err
	}
	return json.Marshal(out)
}

func (s *rankServer) onHello(ctx context.Context, h client.Hello) (client.Context, error) {
	if !slices.Contains(h.Protocols, client.Protocol) {
		return client.Context{}, badRequest("the worker speaks protocol versions %v, this trainer speaks [%d]: upgrade the older of the two", h.Protocols, client.Protocol)
	}
	s.once.Do(func() { s.hello <- s.rank })
	if err := s.held(ctx); err != nil {
		return client.Context{}, err
	}
	return client.Context{
		Protocol: client.Protocol, Run: s.cfg.Run, Trial: s.cfg.Trial, Job: s.cfg.Job,
		Attempt: s.Number, Rank: s.rank, WorldSize: s.cfg.World(), Resume: s.Resume, Config: s.cfg.TrialConfig, Store: s.store.ID,
	}, nil
}

func (s *rankServer) onReport(ctx context.Context, r client.Report) (reply client.ReportReply, of handoff.Reported, err error) {
	metrics, err := s.fetch(r.Metrics)
	if err != nil {
		return reply, of, badRequest("%w", err)
	}
	r.Metrics = metrics
	if err := handoff.CheckMetrics(r.Metrics, s.cfg.World()); err != nil {
		return reply, of, badRequest("%w", err)
	}
	s.listens()
	of, err = s.handoff.Report(ctx, s.rank, r)
	if errors.Is(err, syscall.ENOSPC) {
		return reply, of, fmt.Errorf("metrics of step %d not recorded: %w", r.Step, err)
	}
	if problem.Given(err) {
		return reply, of, err
	}
	if err != nil {
		return reply, of, problem.Wrap(problem.Conflict, err)
	}
	return client.ReportReply{Stop: asked(of.Stop)}, of, nil
}

func (s *rankServer) onCollective(r *http.Request, body []byte) ([]byte, error) {
	op := r.PathValue("op")
	if op != "gather" && op != "broadcast" {
		return nil, problem.Errorf(problem.NotFound, "no request %q: the protocol has hello, heartbeat, report, should_stop, save, seal, slots, wait, load, loaded, leave, hold_signals, release_signals, signaled, gather, broadcast, send, recv, set and get", op)
	}
	seq, err := strconv.ParseUint(r.Header.Get(client.HeaderSeq), 10, 64)
	if err != nil {
		return nil, badRequest("header %s: %w", client.HeaderSeq, err)
	}
	root, hubOp := 0, collective.OpAllGather
	if op == "broadcast" {
		root, err = strconv.Atoi(r.Header.Get(client.HeaderRoot))
		if err != nil || root < 0 || root >= s.cfg.World() {
			return nil, badRequest("header %s is %q, want a rank below %d", client.HeaderRoot, r.Header.Get(client.HeaderRoot), s.cfg.World())
		}
		size, err := strconv.Atoi(r.Header.Get(client.HeaderSize))
		if err != nil || s.rank == root && size != len(body) {
			return nil, badRequest("header %s is %q for a part of %d bytes", client.HeaderSize, r.Header.Get(client.HeaderSize), len(body))
		}
		hubOp = collective.OpBroadcast(root, size)
	}
	ctx, cancel := s.store.calls.Timeout(r.Context(), s.cfg.Collective)
	defer cancel()
	parts, err := s.Hub.Exchange(ctx, s.rank, seq, hubOp, body)
	if err != nil {
		return nil, problem.Wrap(problem.Conflict, err)
	}
	if op == "broadcast" {
		parts = parts[root : root+1]
	}
	return client.EncodeParts(parts), nil
}

// ServicePath is the path prefix of the requests that [Config.Services] answers.
const ServicePath = "/v1/store/"

// service passes the workers' requests to the store to [Config.Services].
func (s *rankServer) service() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := s.authorized(r); err != nil {
			httpkit.Refuse(w, err)
			return
		}
		if s.cfg.Services == nil {
			httpkit.Refuse(w, problem.Errorf(problem.NotFound, "this trainer has no requests about the store: upgrade it"))
			return
		}
		defer s.pulses.Begin(s.rank, path.Base(r.URL.Path))()
		s.cfg.Services.ServeHTTP(w, s.called(r))
	})
}

// recordAsRank appends facts of this rank, in order and durably.
func (s *rankServer) recordAsRank(ctx context.Context, bodies ...events.Body) error {
	for i, b := range bodies {
		if p, ok := b.(*events.LocalPlan); ok {
			said, err := s.saver.claim(ctx, p)
			if err != nil {
				return err
			}
			bodies[i] = said
		}
	}
	if s.saver.joined != nil {
		for _, b := range bodies {
			if err := s.saver.joined.Record(ctx, s.rank, b); err != nil {
				return err
			}
		}
		return nil
	}
	return s.decisions.recordAs(ctx, s.decisions.trial, events.Rank(s.rank), bodies...)
}

// lost ends a rank's part in a save after the log refused one of its facts.
func (s *rankServer) lost(checkpoint string, err error) {
	if s.work.Err() != nil {
		return // the attempt is over, and so is every open save
	}
	s.saver.log.Error("append failed; the rank's save has failed", "checkpoint", checkpoint, "rank", s.rank, "error", err)
	if errors.Is(err, syscall.ENOSPC) {
		s.saver.full(checkpoint)
	}
	s.saver.reject(checkpoint, s.rank, err.Error())
	s.slots.Abort(checkpoint, s.rank)
	if err := s.saver.refuse(s.work, s.Number, checkpoint, s.rank, err); err != nil {
		s.saver.log.Error("append of write.failed failed", "checkpoint", checkpoint, "rank", s.rank, "error", err)
	}
}
