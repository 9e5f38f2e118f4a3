package planner

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Version is that of the decisions that [Global] makes of equal plans. It is
// part of every fingerprint, so that no plan outlives the planner that knew
// how to share it out.
const Version = 1

// Fingerprint identifies the local plan of one rank in a save of participants
// (ascending) out of a world of so many ranks: plans that differ in an item,
// its dtype, shape, box or size, or in the order of items, have different
// ones. A device mesh is in it as far as it decides on boxes and ranks. Checks
// are not in it: they change with every step.
func Fingerprint(l checkpoint.Local, world int, participants []int) checkpoint.Digest {
	return fingerprint(unchecked(l), world, participants)
}

// fingerprint is [Fingerprint] of an encoded plan without checks.
func fingerprint(encoded []byte, world int, participants []int) checkpoint.Digest {
	head := append(make([]byte, 0, 32+2*len(participants)+len(encoded)), "ckptstore local plan "...)
	for _, n := range append([]int{Version, world, len(participants)}, participants...) {
		head = binary.AppendUvarint(head, uint64(n))
	}
	return checkpoint.Sum(append(head, encoded...))
}

// unchecked is a local plan, encoded without checks.
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
	Fingerprint  checkpoint.Digest
	Rank         int
	Participants []int
	Plan         []byte // encoded, without checks
}

// Shared is a layout in the forms that a save needs. Nothing of it may be
// changed.
type Shared struct {
	Layout  checkpoint.Layout
	Shares  checkpoint.Shares // of Layout
	Encoded []byte            // checkpoint.EncodeLayout of it
}

// Cache remembers the layouts of the last sets of local plans, and these
// plans: an unchanged plan need not be sent or shared out again. What it
// answers is what [Global] would make of the same plans, but for one thing:
// a tensor whose replicas were found to differ stays with the lowest rank.
// It is not for concurrent use.
type Cache struct {
	size int
	sets []*set // the last one is the most recently added
}

// set is one set of local plans and what came of them.
type set struct {
	key    checkpoint.Digest
	plans  map[checkpoint.Digest]Known
	shared Shared
}

// NewCache remembers at most size sets of plans, at least one.
func NewCache(size int) *Cache { return &Cache{size: max(size, 1)} }

// keyOf is the same for plans in any order. Participants and ranks are in the
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

// Plan is the local plan that has a fingerprint, if the cache knows it.
func (c *Cache) Plan(fingerprint checkpoint.Digest) (Known, bool) {
	for _, s := range slices.Backward(c.sets) {
		if p, ok := s.plans[fingerprint]; ok {
			return p, true
		}
	}
	return Known{}, false
}

// Layout is what was made of exactly these plans; of plans only the
// fingerprints are looked at.
func (c *Cache) Layout(plans []Known) (Shared, bool) {
	key := keyOf(plans)
	for _, s := range c.sets {
		if s.key == key {
			return s.shared, true
		}
	}
	return Shared{}, false
}

// Add remembers what was made of plans, in place of the set that was added
// the longest time ago if there are too many. Adding a set again counts as
// new, and replaces its layout. Only a layout that was validated may be
// added.
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
