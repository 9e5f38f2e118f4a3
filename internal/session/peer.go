package session

import (
	"context"
	"net/http"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/handoff"
	"github.com/ckptstore/ckptstore/internal/session/heirs"
)

// Peer is the coordinating process of a group, as the process of another node sees
// it. The methods may be called concurrently.
type Peer interface {
	// Relay returns the handler of a local rank's requests that concern all ranks. It
	// passes them to [Group.Relayed] of the coordinating process, numbered by
	// the header of package dedup. A request whose answer is lost is repeated.
	Relay(rank int) http.Handler
	// Abort asks for the abort of a save because of ranks of this node, whose facts
	// the log refuses.
	Abort(ctx context.Context, checkpoint, reason string, ranks []int) error
	// Settled records that this node writes no more files of an aborted save. It must
	// not block.
	Settled(checkpoint string)
	// Adopted answers an order to write a lost node's part of a save. It must not block.
	Adopted(heirs.Reply)
	// Request makes a request of a local rank to the coordinating process, such as one
	// below [ServicePath].
	Request(ctx context.Context, rank int, path string, in, out any) error
}

// Relayed returns the handler of the requests that the process of another node relays
// for one of its ranks. The caller has checked that the request comes from that node.
func (g *Group) Relayed(rank int) http.Handler {
	s := &rankServer{Group: g, rank: rank, relayed: true}
	mux := http.NewServeMux()
	s.meet(mux)
	mux.Handle("POST "+ServicePath, s.service())
	return mux
}

// meet registers the requests that concern all ranks: the coordinating process serves
// them, and every other one relays them.
func (s *rankServer) meet(mux *http.ServeMux) {
	if s.Peer != nil {
		relay := s.relay(http.MaxBytesHandler(s.Peer.Relay(s.rank), maxBody))
		for _, op := range []string{"report", "should_stop", "send", "recv", "set", "get", "gather", "broadcast"} {
			mux.Handle("POST /v1/"+op, relay)
		}
		return
	}
	mux.Handle("POST /v1/report", s.exactlyOnce(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.raw(func(r *http.Request, body []byte) ([]byte, error) {
			return decoded(r, handoff.QuoteNonFinite(body), func(ctx context.Context, in client.Report) (client.ReportReply, error) {
				reply, of, err := s.onReport(ctx, in)
				if err == nil && s.relayed {
					w.Header().Set(ReportedHeader, of.String())
				}
				return reply, err
			})
		}).ServeHTTP(w, r)
	})))
	mux.HandleFunc("POST /v1/should_stop", func(w http.ResponseWriter, r *http.Request) {
		handle(s, func(context.Context, struct{}) (client.StopReply, error) {
			reply, request := s.onShouldStop()
			if s.relayed && request != "" {
				w.Header().Set(RequestHeader, request)
			}
			return reply, nil
		}).ServeHTTP(w, r)
	})
	s.serveMessages(mux)
	mux.Handle("POST /v1/{op}", s.raw(s.onCollective))
}

// relay checks a request as [rankServer.serve] does, and passes it on.
func (s *rankServer) relay(to http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answered, err := s.begin(r)
		if err != nil {
			httpkit.Refuse(w, err)
			return
		}
		defer answered()
		to.ServeHTTP(w, r)
	})
}

// Settled records that a node writes no more files of an aborted save. It ignores a save that is unknown.
func (g *Group) Settled(node int, checkpoint string) {
	if g.saver.state(checkpoint, -1).State != "" {
		g.writers.Settle(node, checkpoint)
	}
}

// Abort aborts a save at the request of the process of another node: see [Peer].
func (g *Group) Abort(ctx context.Context, checkpoint, reason string, ranks []int) error {
	if g.saver.state(checkpoint, -1).State == "" {
		return problem.Errorf(problem.NotFound, "no open save %s in attempt %d", checkpoint, g.Number)
	}
	return g.saver.abort(ctx, g.Number, checkpoint, reason, ranks...)
}

// Lost ends the part of a node that is silent or has been replaced: what its ranks have
// sealed and not written is lost with its memory, or written from its replica. The caller
// reports its ranks as gone.
func (g *Group) Lost(ctx context.Context, node int, why error) error {
	g.writers.Lose(node)
	if g.meeting != nil {
		g.meeting.EndNode(node, why)
	}
	if g.saver.replicas != nil {
		return g.saver.loseNode(ctx, node, g.cfg.Nodes[node], why)
	}
	return g.saver.lose(ctx, g.cfg.Nodes[node], why)
}

// exactlyOnce serves a relayed request once. A rank on this node repeats none.
func (s *rankServer) exactlyOnce(do http.Handler) http.Handler {
	if !s.relayed {
		return do
	}
	return s.relays.Once(s.work, s.rank, maxBody, do)
}
