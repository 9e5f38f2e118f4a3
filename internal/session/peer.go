package session

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/handoff"
	"github.com/ckptstore/ckptstore/internal/session/heirs"
	"github.com/ckptstore/ckptstore/planner"
)

// Peer is the coordinating process of a group, as the process of another node sees
// it. The methods may be called concurrently.
type Peer interface {
	// Relay returns the handler of a local rank's requests that concern all ranks. It
	// passes them to [Group.Relayed] of the coordinating process, numbered by
	// [RelayHeader]. A request whose answer is lost is repeated.
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

// aborts tracks which nodes may still write files of aborted saves: nothing is removed
// under a writer. The files are removed in the background, since a disk may be slow.
type aborts struct {
	removing sync.WaitGroup

	mu      sync.Mutex
	nodes   map[int]bool            // of the group, without this one and those that are lost
	settled map[string]map[int]bool // by checkpoint: nodes that write no more of it
	sweeps  map[string]func()       // by checkpoint: to call once all have settled
}

// expect starts the tracking. The result is called with each aborted save and the
// removal of its files.
func (a *aborts) expect(group Nodes, self int) func(checkpoint string, sweep func()) {
	a.nodes, a.settled, a.sweeps = map[int]bool{}, map[string]map[int]bool{}, map[string]func(){}
	for node, ranks := range group {
		if node != self && len(ranks) > 0 {
			a.nodes[node] = true
		}
	}
	return func(checkpoint string, sweep func()) {
		a.change(func() { a.sweeps[checkpoint] = sweep })
	}
}

// change changes the state, and then has the files of the saves removed that no node
// writes to.
func (a *aborts) change(with func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	with()
	var due []func()
	for checkpoint, sweep := range a.sweeps {
		writes := func(node int) bool { return !a.settled[checkpoint][node] }
		if slices.ContainsFunc(slices.Collect(maps.Keys(a.nodes)), writes) {
			continue
		}
		delete(a.sweeps, checkpoint)
		delete(a.settled, checkpoint)
		due = append(due, sweep)
	}
	if len(due) > 0 {
		a.removing.Go(func() {
			for _, sweep := range due {
				sweep()
			}
		})
	}
}

// settle records that a node writes no more files of a save.
func (a *aborts) settle(node int, checkpoint string) {
	a.change(func() {
		if a.settled[checkpoint] == nil {
			a.settled[checkpoint] = map[int]bool{}
		}
		a.settled[checkpoint][node] = true
	})
}

// lose records that a node is lost, which writes no more.
func (a *aborts) lose(node int) { a.change(func() { delete(a.nodes, node) }) }

// over removes what is left, when no node writes any more, and waits for all removals.
func (a *aborts) over() {
	a.change(func() { clear(a.nodes) })
	a.removing.Wait()
}

// Settled records that a node writes no more files of an aborted save. It ignores a save that is unknown.
func (g *Group) Settled(node int, checkpoint string) {
	if g.saver.state(checkpoint, -1).State != "" {
		g.aborts.settle(node, checkpoint)
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
	g.aborts.lose(node)
	if g.meeting != nil {
		g.meeting.EndNode(node, why)
	}
	if g.saver.replicas != nil {
		return g.saver.loseNode(ctx, node, g.cfg.Nodes[node], why)
	}
	return g.saver.lose(ctx, g.cfg.Nodes[node], why)
}

// RelayHeader numbers a request that the process of another node relays: "N LOW". That
// process repeats a request under its number when the connection broke before the answer
// came, and has the answers of all lower numbers than LOW of that rank.
const RelayHeader = "Ckptstore-Relay"

// repeats keeps the answers to relayed requests that must not be served twice: a message
// arrives once, and a report counts once.
type repeats struct {
	mu  sync.Mutex
	all map[int]map[uint64]*answer // by rank and number
	low map[int]uint64             // by rank: all lower numbers have their answers
}

// answer is the answer to one request. It can be read once done is closed.
type answer struct {
	done   chan struct{}
	status int
	header http.Header
	body   bytes.Buffer
}

var _ http.ResponseWriter = (*answer)(nil)

// Header implements [http.ResponseWriter].
func (a *answer) Header() http.Header { return a.header }

// WriteHeader implements [http.ResponseWriter].
func (a *answer) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
}

// Write implements [http.ResponseWriter].
func (a *answer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return a.body.Write(p)
}

// take returns the answer of a number, and whether this call is the first to ask for it.
func (r *repeats) take(rank int, n, low uint64) (a *answer, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all, r.low = map[int]map[uint64]*answer{}, map[int]uint64{}
	}
	if n < r.low[rank] {
		return nil, false // a late copy: the rank has the answer
	}
	r.low[rank] = max(r.low[rank], low)
	of := r.all[rank]
	if of == nil {
		of = map[uint64]*answer{}
		r.all[rank] = of
	}
	for old := range of {
		if old < low {
			delete(of, old)
		}
	}
	if of[n] == nil {
		of[n], first = &answer{done: make(chan struct{}), header: http.Header{}}, true
	}
	return of[n], first
}

// exactlyOnce serves a relayed request once, however often it is repeated. The request does not
// end with the connection that brought it, but with the attempt.
func (s *rankServer) exactlyOnce(do http.Handler) http.Handler {
	if !s.relayed {
		return do
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var n, low uint64
		if _, err := fmt.Sscan(r.Header.Get(RelayHeader), &n, &low); err != nil {
			httpkit.Refuse(w, badRequest("header %s: %w", RelayHeader, err))
			return
		}
		body, err := httpkit.Read(w, r, maxBody)
		if err != nil {
			httpkit.Refuse(w, err)
			return
		}
		a, first := s.repeats.take(s.rank, n, low)
		if a == nil {
			httpkit.Refuse(w, problem.Errorf(problem.Gone, "request %d was answered", n))
			return
		}
		if first {
			ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
			stop := context.AfterFunc(s.work, cancel)
			again := r.Clone(ctx)
			again.Body = io.NopCloser(bytes.NewReader(body))
			go func() {
				defer close(a.done)
				defer cancel()
				defer stop()
				do.ServeHTTP(a, again)
				a.WriteHeader(http.StatusOK)
			}()
		}
		select {
		case <-a.done:
		case <-r.Context().Done():
			return
		}
		for name, values := range a.header {
			w.Header()[name] = values
		}
		w.WriteHeader(a.status)
		_, _ = w.Write(a.body.Bytes()) // without an answer, the request is repeated
	})
}

// Forwarder passes to the processes of a group's other nodes what they must know of its
// saves. The methods must not block; each process gets what was passed in the same order.
type Forwarder interface {
	// Event passes on an event of the log: see [Group.Heard].
	Event(Forwarded)
	// Ask asks for the plan of a rank: see [Group.Asked].
	Ask(checkpoint string, rank int)
}

// Forwarded is an event of the log, as the coordinating process forwards it.
type Forwarded struct {
	Attempt  int            `json:"attempt"`
	Sequence uint64         `json:"sequence"`
	Event    events.Message `json:"event"`
}

// forwarded has the kinds of events that concern the ranks of all nodes.
var forwarded = map[events.Kind]bool{
	(events.GlobalPlan{}).Kind():          true,
	(events.CheckpointBegun{}).Kind():     true,
	(events.CheckpointStaged{}).Kind():    true,
	(events.CheckpointCommitted{}).Kind(): true,
	(events.CheckpointAborted{}).Kind():   true,
}

// feed is what the saver of a node that does not coordinate reads in place of the log: the
// events that the coordinating process forwards, and the facts that this process has
// appended. If every process read the whole trial, a save would cost the square of the
// number of nodes.
type feed struct {
	trial string

	mu    sync.Mutex
	queue []fed
	ended bool          // it is not read any more
	came  chan struct{} // has a value if the queue has
}

// fed is an event, a question about the plan of a rank, an order to write replicas, or a mark.
type fed struct {
	event  events.Recorded
	ask    *planner.Ask
	adopt  *adoption
	folded chan struct{} // closed once all that was put before is folded
}

func newFeed(trial string) *feed { return &feed{trial: trial, came: make(chan struct{}, 1)} }

func (f *feed) put(of fed) {
	f.mu.Lock()
	if !f.ended {
		f.queue = append(f.queue, of)
	}
	f.mu.Unlock()
	select {
	case f.came <- struct{}{}:
	default:
	}
}

// appended puts facts that the log has taken.
func (f *feed) appended(facts []events.Fact, sequences []uint64) {
	for i, fact := range facts {
		switch fact.Kind.Family() {
		case "plan", "seal", "write":
			if fact.Scope.Trial == f.trial {
				f.put(fed{event: events.Recorded{Event: fact.Event, Sequence: sequences[i]}})
			}
		}
	}
}

// end drops what comes from now on.
func (f *feed) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queue, f.ended = nil, true
}

// next waits for what was put.
func (f *feed) next(ctx context.Context) ([]fed, error) {
	select {
	case <-f.came:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	of := f.queue
	f.queue = nil
	return of, nil
}

// Heard takes an event that the coordinating process has forwarded.
func (g *Group) Heard(of Forwarded) error {
	if last := g.heard.Load(); of.Sequence <= last && last > 0 {
		return nil // an earlier coordinator has forwarded it
	}
	g.heard.Store(of.Sequence)
	e, err := events.Decode(of.Event)
	if err == nil {
		g.saver.feed.put(fed{event: events.Recorded{Event: e, Sequence: of.Sequence}})
	}
	return err
}

// LastHeard returns the sequence of the last event that the coordinating process has forwarded.
func (g *Group) LastHeard() uint64 { return g.heard.Load() }

// Fold waits until all that the coordinating process has forwarded so far is folded, the
// saves have ended, or ctx has.
func (g *Group) Fold(ctx context.Context) {
	mark := make(chan struct{})
	g.saver.feed.put(fed{folded: mark})
	select {
	case <-mark:
	case <-g.saver.idle:
	case <-ctx.Done():
	}
}

// Asked takes a question of the coordinating process, which does not know the plan of a
// local rank by its fingerprint: the plan is appended in full.
func (g *Group) Asked(checkpoint string, rank int) {
	g.saver.feed.put(fed{ask: &planner.Ask{Checkpoint: checkpoint, Rank: rank}})
}

// lastBlobs remembers the last blobs that were read: the layout of most saves is that of an
// earlier one. It is not for concurrent use.
type lastBlobs struct {
	Blobs
	last []lastBlob
}

type lastBlob struct {
	of   events.Blob
	data []byte
}

// Get implements [Blobs].
func (b *lastBlobs) Get(ctx context.Context, of events.Blob) ([]byte, error) {
	for _, l := range b.last {
		if l.of.Digest == of.Digest && l.of.Size == of.Size {
			return l.data, nil
		}
	}
	data, err := b.Blobs.Get(ctx, of)
	if err == nil {
		b.last = append(b.last[max(0, len(b.last)-planSets+1):], lastBlob{of, data})
	}
	return data, err
}
