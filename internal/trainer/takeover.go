package trainer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/logpeers"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
)

// errSucceed reports that the coordinator is silent and that this node is next to
// coordinate.
var errSucceed = errors.New("the coordinating node is silent; this node is next")

// errOver reports that this node has coordinated the job to its end, which its own part of it has not
// heard.
var errOver = errors.New("the job has ended under this node")

// Times of a takeover.
const (
	succeedPoll = 500 * time.Millisecond
	// succeedTurn is how long a peer of the log leaves the one before it to take over.
	succeedTurn = time.Minute
	// succeedWait bounds the wait for the lease of the coordinator that is gone.
	succeedWait = 90 * time.Second
)

// successor follows what happens to the coordinator of a job whose log has copies.
type successor struct {
	store   string
	me      int // index of this node in the job's command line; logpeers.Copies without one
	log     *slog.Logger
	carrier *launch.Carrier // of this node's part of a group; nil: no group outlives its coordinator
	heir    *heir           // coordinates a living group; nil as carrier
}

// heir coordinates the living group of a job in place of a coordinator that is gone, next to this
// node's part of the group.
type heir struct {
	beside bool // a node of the job takes no ranks

	mu         sync.Mutex
	coordinate func(at string) (took bool, err error) // in place of the coordinator there; took: the log has this one
	done       chan struct{}                          // closed when it coordinates no more; nil: it does not
	err        error                                  // valid once closed
}

// by sets how to coordinate from now on.
func (h *heir) by(coordinate func(at string) (took bool, err error)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.coordinate = coordinate
}

// take starts to coordinate, unless this node does. failed is called if it could not, or if another
// node coordinates in its place by now: it may take over later.
func (h *heir) take(at string, failed func(error)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.done != nil {
		return
	}
	done, coordinate := make(chan struct{}), h.coordinate
	h.done = done
	go func() {
		took, err := coordinate(at)
		h.mu.Lock()
		if err != nil && !took || errors.Is(err, session.ErrOvertaken) {
			h.done = nil
			failed(err)
		}
		h.err = err
		h.mu.Unlock()
		close(done)
	}()
}

// wait waits until this node coordinates no more. It returns false if it does not.
func (h *heir) wait() (coordinated bool, err error) {
	h.mu.Lock()
	done := h.done
	h.mu.Unlock()
	if done == nil {
		return false, nil
	}
	<-done
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.done == done, h.err
}

// active reports whether this node coordinates, or tries to.
func (h *heir) active() bool {
	if h == nil {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.done != nil
}

// over reports whether this node has coordinated until the job ended.
func (h *heir) over() bool {
	if h == nil {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.done: // a nil one is not closed
		return true
	default:
		return false
	}
}

// lives reports whether the group lives, so that it can be continued.
func (s successor) lives() bool { return s.carrier != nil && s.carrier.Lives() }

// watch ends a link whose coordinator is gone: with [nodes.ErrRestarted] when another one
// is announced and answers, and with [errSucceed] when it is this node's turn.
func (s successor) watch(ctx context.Context, link *nodes.Link, job string) {
	was, err := logpeers.ReadCoordinator(s.store)
	if err != nil || was.Job != job {
		was = logpeers.Coordinator{Job: job}
	}
	tick := time.NewTicker(succeedPoll)
	defer tick.Stop()
	var since time.Time // of the silence
	var tried time.Time // when this node last began to take over
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		case <-link.Done():
			return
		}
		select {
		case <-link.Silent():
		default:
			since = time.Time{}
			continue
		}
		if since.IsZero() {
			since = time.Now()
		}
		now, err := logpeers.ReadCoordinator(s.store)
		if err != nil {
			s.log.Debug("coordinator not read", "error", err)
			continue
		}
		if s.carrier != nil && now.Job == job && now.Endpoint != link.Endpoint() && answers(ctx, s.store, now) {
			if err := link.Move(ctx, now.Endpoint, s.carrier.Inventory); err != nil {
				s.log.Warn("new coordinator not joined yet", "endpoint", now.Endpoint, "error", err)
			}
			was, since = now, time.Time{}
			continue
		}
		if now.Job != "" && now.Job != job && answers(ctx, s.store, now) {
			link.Abandon(fmt.Errorf("%w: job %s at %s", nodes.ErrRestarted, now.Job, now.Endpoint))
			return
		}
		turn := was.Turn(s.me)
		if turn >= 0 && time.Since(since) > link.Timeout()/2+time.Duration(turn)*succeedTurn {
			if s.heir.over() {
				link.Abandon(errOver)
				return
			}
			if s.heir.active() {
				continue
			}
			if s.lives() {
				if time.Since(tried) > link.Timeout()/2 {
					tried = time.Now()
					s.heir.take(link.Endpoint(), func(err error) { s.log.Warn("not taking over", "because", err) })
				}
				continue
			}
			link.Abandon(errSucceed)
			return
		}
	}
}

// answers reports whether a coordinator answers at its endpoint. A connection alone proves
// nothing: the system accepts it for a process that is frozen.
func answers(ctx context.Context, dir string, c logpeers.Coordinator) bool {
	_, err := nodes.Invitation{Job: c.Job, Host: c.Endpoint, Addresses: []string{c.Endpoint}}.Reach(ctx, joinDir(dir))
	return err == nil
}

// elsewhere returns where the job's nodes meet now: at another endpoint than at, if the
// coordinator there was replaced.
func (o runOptions) elsewhere(ctx context.Context, at string) string {
	if o.logReplicas == 1 {
		return at
	}
	now, err := logpeers.ReadCoordinator(o.store)
	if err == nil && now.Endpoint != "" && now.Endpoint != at && answers(ctx, o.store, now) {
		return now.Endpoint
	}
	return at
}

// errMoved reports that the nodes of the job meet at another endpoint by now.
var errMoved = errors.New("the job has another coordinator")

// errHere reports that the endpoint is an address of this node, which was not known
// when the node began to join: name servers may learn a name after its machine has
// started.
var errHere = errors.New("the endpoint is an address of this node")

// herePoll is how often a node that joins looks whether the endpoint is its own.
const herePoll = time.Second

// unlessMoved returns a context that ends with [errMoved] when the nodes meet elsewhere,
// and with [errHere] when the endpoint becomes an address of this node where no process
// listens.
func (o runOptions) unlessMoved(ctx context.Context, at string) (context.Context, context.CancelFunc) {
	joining, cancel := context.WithCancelCause(ctx)
	go func() {
		tick := time.NewTicker(herePoll)
		defer tick.Stop()
		// If it is here already, another trainer of this machine coordinates.
		for here := nodes.IsHere(joining, at); !here; {
			select {
			case <-tick.C:
			case <-joining.Done():
				return
			}
			if here = nodes.IsHere(joining, at); here && !taken(joining, at) {
				cancel(errHere)
			}
		}
	}()
	if o.logReplicas != 1 {
		go func() {
			tick := time.NewTicker(succeedPoll)
			defer tick.Stop()
			for o.elsewhere(joining, at) == at {
				select {
				case <-tick.C:
				case <-joining.Done():
					return
				}
			}
			cancel(errMoved)
		}()
	}
	return joining, func() { cancel(nil) }
}

// succeed coordinates in place of a coordinator that is gone, at this node's own address.
// It returns a [store.RunningError] if that one holds the run and answers again.
func (o runOptions) succeed(ctx context.Context, cfg launch.Config, n placement, job, at string) error {
	_, port, err := net.SplitHostPort(at)
	if err != nil {
		return err
	}
	o.succeeding = &logpeers.Coordinator{Job: job, Endpoint: at}
	cfg.Logger.Warn("coordinating node is gone; taking over", "endpoint", at)
	return o.coordinate(ctx, cfg, n, net.JoinHostPort(o.peerAddress, port))
}

// inherit coordinates the living group of a job in place of a coordinator that is gone. took is
// whether the log has this node as coordinator: before that, another node may take over.
func (o runOptions) inherit(ctx context.Context, cfg launch.Config, n placement, at string) (took bool, err error) {
	_, port, err := net.SplitHostPort(at)
	if err != nil {
		return false, err
	}
	o.succeeding, o.living = &logpeers.Coordinator{Job: cfg.Job, Endpoint: at}, "the coordinating node at "+at+" is silent"
	o.web.Address = "" // this process serves it already
	cfg.Standby, cfg.Peers, cfg.Nodes, cfg.Node = true, nil, session.OneNode(0), 0
	cfg.Requests = make(chan launch.StopRequest) // this node's part passes them on
	cfg.Logger.Warn("coordinating node is gone; continuing its group", "endpoint", at)
	cfg.Logger = cfg.Logger.With("as", "coordinator") // this node's part logs too
	o.took = &took
	err = o.coordinate(ctx, cfg, n, net.JoinHostPort(o.peerAddress, port))
	return took, err
}

// awaitName waits until the name of a server of the store is known, for --wait at most: in a
// container, names may be unknown at first. Opening the store reports what is wrong then.
func (o runOptions) awaitName(ctx context.Context, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, o.wait)
	defer cancel()
	for warned := false; store.IsURL(o.store); warned = true {
		var unknown error
		for server := range strings.SplitSeq(o.store, ",") {
			if !strings.Contains(server, "://") { // of a list, servers after the first may lack it
				server = "nats://" + server
			}
			u, err := url.Parse(server)
			if err != nil {
				return
			}
			if _, err = net.DefaultResolver.LookupHost(ctx, u.Hostname()); err == nil {
				return
			}
			unknown = err
		}
		if !warned {
			log.Warn("name of the store's server is unknown; waiting for it", "at_most", o.wait, "error", unknown)
		}
		select {
		case <-time.After(succeedPoll):
		case <-ctx.Done():
			return
		}
	}
}

// answerNotice is how long a node waits for the log of a store that it opens before it logs that.
const answerNotice = 15 * time.Second

// open opens the store of a job, when the name of its server is known. A node waits for a
// majority of the log's copies for as long as a job waits for its nodes. A node that takes over
// returns [errTaken] if a coordinator answers meanwhile.
func (o runOptions) open(ctx context.Context, with store.Options) (*store.Store, error) {
	o.awaitName(ctx, with.Logger)
	if o.logReplicas == 1 {
		return store.Open(ctx, with)
	}
	var warned sync.Once
	warn := func(err error) {
		warned.Do(func() {
			with.Logger.Warn("log does not answer; waiting for a majority of its copies", "at_most", o.endpointWait, "error", err)
		})
	}
	limit, cancel := context.WithTimeout(ctx, o.endpointWait)
	defer cancel()
	for {
		// A copy that led the log before the others were lost answers for a while: the log is then
		// open, and a read of it waits.
		late := time.AfterFunc(answerNotice, func() { warn(fmt.Errorf("the store is not open after %v", answerNotice)) })
		st, err := store.Open(limit, with)
		late.Stop()
		if err == nil || !unanswered(err) || limit.Err() != nil {
			return st, err
		}
		if o.succeeding != nil && o.elsewhere(ctx, "") != "" {
			return nil, errTaken
		}
		warn(err)
		select {
		case <-time.After(succeedPoll):
		case <-limit.Done():
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			return nil, err
		}
	}
}

// unanswered reports whether an error is that of a log without a majority.
func unanswered(err error) bool {
	return slices.ContainsFunc(system.Kinds(err), func(k problem.Kind) bool { return k == problem.Late || k == problem.Unavailable })
}

// outlast takes the lease of the run when its holder, which coordinated before, has let it
// expire. It waits for a log that does not answer as long as a job waits for its nodes. It returns a
// [holding] of that lease, or [errTaken] if a coordinator answers while the log does not: that one, or another node
// that has taken over meanwhile. Of several calls of release, the first counts.
func (o runOptions) outlast(ctx context.Context, st *store.Store, cfg launch.Config) (_ holding, release func() error, err error) {
	began := time.Now()
	tick := time.NewTicker(succeedPoll) // the request below takes its time from it
	defer tick.Stop()
	for {
		held, release, err := st.HoldRun(ctx, cfg.Run, cfg.Job)
		if err == nil {
			release = sync.OnceValue(release)
			return func(context.Context, *store.Store, launch.Config) (context.Context, func() error, error) {
				return held, release, nil
			}, release, nil
		}
		limit := succeedWait
		running := errors.As(err, new(*store.RunningError))
		if !running {
			if limit = o.endpointWait; !unanswered(err) {
				return nil, nil, err
			}
		}
		coordinated := o.coordinated(ctx)
		if coordinated && !running {
			return nil, nil, errors.Join(errTaken, err)
		}
		if coordinated || time.Since(began) > limit {
			return nil, nil, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		}
	}
}

// coordinated reports whether a coordinator answers: the process that this node would succeed, or another that is announced.
func (o runOptions) coordinated(ctx context.Context) bool {
	ask := []logpeers.Coordinator{*o.succeeding}
	if now, err := logpeers.ReadCoordinator(o.store); err == nil && (now.Job != ask[0].Job || now.Endpoint != ask[0].Endpoint) {
		ask = append(ask, now)
	}
	return slices.ContainsFunc(ask, func(c logpeers.Coordinator) bool {
		asking, cancel := context.WithTimeout(ctx, succeedPoll) // a machine that is gone does not even refuse
		defer cancel()
		return c.Endpoint != "" && answers(asking, o.store, c)
	})
}

// announce makes this node known as the coordinator, until the caller calls withdraw.
func (o runOptions) announce(cfg launch.Config, n placement, at string) (withdraw func(), err error) {
	if o.logReplicas == 1 {
		return func() {}, nil
	}
	dir, err := filepath.Abs(o.store)
	if err != nil {
		return nil, fmt.Errorf("--store: %w", err)
	}
	c := logpeers.Coordinator{Job: cfg.Job, Index: o.copyIndex(n), Endpoint: at}
	if err := c.Announce(dir); err != nil {
		return nil, err
	}
	return func() {
		if err := c.Withdraw(dir); err != nil {
			cfg.Logger.Warn("announcement of the coordinator not withdrawn", "error", err)
		}
	}, nil
}
