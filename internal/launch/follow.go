package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"sync"

	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/preflight"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/retry"
)

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
	cfg.Contact.GuardedBy(j.guard)
	if err := j.reapLinked(ctx); err != nil {
		return err
	}
	withdraw, err := j.keepStandbys()
	if err != nil {
		return err
	}
	defer withdraw()
	if cfg.Carrier == nil { // otherwise this process may coordinate
		j.idle = newIdleness()
	}
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
			j.idle.leaves(j.ask)
			err := j.part(ctx, order, next)
			if err != nil {
				return err
			}
			j.idle.returns()
		case r := <-j.idle.requests():
			return errors.Join(&PreemptedError{Reason: r.Reason, Saved: true, Idle: true}, j.sayGoodbye(ctx, r.Reason))
		case <-j.link.Done():
			return j.link.Err()
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), j.sayGoodbye(ctx, context.Cause(ctx).Error()))
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

// sayGoodbye ends this node's membership.
func (j *job) sayGoodbye(ctx context.Context, why string) error {
	words, cancel := context.WithTimeout(context.WithoutCancel(ctx), retry.EndTimeout)
	defer cancel()
	return j.link.Leave(words, why)
}

// idleness is the state of a following node while it has no part of a group, such as a spare. A preemption of such
// a node, as when its machine is drained, is none of the job: the node leaves.
type idleness struct {
	asked chan StopRequest // has the first request to an idle node

	mu   sync.Mutex
	busy bool
}

func newIdleness() *idleness { return &idleness{asked: make(chan StopRequest, 1)} }

// requests returns the channel of requests that were taken; nil, which has none, if i is nil.
func (i *idleness) requests() <-chan StopRequest {
	if i == nil {
		return nil
	}
	return i.asked
}

// takes takes a request if the node is idle. It takes none if i is nil.
func (i *idleness) takes(r StopRequest) bool {
	if i == nil {
		return false
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.busy {
		return false
	}
	select {
	case i.asked <- r:
	default: // it is about to leave
	}
	return true
}

// leaves ends the idleness: the node gets a part of a group. A request that was taken is passed to ask.
func (i *idleness) leaves(ask func(StopRequest)) {
	if i == nil {
		return
	}
	i.mu.Lock()
	i.busy = true
	i.mu.Unlock()
	select {
	case r := <-i.asked:
		ask(r)
	default:
	}
}

// returns begins the idleness again.
func (i *idleness) returns() {
	if i == nil {
		return
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.busy = false
}
