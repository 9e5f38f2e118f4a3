package session

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// outbox appends the facts of one rank's saves to the log in order, after the
// rank has gone back to training. It holds at most a plan and a seal for each of
// the rank's slots, since a save without a slot appends nothing.
type outbox struct {
	// ctx ends with the attempt; facts not appended by then are lost.
	ctx context.Context
	// record durably appends bodies as one rank.
	record func(ctx context.Context, bodies ...events.Body) error
	// lost is called when a fact of a save could not be appended.
	lost func(checkpoint string, err error)

	mu    sync.Mutex
	queue []letter
	empty chan struct{} // closed when all posted facts are appended; nil: they are
}

// letter is a queued fact.
type letter struct {
	checkpoint string
	body       events.Body
	said       chan error // result for a waiting caller, or nil
}

// post queues a fact.
func (o *outbox) post(checkpoint string, body events.Body) {
	o.put(letter{checkpoint: checkpoint, body: body})
}

// recordNow appends a fact, after all that were posted before it.
func (o *outbox) recordNow(ctx context.Context, checkpoint string, body events.Body) error {
	l := letter{checkpoint, body, make(chan error, 1)}
	o.put(l)
	select {
	case err := <-l.said:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (o *outbox) put(l letter) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queue = append(o.queue, l)
	if o.empty == nil {
		o.empty = make(chan struct{})
		go o.run()
	}
}

// run appends the queued facts until the queue is empty.
func (o *outbox) run() {
	for {
		o.mu.Lock()
		if len(o.queue) == 0 {
			close(o.empty)
			o.empty = nil
			o.mu.Unlock()
			return
		}
		// Facts of one save form a batch, so that a fact refused for one save
		// does not take another save with it.
		n := 1
		for n < len(o.queue) && o.queue[n].checkpoint == o.queue[0].checkpoint {
			n++
		}
		letters := o.queue[:n:n]
		o.queue = o.queue[n:]
		o.mu.Unlock()
		bodies := make([]events.Body, len(letters))
		for i, l := range letters {
			bodies[i] = l.body
		}
		err := o.record(o.ctx, bodies...)
		told := false
		for _, l := range letters {
			switch {
			case l.said != nil:
				l.said <- err
			case err != nil && !told:
				told = true
				o.lost(l.checkpoint, err)
			}
		}
	}
}

// flush waits until all posted facts are appended or lost.
func (o *outbox) flush(ctx context.Context) error {
	o.mu.Lock()
	empty := o.empty
	o.mu.Unlock()
	if empty == nil {
		return nil
	}
	select {
	case <-empty:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// joining appends the facts of this node's ranks about one phase of a save in one event:
// see [events.NodePlan]. A group on one node has none: its log has the facts of ranks, as
// the logs of earlier versions do, and too few of them to matter.
type joining struct {
	// ctx ends with the attempt; facts not appended by then are lost.
	ctx   context.Context
	facts *eventWriter
	local []int // ranks of this node

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

// planSets is how many sets a node's ranks share.
const planSets = 4

func newJoining(ctx context.Context, facts *eventWriter, local []int) *joining {
	return &joining{ctx: ctx, facts: facts, local: local, saves: map[string]*joinedSave{}, sets: map[int][]planSet{}}
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

// record durably appends a fact about a rank, with those of the node's other ranks that come
// within the window. It does not wait for the window if all ranks' facts are there. Facts
// that cannot be joined are appended at once.
func (j *joining) record(ctx context.Context, rank int, body events.Body) error {
	of, checkpoint := phaseOf(body)
	j.mu.Lock()
	save := j.saves[checkpoint]
	if p, ok := body.(*events.LocalPlan); ok {
		if save == nil {
			save = &joinedSave{ranks: len(j.local)}
			j.saves[checkpoint] = save
		}
		if len(p.Participants) > 0 {
			save.ranks = len(among(j.local, p.Participants))
		}
	}
	if of == phases || save == nil { // nil: the save has ended
		j.mu.Unlock()
		actor := events.Rank(rank)
		if of == written {
			actor = j.facts.node
		}
		return j.facts.recordAs(ctx, j.facts.trial, actor, body)
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

// ranks returns how many ranks of this node take part in a save.
func (j *joining) ranks(checkpoint string) int {
	if j == nil {
		return 1
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if save := j.saves[checkpoint]; save != nil {
		return save.ranks
	}
	return len(j.local) // it has ended
}

// among returns those of some ranks that are in a sorted list.
func among(some, list []int) []int {
	return slices.DeleteFunc(slices.Clone(some), func(rank int) bool {
		_, found := slices.BinarySearch(list, rank)
		return !found
	})
}

// forget drops the phases of a save that has ended.
func (j *joining) forget(checkpoint string) {
	if j == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.saves, checkpoint)
}

// send appends a joint, once.
func (j *joining) send(p *phase, of *joint) {
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
		f, err := j.facts.fact(j.facts.trial, b.actor, b.body)
		if err != nil {
			of.err = err
			return
		}
		facts = append(facts, f)
	}
	if of.err = j.facts.append(j.ctx, facts...); of.err == nil {
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
func (j *joining) join(of []rankFact) (out []actorFact, lists *events.NodePlan) {
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
			return []actorFact{{j.facts.node, b}}, lists
		}
	case len(seals) > 0:
		return []actorFact{{j.facts.node, events.JoinSeals(seals)}}, nil
	case len(writes) > 0:
		for _, b := range events.JoinWrites(writes) {
			out = append(out, actorFact{j.facts.node, b})
		}
		return out, nil
	}
	for _, f := range of {
		actor := events.Rank(f.rank)
		if len(writes) > 0 {
			actor = j.facts.node
		}
		out = append(out, actorFact{actor, f.body})
	}
	return out, nil
}

// digest returns the digest of a plan's fingerprints if the log lists them, or "".
func (j *joining) digest(b *events.NodePlan) string {
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
func (j *joining) list(b *events.NodePlan) {
	if b == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	first := b.Ranks[0].First
	sets := append(j.sets[first], planSet{b.Ranks, checkpoint.Sum(b.Fingerprints).String()})
	j.sets[first] = sets[max(0, len(sets)-planSets):]
}
