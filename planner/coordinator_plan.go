package planner

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// cachedSets is the number of sets of local plans that a coordinator remembers: those of a
// full checkpoint, of a checkpoint without the optimizer, and of their predecessors after a
// change.
const cachedSets = 4

// offer is the local plan of one rank in one save.
type offer struct {
	known   Known
	local   *checkpoint.Local // nil until needed, if only the fingerprint was sent
	checked bool              // some of its items have checks
}

// prints computes the fingerprints of plans with the same participants. It hashes these once:
// hashing them with each plan of a save would be quadratic.
type prints struct {
	of ranks
	checkpoint.Prefix
}

// localPlan folds the plan of a rank. A plan that was in this log before need not be sent
// again: its fingerprint stands for it. If the fingerprint is unknown, because the plan's
// save was aborted or is long ago, the coordinator asks the rank for the plan.
func (c *Coordinator) localPlan(seq uint64, b *events.LocalPlan) {
	if c.ended[b.Checkpoint] {
		return
	}
	if c.cfg.Part { // the plan itself is for the coordinating node
		c.offered(seq, b, offer{}, true, nil)
		return
	}
	var made offer
	var known bool
	var err error
	if b.Plan.Size == 0 && len(b.Plan.Inline) == 0 {
		made, known, err = c.recall(b)
	} else {
		made, err = c.learn(b)
		known = true
	}
	c.offered(seq, b, made, known, err)
}

// nodePlan folds the plans of ranks of one node.
func (c *Coordinator) nodePlan(seq uint64, b *events.NodePlan) {
	all, known := c.nodePrints(b)
	if !known {
		all = make([]byte, len(events.RanksIn(b.Ranks))*len(checkpoint.Digest{}))
	}
	for of := range b.Each(all) {
		switch {
		case known || c.cfg.Part:
			c.localPlan(seq, of)
		case !c.ended[of.Checkpoint]:
			c.offered(seq, of, offer{}, false, nil)
		}
	}
}

// nodePrints returns the fingerprints of a node's plans. It remembers the last sets of the
// ranks of each node, for which a later event gives the digest only.
func (c *Coordinator) nodePrints(b *events.NodePlan) (all []byte, known bool) {
	first := b.Ranks[0].First
	sets := c.nodeSets[first]
	if b.Digest != "" {
		for _, set := range sets {
			if set.digest == b.Digest && slices.Equal(set.ranks, b.Ranks) {
				return set.all, true
			}
		}
		return nil, false
	}
	digest := checkpoint.Sum(b.Fingerprints).String()
	sets = slices.DeleteFunc(sets, func(set nodeSet) bool { return set.digest == digest })
	if len(sets) == cachedSets {
		sets = slices.Delete(sets, 0, 1)
	}
	c.nodeSets[first] = append(sets, nodeSet{b.Ranks, digest, b.Fingerprints})
	return b.Fingerprints, true
}

// nodeSet is the fingerprints that one plan.node lists.
type nodeSet struct {
	ranks  []events.RankRun
	digest string
	all    []byte
}

// offered folds the offer that was made of a plan.
func (c *Coordinator) offered(seq uint64, b *events.LocalPlan, made offer, known bool, err error) {
	participants := c.participants(b)
	old := c.saves[b.Checkpoint] != nil
	s := c.open(b.Checkpoint, seq)
	if !old {
		s.name, s.step, s.first = b.Name, b.Step, b.Rank
		s.involve(participants)
		for _, r := range c.refused[b.Checkpoint] {
			c.failed(r)
		}
		delete(c.refused, b.Checkpoint)
	}
	both := []int{min(s.first, b.Rank), max(s.first, b.Rank)}
	switch {
	case err != nil:
		s.fail(fmt.Sprintf("the plan of rank %d cannot be read: %v", b.Rank, err), b.Rank)
	case s.step != b.Step:
		s.fail(fmt.Sprintf("rank %d saves step %d, rank %d saves step %d under the same name", s.first, s.step, b.Rank, b.Step), both...)
	case !s.participants.equal(participants):
		s.fail(fmt.Sprintf("rank %d names the participants %v, rank %d names %v", s.first, s.participants.all(), b.Rank, participants.all()), both...)
	case !s.participants.has(b.Rank):
		s.fail(fmt.Sprintf("rank %d saves without being one of the participants %v", b.Rank, s.participants.all()), b.Rank)
	case known:
		s.offers[b.Rank] = made
	case s.offers[b.Rank].known.Plan == nil:
		s.unknown = append(s.unknown, b.Rank)
	}
}

// learn makes an offer from a full plan. It computes the fingerprint itself instead of
// trusting the event, so that no event can pass a plan off as another.
func (c *Coordinator) learn(b *events.LocalPlan) (offer, error) {
	if err := unresolved(b.Plan); err != nil {
		return offer{}, err
	}
	local, err := c.decoder.Decode(b.Plan.Inline)
	if err != nil {
		return offer{}, err
	}
	o := offer{local: &local, checked: hasChecks(local)}
	encoded := b.Plan.Inline
	if o.checked {
		encoded = unchecked(local)
	}
	participants := c.participants(b)
	if c.prints == nil || !c.prints.of.equal(participants) {
		c.prints = &prints{participants, fingerprints(c.cfg.WorldSize, participants)}
	}
	o.known = Known{Fingerprint: c.prints.Sum(encoded), Rank: b.Rank, Plan: encoded, participants: participants}
	return o, nil
}

// recall makes an offer from a fingerprint.
func (c *Coordinator) recall(b *events.LocalPlan) (offer, bool, error) {
	digest, err := checkpoint.ParseDigest(b.Fingerprint)
	if err != nil {
		return offer{}, false, fmt.Errorf("neither a plan nor its fingerprint: %w", err)
	}
	known, ok := c.cache.Plan(digest)
	if !ok {
		for _, s := range c.saves {
			if o := s.offers[b.Rank]; o.known.Plan != nil && o.known.Fingerprint == digest {
				known, ok = o.known, true
			}
		}
	}
	if !ok || known.Rank != b.Rank || !known.participants.equal(c.participants(b)) {
		return offer{}, false, nil
	}
	return offer{known: known}, true, nil
}

// plans returns the plans of all participants, in their order.
func (s *save) plans() []Known {
	plans := make([]Known, s.participants.n)
	for i, rank := range s.participants.all() {
		plans[i] = s.offers[rank].known
	}
	return plans
}

// global makes the global plan of a save, or fails the save.
func (c *Coordinator) global(s *save) []Command {
	g := &events.GlobalPlan{Attempt: c.cfg.Attempt, Checkpoint: s.id}
	checked := false
	for _, o := range s.offers {
		checked = checked || o.checked
	}
	if made, ok := c.cache.Layout(s.plans()); ok && !checked {
		g.Layout = events.InlineBlob(made.Encoded)
		return []Command{Publish{g}}
	}
	var locals []checkpoint.Local
	for _, rank := range s.participants.all() {
		o := s.offers[rank]
		if o.local == nil {
			local, err := c.decoder.Decode(o.known.Plan)
			if err != nil {
				s.fail(fmt.Sprintf("the earlier plan of rank %d: %v", rank, err), rank)
				return nil
			}
			o.local = &local
		}
		locals = append(locals, *o.local)
	}
	made, err := Global(locals)
	if err != nil {
		s.fail("the plans of the ranks do not fit together: "+shorten(err.Error()), s.participants.all()...)
		return nil
	}
	if err := made.Disagreements.Err(); err != nil && c.cfg.Strict {
		s.fail("replicas differ between the ranks: "+shorten(err.Error()), made.Disagreements.ranks()...)
		return nil
	}
	g.Layout = events.InlineBlob(checkpoint.EncodeLayout(made.Layout))
	g.Disagreements, g.MoreDisagreements = made.Disagreements.listed()
	return []Command{Publish{g}}
}

// globalPlan folds a global plan, and remembers it. The cache follows from the log alone: a
// coordinator that takes over knows as much as its predecessor.
func (c *Coordinator) globalPlan(s *save, b *events.GlobalPlan) {
	made, err := c.sharedOf(s, b.Layout)
	if err != nil {
		s.unreadable = fmt.Sprintf("the plan of all ranks cannot be read: %v", err)
		s.fail(s.unreadable)
		return
	}
	s.shared = &made
	for rank, o := range s.offers {
		o.local = nil // its items are no longer needed
		s.offers[rank] = o
	}
}

// sharedOf returns a layout, decoded only if it is none of the last ones.
func (c *Coordinator) sharedOf(s *save, encoded events.Blob) (Shared, error) {
	same := func(made Shared) bool { return bytes.Equal(made.Encoded, encoded.Inline) }
	if c.cfg.Part {
		if at := slices.IndexFunc(c.layouts, same); at >= 0 {
			return c.layouts[at], nil
		}
		made, err := decodeShared(encoded)
		if err == nil {
			c.layouts = append(c.layouts[max(0, len(c.layouts)-cachedSets+1):], made)
		}
		return made, err
	}
	plans := s.plans()
	made, ok := c.cache.Layout(plans)
	if !ok || !same(made) {
		var err error
		if made, err = decodeShared(encoded); err != nil {
			return Shared{}, err
		}
	}
	if len(s.offers) == s.participants.n {
		c.cache.Add(plans, made)
	}
	return made, nil
}

func decodeShared(encoded events.Blob) (Shared, error) {
	if err := unresolved(encoded); err != nil {
		return Shared{}, err
	}
	layout, err := checkpoint.DecodeLayout(encoded.Inline)
	if err != nil {
		return Shared{}, err
	}
	return Shared{Layout: layout, Shares: layout.Shares(), Encoded: encoded.Inline}, nil
}

// participants returns the participants that a plan names.
func (c *Coordinator) participants(b *events.LocalPlan) ranks {
	return ranksOf(b.Participants, c.cfg.WorldSize)
}

// unresolved returns an error for a claim check that could not be resolved.
func unresolved(b events.Blob) error {
	if b.Digest != "" {
		return fmt.Errorf("%w: %s", events.ErrNoBlob, b.Digest)
	}
	return nil
}

// ask returns the requests to ranks.
func (c *Coordinator) ask(s *save) (due []Command) {
	for _, rank := range s.unknown {
		if s.offers[rank].known.Plan == nil {
			due = append(due, Ask{Checkpoint: s.id, Rank: rank})
		}
	}
	s.unknown = nil
	return due
}
