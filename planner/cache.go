package planner

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Version is the version of the decisions that [Global] makes for equal plans. It is part of
// every fingerprint, so that no plan outlives the planner that distributed it.
const Version = 1

// Fingerprint identifies the local plan of one rank in a save of participants (ascending) out
// of world ranks. Plans that differ in an item, its dtype, shape, box or size, or in the
// order of items, have different fingerprints. A device mesh is covered as far as it
// determines boxes and ranks. Checks are not: they change with every step. No participants
// are all ranks of the world.
func Fingerprint(l checkpoint.Local, world int, participants []int) checkpoint.Digest {
	return Fingerprints(world, participants)(l)
}

// Fingerprints returns [Fingerprint] for plans of one save, whose participants it hashes
// once.
func Fingerprints(world int, participants []int) func(checkpoint.Local) checkpoint.Digest {
	prefix := fingerprints(world, ranksOf(participants, world))
	return func(l checkpoint.Local) checkpoint.Digest { return prefix.Sum(unchecked(l)) }
}

// fingerprints returns the part that the fingerprints of the plans of one save have in common.
// The encoded plan follows, without checks.
func fingerprints(world int, participants ranks) checkpoint.Prefix {
	head := append(make([]byte, 0, 64+3*participants.n), "ckptstore local plan "...)
	for _, n := range append([]int{Version, world, participants.n}, participants.all()...) {
		head = binary.AppendUvarint(head, uint64(n))
	}
	return checkpoint.NewPrefix(head)
}

// unchecked returns a local plan, encoded without checks.
func unchecked(l checkpoint.Local) []byte {
	if hasChecks(l) {
		l.Items = slices.Clone(l.Items)
		for i := range l.Items {
			l.Items[i].Check = checkpoint.Check{}
		}
	}
	return checkpoint.EncodeLocal(l)
}

func hasChecks(l checkpoint.Local) bool {
	return slices.ContainsFunc(l.Items, func(it checkpoint.Item) bool { return it.Check != checkpoint.Check{} })
}

// Known is a local plan and its [Fingerprint].
type Known struct {
	Fingerprint checkpoint.Digest
	Rank        int
	Plan        []byte // encoded, without checks

	participants ranks
}

// Shared is a layout in the forms that a save needs. It must not be changed.
type Shared struct {
	Layout  checkpoint.Layout
	Shares  checkpoint.Shares // of Layout
	Encoded []byte            // checkpoint.EncodeLayout of it
}

// Cache remembers the layouts of the last sets of local plans, and these plans, so that an
// unchanged plan need not be sent or distributed again. It returns what [Global] would return
// for the same plans, with one exception: a tensor whose replicas were found to differ stays
// with the lowest rank. It is not for concurrent use.
type Cache struct {
	size int
	sets []*set // the last is the most recently added
}

// set is one set of local plans and the resulting layout.
type set struct {
	key    checkpoint.Digest
	plans  map[checkpoint.Digest]Known
	shared Shared
}

// newCache returns a cache of at most size sets of plans, at least one.
func newCache(size int) *Cache { return &Cache{size: max(size, 1)} }

// keyOf returns the same key for plans in any order. Participants and ranks are in the
// fingerprints.
func keyOf(plans []Known) checkpoint.Digest {
	prints := make([]checkpoint.Digest, len(plans))
	for i, p := range plans {
		prints[i] = p.Fingerprint
	}
	slices.SortFunc(prints, func(a, b checkpoint.Digest) int { return bytes.Compare(a[:], b[:]) })
	all := make([]byte, 0, len(prints)*len(checkpoint.Digest{}))
	for _, p := range prints {
		all = append(all, p[:]...)
	}
	return checkpoint.Sum(all)
}

// Plan returns the local plan with a fingerprint, if the cache has it.
func (c *Cache) Plan(fingerprint checkpoint.Digest) (Known, bool) {
	for _, s := range slices.Backward(c.sets) {
		if p, ok := s.plans[fingerprint]; ok {
			return p, true
		}
	}
	return Known{}, false
}

// Layout returns the layout that was made of exactly these plans. It compares only the
// fingerprints of the plans.
func (c *Cache) Layout(plans []Known) (Shared, bool) {
	key := keyOf(plans)
	for _, s := range c.sets {
		if s.key == key {
			return s.shared, true
		}
	}
	return Shared{}, false
}

// Add remembers the layout of plans. If there are too many sets, it drops the set that was
// added the longest time ago. Adding a set again counts as new, and replaces its layout. Only
// a validated layout may be added.
func (c *Cache) Add(plans []Known, made Shared) {
	s := &set{key: keyOf(plans), plans: make(map[checkpoint.Digest]Known, len(plans)), shared: made}
	for _, p := range plans {
		if have, ok := c.Plan(p.Fingerprint); ok {
			p = have // its bytes are kept once
		}
		s.plans[p.Fingerprint] = p
	}
	c.sets = slices.DeleteFunc(c.sets, func(old *set) bool { return old.key == s.key })
	if len(c.sets) == c.size {
		c.sets = slices.Delete(c.sets, 0, 1)
	}
	c.sets = append(c.sets, s)
}
