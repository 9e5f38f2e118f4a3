package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/heirs"
	"github.com/ckptstore/ckptstore/internal/session/restore"
	"github.com/ckptstore/ckptstore/internal/session/retry"
)

// errSilent is the cause when the coordinating node does not answer: the processes of
// this node are killed before another group may start.
var errSilent = errors.New("the coordinating node does not answer")

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
	lapsed int             // lapses of the contact before it
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
	j.awaitContact(ctx)
	j.JoinAttempt(order.Attempt)
	work, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(nil)
	life, end := context.WithCancelCause(ctx)
	defer end(nil)
	p := &part{job: j, order: order, end: end, stop: stop, next: next, closed: make(chan struct{}), over: work.Done(), silent: j.link.Silent(), lapsed: j.cfg.Contact.Lapsed()}
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
		cause = &FailedError{Rank: -1, Kind: blame.Infrastructure, Cause: failed.Error()}
	}
	if failed != nil {
		j.log.Error("part of the attempt failed", "attempt", order.Attempt, "error", failed)
	}
	last := p.ended(cause)
	last.Unsaved = w.savingEnded || p.fenced.Load()
	p.tell(msgStopped, last)
	p.closing(ctx, work, w, cause)
	folding, cancel := context.WithTimeout(work, retry.EndTimeout)
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

// awaitContact waits until the coordinating process answers. An order may come as the answer to a
// request that a short cut of the network has delayed: its part would end at once, by the silence
// before it. After T the process does not count this node as a member any more.
func (j *job) awaitContact(ctx context.Context) {
	limit := time.NewTimer(j.link.Timeout())
	defer limit.Stop()
	select {
	case <-j.link.Contact():
	case <-j.link.Done():
	case <-limit.C:
	case <-ctx.Done():
	}
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
// obey could, and also if an answer has come too late for the guard.
func (p *part) cutOff() bool {
	if p.cfg.Contact.Lapsed() > p.lapsed {
		p.end(errSilent)
		return true
	}
	now := p.link.Silent() // it looks at the time
	if p.outlives.Load() {
		select {
		case <-now:
		default:
			return false
		}
		if p.cfg.Contact.Survives() {
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
			if !p.cfg.Contact.Survives() {
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
			if p.outlives.Load() && p.cfg.Contact.Survives() {
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
