package restore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// Meeting decides the loads of an attempt whose ranks live on several nodes. It lives
// on the coordinating node, which alone may append decisions, and numbers all loads,
// also those of ranks on one node.
//
// Each node first asks for the checkpoint of a load, by Resolve, and then reports what
// it has read, by Done. A load is complete when every node with participants has
// reported, and has failed for all of them when one has failed. Both calls may be
// repeated: until the same ranks have begun keptLoads more loads, each has the same reply.
// All methods may be called concurrently.
type Meeting struct {
	cfg   Config
	limit time.Duration
	nodes [][]int         // ranks on each node, ascending
	work  context.Context // ends with Close
	stop  context.CancelFunc

	mu      sync.Mutex
	loads   map[loadOf]*gathering
	past    map[string]int // by participants: how many of their loads are forgotten, see forget
	made    int
	over    error         // why no further load can be complete
	lost    map[int]error // nodes that are gone, and why
	closed  bool
	running sync.WaitGroup // loads being resolved or recorded
}

// NewMeeting returns the meeting of an attempt. nodes lists the ranks on each node.
// limit bounds how long nodes wait for each other. Of cfg, it takes neither the arenas
// nor what else concerns a single node.
func NewMeeting(cfg Config, nodes [][]int, limit time.Duration) *Meeting {
	m := &Meeting{cfg: cfg, limit: limit, loads: map[loadOf]*gathering{}, past: map[string]int{}, lost: map[int]error{}}
	for _, ranks := range nodes {
		m.nodes = append(m.nodes, slices.Sorted(slices.Values(ranks)))
	}
	m.work, m.stop = context.WithCancel(cfg.Work)
	return m
}

// After has the next load get the number after n: an earlier meeting of the attempt has numbered
// that many. It is called before the first load.
func (m *Meeting) After(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.made = n
}

// Local returns the coordinator for the loader of the coordinating node itself. It
// passes checkpoints on that are open already.
func (m *Meeting) Local(node int) Coordinator { return here{m, node} }

type here struct {
	m    *Meeting
	node int
}

var _ Coordinator = here{}

func (h here) Resolve(ctx context.Context, req ResolveRequest) (ResolveReply, error) {
	return h.m.resolve(ctx, h.node, req)
}

func (h here) Share(ctx context.Context, req ShareRequest) (ShareReply, error) {
	return h.m.Share(ctx, h.node, req)
}

func (h here) Done(ctx context.Context, req DoneRequest) (DoneReply, error) {
	return h.m.Done(ctx, h.node, req)
}

// Resolve answers a node: see [Coordinator]. It returns the error of ctx if that ends
// first, and a [MisuseError] if the request does not fit the group.
func (m *Meeting) Resolve(ctx context.Context, node int, req ResolveRequest) (ResolveReply, error) {
	reply, err := m.resolve(ctx, node, req)
	reply.opened = nil // a reader belongs to one node
	return reply, err
}

func (m *Meeting) resolve(ctx context.Context, node int, req ResolveRequest) (ResolveReply, error) {
	m.mu.Lock()
	g, err := m.join(node, req)
	m.mu.Unlock()
	if err != nil {
		return ResolveReply{}, err
	}
	select {
	case <-g.resolved:
	case <-ctx.Done():
		return ResolveReply{}, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return g.reply, nil
}

// join adds the ranks of a node to a load. The last rank starts the resolution. The
// caller holds the lock.
func (m *Meeting) join(node int, req ResolveRequest) (*gathering, error) {
	g, err := m.find(node, req.Key)
	if err != nil {
		return nil, err
	}
	for _, a := range req.Asks {
		if !slices.Contains(g.parts[node], a.Rank) {
			return nil, &MisuseError{fmt.Errorf("rank %d does not take part in the load, or is not on node %d", a.Rank, node)}
		}
	}
	if g.n == 0 {
		m.begin(g)
	}
	if !g.open() {
		return g, nil
	}
	for _, a := range req.Asks {
		if a.Refused != "" {
			m.refuse(g, refusal(g.n, a.Rank, a.Refused))
			return g, nil
		}
		g.asked[a.Rank] = a
	}
	for _, key := range req.FQNs {
		g.fqns[key] = true
	}
	if len(g.asked) == g.world {
		g.resolving = true
		g.unwatch()
		m.running.Go(func() { m.decide(g) })
	}
	return g, nil
}

// find returns the load that a node means; before the node that comes first has begun
// it, it is a new one without a number. The caller holds the lock.
func (m *Meeting) find(node int, key Key) (g *gathering, err error) {
	of := loadOf{n: key.N}
	if len(key.Participants) > 0 {
		of.with = fmt.Sprint(key.Participants)
	}
	if of.n < 1 {
		return nil, &MisuseError{fmt.Errorf("load %d: loads of the same ranks are numbered from 1", of.n)}
	}
	if of.n <= m.past[of.with] {
		return nil, &ConflictError{fmt.Errorf("load %d of the same ranks has ended long ago", of.n)}
	}
	if g = m.loads[of]; g == nil {
		g, err = m.newGathering(of, key.Participants)
	}
	if err == nil && (node < 0 || node >= len(m.nodes) || len(g.parts[node]) == 0) {
		err = &MisuseError{fmt.Errorf("node %d has no rank among the participants", node)}
	}
	return g, err
}

// begin numbers a load, unless no further load can be complete. The caller holds the
// lock.
func (m *Meeting) begin(g *gathering) {
	if m.over != nil {
		m.refuse(g, &ConflictError{m.over})
		return
	}
	m.made++
	g.n = m.made
	m.loads[g.of] = g
	m.forget(g.of)
	m.watch(g, func(err error) {
		if g.open() {
			m.refuse(g, uncalled(g.n, g.absent(), err))
		}
	})
}

// keptLoads is how many loads of the same ranks are known at a time. A rank begins a load when the one before
// is answered or abandoned, so few requests about the last ones can still come.
const keptLoads = 16

// forget forgets loads before the last ones of the same ranks, up to the first that has not ended. The caller holds
// the lock.
func (m *Meeting) forget(newest loadOf) {
	past := newest.n - keptLoads
	for of, g := range m.loads {
		if of.with == newest.with && of.n <= past && !g.over() {
			past = of.n - 1
		}
	}
	if past <= m.past[newest.with] {
		return
	}
	m.past[newest.with] = past
	maps.DeleteFunc(m.loads, func(of loadOf, _ *gathering) bool { return of.with == newest.with && of.n <= past })
}

// watch limits a wait of nodes for each other. late is called with the lock held. The
// caller holds the lock.
func (m *Meeting) watch(g *gathering, late func(err error)) {
	wait, cancel := m.cfg.bounded(m.work, m.limit)
	stop := context.AfterFunc(wait, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		late(wait.Err())
	})
	g.unwatch = func() {
		stop()
		cancel()
	}
}

// refuse ends a load that is not resolved. The caller holds the lock.
func (m *Meeting) refuse(g *gathering, why error) {
	g.unwatch()
	g.reply = ResolveReply{Load: g.n, Failure: m.cfg.failure(why)}
	g.asked, g.fqns = nil, nil
	close(g.resolved)
}

// decide resolves a load that all participants have asked for.
func (m *Meeting) decide(g *gathering) {
	asks := slices.SortedFunc(maps.Values(g.asked), func(a, b Ask) int { return a.Rank - b.Rank })
	at, err := m.cfg.resolve(m.work, g.n, asks, g.fqns)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		m.refuse(g, &ConflictError{err})
		return
	}
	g.asked, g.fqns = nil, nil
	g.took = events.Seconds(at.took)
	g.reply = ResolveReply{Load: g.n, Checkpoint: at.ckpt, Unread: at.unread, Verifies: at.verifies, opened: &at}
	close(g.resolved)
	for node, why := range m.lost {
		m.miss(g, node, why)
	}
	if m.closed {
		m.fail(g, &ConflictError{errOver})
	}
}

// Done takes the outcome of a load from a node: see [Coordinator]. It returns the error
// of ctx if that ends first, and a [MisuseError] if the request does not fit the group
// or the load is not resolved.
func (m *Meeting) Done(ctx context.Context, node int, req DoneRequest) (DoneReply, error) {
	m.mu.Lock()
	g, err := m.report(node, req)
	m.mu.Unlock()
	if err != nil {
		return DoneReply{}, err
	}
	select {
	case <-g.ended:
		return DoneReply{Failure: g.failure}, nil
	case <-ctx.Done():
		return DoneReply{}, ctx.Err()
	}
}

// report adds the outcome of a node to a load. The last one ends it, as does a failure.
// The caller holds the lock.
func (m *Meeting) report(node int, req DoneRequest) (*gathering, error) {
	g, err := m.find(node, req.Key)
	if err != nil {
		return nil, err
	}
	ranks := make([]int, len(req.Parts))
	for i, p := range req.Parts {
		ranks[i] = p.Rank
	}
	switch _, again := g.reports[node]; {
	case g.failedUnresolved():
		return &gathering{ended: g.resolved, failure: g.reply.Failure}, nil
	case !g.isResolved():
		return nil, &MisuseError{fmt.Errorf("node %d reports a load that is not resolved", node)}
	case req.Failure == nil && !slices.Equal(ranks, g.parts[node]):
		return nil, &MisuseError{fmt.Errorf("node %d reports ranks %v of load %d, which has ranks %v there", node, ranks, g.n, g.parts[node])}
	case again || g.ending:
		return g, nil
	}
	g.reports[node] = req.Report
	switch {
	case req.Failure != nil:
		m.fail(g, fmt.Errorf("node %d (ranks %v): %w", node, g.parts[node], req.Failure.Err()))
	case len(g.reports) == g.present:
		m.conclude(g, nil)
	case len(g.reports) == 1:
		m.watch(g, func(err error) {
			m.fail(g, fmt.Errorf("load %d is a collective, and ranks %v have not confirmed their part: %w", g.n, g.unreported(), err))
		})
	}
	return g, nil
}

// fail ends a load that is resolved with a failure. The caller holds the lock.
func (m *Meeting) fail(g *gathering, why error) {
	if !g.ending {
		m.conclude(g, why)
	}
}

// conclude records the outcome of a load, and then reports it to all nodes. The caller
// holds the lock.
func (m *Meeting) conclude(g *gathering, why error) {
	g.ending = true
	g.unwatch()
	g.sharing.divide(m.cfg.Peer) // of nodes that still wait
	if m.closed {
		g.end(m.cfg.failure(why)) // the log has the end of the attempt
		return
	}
	ckpt, unread, sum := g.reply.Checkpoint.ID, g.reply.Unread, g.sum()
	sum.Resolve = g.took
	m.running.Go(func() {
		if why == nil {
			why = m.cfg.completed(m.cfg.Work, g.n, ckpt, unread, sum)
		}
		var failure *Failure
		if why != nil {
			failure = m.cfg.failure(errors.Join(why, m.cfg.failed(g.n, ckpt, why)))
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		g.end(failure)
	})
}

// End releases the nodes that wait for a rank whose process has ended.
func (m *Meeting) End(why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.endOpen(why)
}

func (m *Meeting) endOpen(why error) {
	m.over = why
	for _, g := range m.loads {
		if g.open() {
			m.refuse(g, &ConflictError{why})
		}
	}
}

// EndNode releases the nodes that wait for a node that is gone, with all its ranks.
func (m *Meeting) EndNode(node int, why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lost[node] = why
	m.endOpen(why)
	for _, g := range m.loads {
		m.miss(g, node, why)
	}
}

// miss fails a load that lacks the report of a node that is gone. The caller holds the
// lock.
func (m *Meeting) miss(g *gathering, node int, why error) {
	if _, reported := g.reports[node]; reported || len(g.parts[node]) == 0 || !g.isResolved() || g.reply.Failure != nil {
		return
	}
	m.fail(g, &ConflictError{fmt.Errorf("load %d is a collective, and node %d (ranks %v) is gone: %w", g.n, node, g.parts[node], why)})
}

// Close ends the wait of all nodes. It returns false if the work for a load does not
// end within limit.
func (m *Meeting) Close(limit time.Duration) bool {
	m.mu.Lock()
	m.closed = true
	m.endOpen(errOver)
	for _, g := range m.loads {
		g.unwatch()
		if g.isResolved() && g.reply.Failure == nil {
			m.fail(g, &ConflictError{errOver})
		}
	}
	m.mu.Unlock()
	m.stop()
	return ended(&m.running, limit)
}
