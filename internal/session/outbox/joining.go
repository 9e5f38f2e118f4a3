package outbox

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Joining appends the facts of this node's ranks about one phase of a save in one event:
// see [events.NodePlan]. A group on one node has none: its log has the facts of ranks, as
// the logs of earlier versions do, and too few of them to matter.
type Joining struct {
	ctx context.Context
	cfg Config

	mu    sync.Mutex
	saves map[string]*joinedSave
	sets  map[int][]planSet // by their first rank: those that the log lists, the newest last
}

// Phases of a save in which a node's facts are joined.
const (
	planned = iota
	sealed
	written
	phases
)

// windows are how long an event waits for the node's other ranks. It is appended at once when
// the last of them has come. Only the commit waits for writes, and it needs all of them.
var windows = [phases]time.Duration{planned: 20 * time.Millisecond, sealed: 50 * time.Millisecond, written: time.Second}

// joinedSave is one save of the node's ranks.
type joinedSave struct {
	ranks int // of this node that take part
	of    [phases]phase
}

// phase tracks the facts of one phase of a save.
type phase struct {
	said int    // facts so far
	open *joint // to which the next fact belongs; nil: to a new one
}

// joint is the facts of one event.
type joint struct {
	facts []rankFact
	done  chan struct{}
	err   error // set before done is closed
}

// rankFact is a fact about a rank.
type rankFact struct {
	rank int
	body events.Body
}

// planSet is the fingerprints that a plan.node lists. The coordinator remembers as many: see
// [planner.Coordinator].
type planSet struct {
	ranks  []events.RankRun
	digest string
}

// PlanSets is how many sets a node's ranks share.
const PlanSets = 4

// Config tells how a node's facts are appended.
type Config struct {
	Local []int        // ranks of the node
	Node  events.Actor // the node
	// Fact mints a fact, and Append durably appends facts.
	Fact   func(actor events.Actor, body events.Body) (events.Fact, error)
	Append func(ctx context.Context, facts ...events.Fact) error
}

// Join returns what joins the facts of a node's ranks. Facts that are not appended when ctx ends
// are lost.
func Join(ctx context.Context, c Config) *Joining {
	return &Joining{ctx: ctx, cfg: c, saves: map[string]*joinedSave{}, sets: map[int][]planSet{}}
}

// phaseOf returns the phase of a save to which a fact belongs, or phases.
func phaseOf(body events.Body) (of int, checkpoint string) {
	switch b := body.(type) {
	case *events.LocalPlan:
		if b.Plan.Size > 0 {
			return phases, b.Checkpoint
		}
		return planned, b.Checkpoint
	case *events.WriteSealed:
		return sealed, b.Checkpoint
	case *events.WriteCompleted:
		return written, b.Checkpoint
	}
	return phases, ""
}

// Record durably appends a fact about a rank, with those of the node's other ranks that come
// within the window. It does not wait for the window if all ranks' facts are there. Facts
// that cannot be joined are appended at once.
func (j *Joining) Record(ctx context.Context, rank int, body events.Body) error {
	of, checkpoint := phaseOf(body)
	j.mu.Lock()
	save := j.saves[checkpoint]
	if p, ok := body.(*events.LocalPlan); ok {
		if save == nil {
			save = &joinedSave{ranks: len(j.cfg.Local)}
			j.saves[checkpoint] = save
		}
		if len(p.Participants) > 0 {
			save.ranks = len(Among(j.cfg.Local, p.Participants))
		}
	}
	if of == phases || save == nil { // nil: the save has ended
		j.mu.Unlock()
		actor := events.Rank(rank)
		if of == written {
			actor = j.cfg.Node
		}
		fact, err := j.cfg.Fact(actor, body)
		if err != nil {
			return err
		}
		return j.cfg.Append(ctx, fact)
	}
	p := &save.of[of]
	own := p.open
	if own == nil {
		own = &joint{done: make(chan struct{})}
		p.open = own
		time.AfterFunc(windows[of], func() { j.send(p, own) })
	}
	own.facts = append(own.facts, rankFact{rank, body})
	p.said++
	whole := p.said >= save.ranks
	j.mu.Unlock()
	if whole {
		j.send(p, own)
	}
	select {
	case <-own.done:
		return own.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Ranks returns how many ranks of this node take part in a save.
func (j *Joining) Ranks(checkpoint string) int {
	if j == nil {
		return 1
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if save := j.saves[checkpoint]; save != nil {
		return save.ranks
	}
	return len(j.cfg.Local) // it has ended
}

// Among returns those of some ranks that are in a sorted list.
func Among(some, list []int) []int {
	return slices.DeleteFunc(slices.Clone(some), func(rank int) bool {
		_, found := slices.BinarySearch(list, rank)
		return !found
	})
}

// Forget drops the phases of a save that has ended.
func (j *Joining) Forget(checkpoint string) {
	if j == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.saves, checkpoint)
}

// send appends a joint, once.
func (j *Joining) send(p *phase, of *joint) {
	j.mu.Lock()
	first := p.open == of
	if first {
		p.open = nil
	}
	j.mu.Unlock()
	if !first {
		return
	}
	defer close(of.done)
	slices.SortFunc(of.facts, func(a, b rankFact) int { return cmp.Compare(a.rank, b.rank) })
	bodies, lists := j.join(of.facts)
	var facts []events.Fact
	for _, b := range bodies {
		f, err := j.cfg.Fact(b.actor, b.body)
		if err != nil {
			of.err = err
			return
		}
		facts = append(facts, f)
	}
	if of.err = j.cfg.Append(j.ctx, facts...); of.err == nil {
		j.list(lists)
	}
}

// actorFact is a fact to append.
type actorFact struct {
	actor events.Actor
	body  events.Body
}

// join returns the events for facts of one phase: of the node, or those of the ranks that
// such an event cannot hold. It returns the plans whose fingerprints the events list.
func (j *Joining) join(of []rankFact) (out []actorFact, lists *events.NodePlan) {
	var plans []*events.LocalPlan
	var seals []*events.WriteSealed
	var writes []*events.WriteCompleted
	for _, f := range of {
		switch b := f.body.(type) {
		case *events.LocalPlan:
			plans = append(plans, b)
		case *events.WriteSealed:
			seals = append(seals, b)
		case *events.WriteCompleted:
			writes = append(writes, b)
		}
	}
	switch {
	case len(of) == 1:
	case len(plans) > 0:
		if b, err := events.JoinPlans(plans); err == nil { // otherwise the coordinator finds how they differ
			if digest := j.digest(b); digest != "" {
				b.Fingerprints, b.Digest = nil, digest
			} else {
				lists = b
			}
			return []actorFact{{j.cfg.Node, b}}, lists
		}
	case len(seals) > 0:
		return []actorFact{{j.cfg.Node, events.JoinSeals(seals)}}, nil
	case len(writes) > 0:
		for _, b := range events.JoinWrites(writes) {
			out = append(out, actorFact{j.cfg.Node, b})
		}
		return out, nil
	}
	for _, f := range of {
		actor := events.Rank(f.rank)
		if len(writes) > 0 {
			actor = j.cfg.Node
		}
		out = append(out, actorFact{actor, f.body})
	}
	return out, nil
}

// digest returns the digest of a plan's fingerprints if the log lists them, or "".
func (j *Joining) digest(b *events.NodePlan) string {
	digest := checkpoint.Sum(b.Fingerprints).String()
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, set := range j.sets[b.Ranks[0].First] {
		if set.digest == digest && slices.Equal(set.ranks, b.Ranks) {
			return digest
		}
	}
	return ""
}

// list notes fingerprints that the log lists now.
func (j *Joining) list(b *events.NodePlan) {
	if b == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	first := b.Ranks[0].First
	sets := append(j.sets[first], planSet{b.Ranks, checkpoint.Sum(b.Fingerprints).String()})
	j.sets[first] = sets[max(0, len(sets)-PlanSets):]
}
