package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/preflight"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/heirs"
	"github.com/ckptstore/ckptstore/internal/session/restore"
)

// errSilent is the cause when the coordinating node does not answer: the processes of
// this node are killed before another group may start.
var errSilent = errors.New("the coordinating node does not answer")

// Follow runs this node's part of a job that the process at the other end of link
// coordinates: it starts, watches and ends the processes of this node's ranks, and
// decides nothing. It returns when the job has ended, or ctx ends.
func Follow(ctx context.Context, cfg Config, store session.Store, link *nodes.Link) (err error) {
	cfg = cfg.withDefaults()
	if _, err := exec.LookPath(cfg.Command[0]); err != nil {
		return fmt.Errorf("%w: %w; give the path of a program after --", ErrConfig, err)
	}
	var hooks *hooks
	if cfg.Standby {
		cfg.Driver, cfg.Preload = nil, nil // of nodes with ranks
	} else if hooks, err = newHooks(&cfg); err != nil {
		return err
	}
	j := prepare(ctx, cfg, store, link)
	j.hooks, j.port0 = hooks, cfg.Port
	j.devices = &deviceGate{job: j}
	j.output = j.openOutput()
	if err := j.Open(); err != nil {
		return err
	}
	j.servePeers()
	defer func() { err = j.Close(err) }()
	if j.guard, err = process.StartGuard(cfg.Job, cfg.Logger, j.marks()...); err != nil {
		return err
	}
	defer j.guard.Stop()
	cfg.Contact.extend(j.guard)
	if err := j.reapLinked(ctx); err != nil {
		return err
	}
	withdraw, err := j.keepStandbys()
	if err != nil {
		return err
	}
	defer withdraw()
	defer j.takeRequests(ctx)()
	if err := j.link.Tell(msgServes, struct{}{}); err != nil {
		return err
	}
	return j.follow(ctx)
}

// reapLinked kills the processes of earlier jobs here. The log, which names them, is behind
// the link.
func (j *job) reapLinked(ctx context.Context) error {
	opening, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-j.link.Done():
			cancel()
		case <-opening.Done():
		}
	}()
	err := j.ReapEarlier(opening)
	if ended := j.link.Err(); err != nil && ended != nil {
		return ended
	}
	return err
}

// follow runs the parts of the attempts that the coordinating process starts.
func (j *job) follow(ctx context.Context) error {
	next := make(chan nodes.Command, 1) // a start that came before the end of the last part
	for kept := false; ; {
		commands := j.link.Commands()
		if len(next) > 0 {
			commands = next
		}
		select {
		case c, open := <-commands:
			if !open {
				<-j.link.Done()
				return j.link.Err()
			}
			var order startOrder
			if c.Kind == cmdSpare {
				j.log.Info("node is a spare: it waits for the place of another one", "node", j.link.Index())
			}
			if c.Kind == cmdMeasure {
				go j.measure(ctx, c.Body)
			}
			if c.Kind == cmdExamine {
				go j.examined(ctx, c.Body)
			}
			if c.Kind != cmdStart {
				continue // of an attempt whose part has ended
			}
			if err := json.Unmarshal(c.Body, &order); err != nil {
				return fmt.Errorf("start the ranks of this node: %w", err)
			}
			if !kept {
				if err := j.KeepStaged(order.Resume); err != nil {
					return err
				}
				kept = true
			}
			if err := j.part(ctx, order, next); err != nil {
				return err
			}
		case <-j.link.Done():
			return j.link.Err()
		case <-ctx.Done():
			return j.leave(ctx)
		}
	}
}

// measure measures the network to another node for the coordinating process.
func (j *job) measure(ctx context.Context, body json.RawMessage) {
	var order measureOrder
	err := json.Unmarshal(body, &order)
	out := measured{ID: order.ID}
	if err == nil {
		out.Rate, err = preflight.Measure(ctx, j.link.PeerClient(order.Pin), order.URL)
	}
	if err != nil {
		out.Error = err.Error()
	}
	if err := j.link.Tell(msgMeasured, out); err != nil {
		j.log.Warn("measurement not sent", "error", err)
	}
}

// leave ends this node's membership because ctx has ended.
func (j *job) leave(ctx context.Context) error {
	words, cancel := context.WithTimeout(context.WithoutCancel(ctx), session.LastWordsTimeout)
	defer cancel()
	return errors.Join(context.Cause(ctx), j.link.Leave(words, context.Cause(ctx).Error()))
}

// part is this node's part of one attempt.
type part struct {
	*job
	group  *session.Group
	order  startOrder
	end    context.CancelCauseFunc // ends the processes
	stop   context.CancelCauseFunc // ends the session, and all that waits for the log
	next   chan<- nodes.Command
	closed chan struct{}   // closed when the coordinating process has ended the attempt's saves
	over   <-chan struct{} // closed when the session has ended
	silent <-chan struct{} // closed when the coordinating process was silent since the start
	fenced atomic.Bool     // it writes no sealed bytes any more
	// outlives is whether the processes may outlive the coordinating one: see survive.
	outlives atomic.Bool
	held     holdings // what a coordinator that takes over must know
}

var (
	_ session.Peer        = (*part)(nil)
	_ restore.Coordinator = (*part)(nil)
)

// part runs one attempt's part from its start to its end. A start of a newer attempt ends
// it, and goes to next.
func (j *job) part(ctx context.Context, order startOrder, next chan<- nodes.Command) (err error) {
	j.cfg.Nodes, j.cfg.Node = order.Nodes, order.Node
	j.cfg.Torch.MasterAddr = order.MasterAddr
	j.JoinAttempt(order.Attempt)
	work, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(nil)
	life, end := context.WithCancelCause(ctx)
	defer end(nil)
	p := &part{job: j, order: order, end: end, stop: stop, next: next, closed: make(chan struct{}), over: work.Done(), silent: j.link.Silent()}
	p.outlives.Store(order.Survives && j.cfg.Survival != nil)
	w := &watch{job: j, part: p, stop: &stopState{orders: newOrders()}}
	at := session.Attempt{
		Number: order.Attempt, Resume: order.Resume, Started: order.Started, Hooks: w,
		Nodes: order.Nodes, Node: order.Node, Peer: p, Loads: p, Closed: p.closed,
		Replicas: j.replication(order.Replicas), PeerClient: j.broadcasts(),
	}
	if j.members != nil {
		w.signals, at.Leave = newHeldSignals(nil), j.members.cfg.Leave
	} else {
		w.signals = newHeldSignals(j.ask)
	}
	at.Signals = w.signals
	g := j.Begin(work, at)
	defer func() { err = errors.Join(err, g.Close()) }()
	w.group, w.pulses, w.hello, w.saving, p.group = g, g.Pulses(), g.Hello(), g.Saved(), g
	if err := j.recordDevices(work, order.Attempt); err != nil {
		j.log.Warn("devices not recorded", "attempt", order.Attempt, "error", err)
	}
	j.log.Info("attempt started", "attempt", order.Attempt, "node", order.Node, "ranks", j.cfg.Local(), "world_size", j.cfg.World())
	defer inBackground(work, p.obey)()
	defer inBackground(work, p.survive)()
	defer j.carry(p)()
	run := func() (*FailedError, error) { return w.run(life, work, order.Restart) }
	if j.members != nil {
		run = func() (*FailedError, error) { return w.serveMembers(life, work) }
		defer func() { err = errors.Join(err, g.ShutDownServers()) }()
	}
	cause, failed := run()
	if failed != nil && cause == nil {
		cause = &FailedError{Rank: -1, Kind: InfrastructureFailure, Cause: failed.Error()}
	}
	if failed != nil {
		j.log.Error("part of the attempt failed", "attempt", order.Attempt, "error", failed)
	}
	last := p.ended(cause)
	last.Unsaved = w.savingEnded || p.fenced.Load()
	p.tell(msgStopped, last)
	p.closing(ctx, work, w, cause)
	folding, cancel := context.WithTimeout(work, session.LastWordsTimeout)
	g.Fold(folding) // a member may wait for a commit that this process has heard of
	cancel()
	stop(nil)
	if !w.savingEnded {
		if stuck := g.StopSaves(); stuck != nil {
			return stuck
		}
	}
	if j.members == nil {
		if j.port0 == nil {
			if j.port0, err = HoldPort(); err != nil {
				return err
			}
		}
		j.link.SetPort(j.port0.port)
	}
	if errors.Is(context.Cause(life), errSilent) && j.members != nil {
		return errSilent // they join again
	}
	p.tell(msgClosed, attemptOnly{order.Attempt})
	if errors.Is(failed, errLeft) {
		return failed
	}
	return nil
}

// closing waits until the coordinating process has ended the attempt: ranks of other nodes
// may live on. When ctx has ended, staged saves are still being finished, for a while; a
// session then ends what this node has staged.
func (p *part) closing(ctx, work context.Context, w *watch, cause *FailedError) {
	select {
	case <-p.closed:
		return
	case <-p.link.Done():
		return
	case <-work.Done(): // without contact
		return
	case <-ctx.Done():
	}
	if p.members == nil {
		limit := time.NewTimer(p.cfg.DrainTimeout + p.cfg.Grace)
		defer limit.Stop()
		select {
		case <-p.closed:
		case <-p.link.Done():
		case <-work.Done():
		case <-limit.C:
			p.log.Warn("part ended: the coordinating node has not ended the saves in time", "attempt", p.order.Attempt)
		}
		return
	}
	if !w.savingEnded {
		why := "the members have left"
		if cause != nil {
			why = cause.Cause
		}
		var err error
		if w.savingEnded, err = w.group.Drain(work, why); err != nil {
			p.log.Warn("staged saves not finished", "attempt", p.order.Attempt, "error", err)
		}
	}
}

// ended describes the end of the part for the coordinating process.
func (p *part) ended(cause *FailedError) partEnd {
	end := partEnd{Attempt: p.order.Attempt, Rank: -1}
	if cause != nil {
		end.Failed, end.Rank, end.Kind, end.Cause, end.Tail = true, cause.Rank, cause.Kind, cause.Cause, cause.Tail
		end.Itself = len(cause.failed) > 0
		end.Device = p.devices.failure()
	}
	return end
}

// cutOff ends the part if the coordinating process was silent for too long, and reports
// whether it was. A rank that fails then is not at fault: the guard may have killed it before
// obey could.
func (p *part) cutOff() bool {
	now := p.link.Silent() // it looks at the time
	if p.outlives.Load() {
		select {
		case <-now:
		default:
			return false
		}
		if p.cfg.Contact.survives() {
			return false
		}
		p.end(errSilent)
		return true
	}
	select {
	case <-p.silent:
		p.end(errSilent)
		return true
	default:
		return false
	}
}

// obey follows the commands of the coordinating process, and kills the processes when
// it is silent. Members are not killed: they get errors once the coordinating process
// counts them as gone.
func (p *part) obey(ctx context.Context) {
	silent := p.link.Silent()
	commands := p.link.Commands()
	var lost, lapse <-chan time.Time
	var contact <-chan struct{}
	kill := func() {
		p.fenced.Store(p.group.Fence())
		p.end(errSilent)
		if err := p.processes.Kill(context.WithoutCancel(ctx)); err != nil {
			p.log.Error("processes not killed", "error", err)
		}
	}
	for {
		select {
		case <-contact:
			contact, lost, lapse, silent = nil, nil, nil, p.link.Silent()
		case <-lapse:
			lapse = time.After(p.link.Timeout() / 20)
			if !p.cfg.Contact.survives() {
				lapse = nil
				kill()
			}
		case <-lost:
			p.end(errSilent)
			p.stop(errSilent)
			return
		case c, open := <-commands:
			if !open {
				commands = nil // the link is ending
				continue
			}
			if c.Kind == cmdStart {
				p.end(errors.New("the coordinating node has started another attempt"))
				p.next <- c
				close(p.closed)
				return
			}
			var of attemptOnly
			err := json.Unmarshal(c.Body, &of)
			switch {
			case err != nil:
			case of.Attempt != p.order.Attempt:
				p.log.Error("command of another attempt ignored", "command", c.Kind, "attempt", of.Attempt)
			case c.Kind == cmdClose:
				close(p.closed)
				return // the next command is for another attempt
			default:
				err = p.command(c)
			}
			if err != nil {
				p.end(fmt.Errorf("command %s of the coordinating node: %w", c.Kind, err))
			}
		case <-silent:
			silent = nil
			if p.members != nil {
				contact, lost = p.link.Contact(), time.After(p.link.Timeout()/2)
				continue
			}
			if p.outlives.Load() && p.cfg.Contact.survives() {
				p.log.Warn("coordinating node is silent; the group lives on until the log has another", "attempt", p.order.Attempt)
				contact, lapse = p.link.Contact(), time.After(p.link.Timeout()/20)
				continue
			}
			kill()
		case <-p.link.Done():
			p.end(p.link.Err())
			p.stop(p.link.Err()) // the log is behind the link
			return
		case <-ctx.Done():
			return
		}
	}
}

// command obeys a command that does not end the part.
func (p *part) command(c nodes.Command) error {
	switch c.Kind {
	case cmdStop:
		var stop stopCommand
		if err := json.Unmarshal(c.Body, &stop); err != nil {
			return err
		}
		p.end(errors.New(stop.Why))
	case cmdEvent:
		var e session.Forwarded
		if err := json.Unmarshal(c.Body, &e); err != nil {
			return err
		}
		return p.group.Heard(e)
	case cmdAdopt:
		var order adoptOrder
		if err := json.Unmarshal(c.Body, &order); err != nil {
			return err
		}
		p.group.Adopt(order.Order)
	case cmdAsk:
		var ask askedPlan
		if err := json.Unmarshal(c.Body, &ask); err != nil {
			return err
		}
		p.group.Asked(ask.Checkpoint, ask.Rank)
	case cmdMortal:
		p.outlives.Store(false)
	default:
		return errors.New("it is unknown")
	}
	return nil
}

// tell sends a message of the attempt.
func (p *part) tell(kind string, body any) {
	p.held.told(kind)
	if err := p.link.Tell(kind, body); err != nil {
		p.log.Error("message not sent to the coordinating node", "message", kind, "error", err)
	}
}

// Relay implements [session.Peer].
func (p *part) Relay(rank int) http.Handler {
	prefix := fmt.Sprintf("/v1/attempts/%d/ranks/%d", p.order.Attempt, rank)
	return &httputil.ReverseProxy{
		Transport: &repeating{by: p.link.Client().Transport, over: p.over, rank: rank, held: &p.held},
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.Header.Del("Authorization")                                         // the link has its own
			if to, err := url.Parse(p.link.URL(prefix + r.In.URL.Path)); err == nil { // otherwise the link refuses it
				r.Out.URL, r.Out.Host = to, to.Host
			}
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			httpkit.Refuse(w, fmt.Errorf("ask the coordinating node: %w", err))
		},
	}
}

// Resolve implements [restore.Coordinator].
func (p *part) Resolve(ctx context.Context, req restore.ResolveRequest) (reply restore.ResolveReply, err error) {
	p.held.loads(1)
	if err = p.request(ctx, "resolve", req, &reply); err != nil || reply.Failure != nil {
		p.held.loads(-1) // no request follows
	}
	return reply, err
}

// Share implements [restore.Coordinator].
func (p *part) Share(ctx context.Context, req restore.ShareRequest) (reply restore.ShareReply, err error) {
	return reply, p.request(ctx, "share", req, &reply)
}

// Done implements [restore.Coordinator].
func (p *part) Done(ctx context.Context, req restore.DoneRequest) (reply restore.DoneReply, err error) {
	defer p.held.loads(-1)
	return reply, p.request(ctx, "done", req, &reply)
}

// requestAgain is the pause before a request without an answer is repeated.
const requestAgain = 200 * time.Millisecond

// request sends a request about a load to the coordinating process, until it is answered
// or ctx ends.
func (p *part) request(ctx context.Context, op string, req, reply any) error {
	path := fmt.Sprintf("/v1/attempts/%d/loads/%s", p.order.Attempt, op)
	for {
		err := p.link.Request(ctx, path, req, reply)
		if err == nil || problem.Given(err) || ctx.Err() != nil {
			return err
		}
		select {
		case <-time.After(requestAgain):
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// Abort implements [session.Peer].
func (p *part) Abort(_ context.Context, checkpoint, reason string, ranks []int) error {
	return p.link.Tell(msgAbort, saveRef{p.order.Attempt, checkpoint, reason, ranks})
}

// Request implements [session.Peer].
func (p *part) Request(ctx context.Context, rank int, path string, in, out any) error {
	return p.link.Request(ctx, fmt.Sprintf("/v1/attempts/%d/ranks/%d%s", p.order.Attempt, rank, path), in, out)
}

// Adopted implements [session.Peer].
func (p *part) Adopted(r heirs.Reply) { p.tell(msgAdopted, adoptReply{p.order.Attempt, r}) }

// Settled implements [session.Peer].
func (p *part) Settled(checkpoint string) {
	p.tell(msgSettled, saveRef{Attempt: p.order.Attempt, Checkpoint: checkpoint})
}

// Contact holds how long the group of this node may live: until half of the timeout has
// passed since the last answered beat was sent, or in the coordinating process since its
// last tick. It exists because the beats begin before the guard does.
type Contact struct {
	mu     sync.Mutex
	until  time.Time
	lapses int // how often until had passed when it was extended
	guard  *process.Guard
}

// Answered records an answered beat, or a tick: see [nodes.JoinConfig] and
// [nodes.EndpointConfig].
func (c *Contact) Answered(sent time.Time, timeout time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.late() {
		c.lapses++
	}
	c.extendTo(sent.Add(timeout / 2))
}

// survive lets the group live until a time at least: it may outlive its coordinator.
func (c *Contact) survive(until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.extendTo(until)
}

// extendTo extends the deadline. The caller holds the lock.
func (c *Contact) extendTo(until time.Time) {
	if until.Before(c.until) {
		return
	}
	if c.until = until; c.guard != nil {
		c.guard.LiveUntil(until)
	}
}

// survives reports whether the group may live now.
func (c *Contact) survives() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Before(c.until)
}

func (c *Contact) late() bool { return !c.until.IsZero() && time.Now().After(c.until) }

// lapsed counts how often the guard had to kill the group.
func (c *Contact) lapsed() int {
	if c == nil {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.late() {
		return c.lapses + 1
	}
	return c.lapses
}

// extend passes the deadline to the guard from now on.
func (c *Contact) extend(g *process.Guard) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.guard = g; !c.until.IsZero() {
		g.LiveUntil(c.until)
	}
}
