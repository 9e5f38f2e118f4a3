package audit

import (
	"fmt"

	"github.com/ckptstore/ckptstore/events"
)

// signedBundle checks the signatures of the decisions in a bundle. Nil, it checks nothing.
type signedBundle struct {
	*Signatures
	keys []keyMessage // that are not folded yet
}

// keyMessage is a message of the trial of keys, proved.
type keyMessage struct {
	leaf Leaf
	m    events.Message
}

// signatures checks what the bundle has about keys. It returns nil if the bundle has no
// keys and the policy wants no signatures.
func (b BundleHead) signatures(h Head, sealed SealedMap, p Policy) (*signedBundle, error) {
	if b.Created == nil || len(b.KeyRows) == 0 {
		switch {
		case b.Created != nil || len(b.KeyRows) > 0 || len(b.Keys) > 0:
			return nil, fmt.Errorf("%w: the bundle has a part of what proves its keys", ErrMissingEvent)
		case p.WantsSignatures():
			return nil, fmt.Errorf("%w: the bundle does not show which keys sign decisions, and the policy has lines `signer` or `signed`: the log grants no key, or this file is of an older version: export it again", ErrPolicy)
		}
		return nil, nil
	}
	leaf, m, err := b.Created.opened(h, true)
	if err != nil {
		return nil, err
	}
	e, err := events.Decode(m)
	if err != nil || leaf.Sequence != 1 || e.Kind != (events.StoreCreated{}).Kind() {
		return nil, fmt.Errorf("%w: event %d does not name the store", ErrTampered, leaf.Sequence)
	}
	rows, err := CheckRun(b.KeyRows, NoRun, sealed.Rows, sealed.Runs)
	if err != nil {
		return nil, err
	}
	check := &signedBundle{Signatures: NewSignatures("", p)}
	seen, last := Runs{}, uint64(0)
	for _, it := range b.Keys {
		leaf, m, err := it.opened(h, true)
		if err != nil {
			return nil, err
		}
		if run, trial := Trial(leaf.Subject); run != NoRun || trial != events.Keys || leaf.Sequence <= last {
			return nil, fmt.Errorf("%w: event %d is not the next about keys", ErrTampered, leaf.Sequence)
		}
		last = leaf.Sequence
		seen.Add(leaf.Subject, leaf.Sequence, EntryHash(it.Entry))
		check.keys = append(check.keys, keyMessage{leaf, m})
	}
	var own []Row
	for _, r := range rows {
		if r.Trial == events.Keys {
			own = append(own, r)
		}
	}
	if err := complete(own, &seen); err != nil {
		return nil, fmt.Errorf("the keys that sign decisions: %w", err)
	}
	check.store(e)
	return check, nil
}

// store takes the identity of the store from its first event.
func (s *Signatures) store(created events.Event) {
	if body, err := created.Body(); err == nil {
		if b, ok := body.(*events.StoreCreated); ok {
			s.ring.store = b.Store
		}
	}
}

// until folds the keys up to a sequence.
func (c *signedBundle) until(sequence uint64) {
	for len(c.keys) > 0 && c.keys[0].leaf.Sequence < sequence {
		k := c.keys[0]
		c.keys = c.keys[1:]
		c.Message(k.m, k.leaf.Sequence, k.leaf.Stored)
	}
}

func (c *signedBundle) message(m events.Message, leaf Leaf) {
	if c != nil {
		c.until(leaf.Sequence)
		c.Message(m, leaf.Sequence, leaf.Stored)
	}
}

func (c *signedBundle) pass(leaf Leaf) {
	if c != nil {
		c.Pass(leaf.Subject, leaf.Sequence)
	}
}

func (c *signedBundle) report() *SignatureReport {
	if c == nil {
		return nil
	}
	c.until(^uint64(0))
	r := c.Report()
	return &r
}
