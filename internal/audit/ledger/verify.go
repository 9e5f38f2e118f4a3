package ledger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
)

// Finding is what [Book.Verify] found.
type Finding struct {
	Sequence uint64 `json:"sequence,omitempty"` // of the event concerned; 0: the log as a whole
	Problem  string `json:"problem"`
}

// VerifiedLog is the outcome of [Book.Verify].
type VerifiedLog struct {
	Origin   string    `json:"origin"`
	Size     int64     `json:"size"`
	Root     string    `json:"root"`
	Events   int64     `json:"events"`            // read and hashed
	Sealed   int       `json:"sealed"`            // run maps compared
	Origins  []Origin  `json:"origins,omitempty"` // that began in the log after an earlier one
	Findings []Finding `json:"findings"`          // also those of Signatures

	Signatures audit.SignatureReport `json:"signatures"` // of the decisions
}

// signers returns the part of the accepted policy that is about signatures of decisions.
// The store itself names none: that is for the verifier.
func (b *Book) signers() audit.Policy {
	if b.policy == nil || b.own {
		return audit.Policy{}
	}
	return audit.Policy{Signers: b.policy.Signers, Signed: b.policy.Signed}
}

// verifyMost bounds the findings that are listed.
const verifyMost = 100

// Verify reads the whole log and compares it with the newest head, the listed heads, the
// tiles, the bundles of entries and each audit.sealed. If since is not nil, the log must
// continue that head. Without [Book.Accept], it trusts the key that the store itself names.
func (b *Book) Verify(ctx context.Context, since *audit.Head) (v VerifiedLog, err error) {
	_, h, err := b.Checkpoint()
	if err != nil {
		return v, err
	}
	v.Origin, v.Size, v.Root, v.Findings = h.Origin, h.Size, h.Root.String(), []Finding{}
	find := func(sequence uint64, format string, args ...any) {
		if len(v.Findings) < verifyMost {
			v.Findings = append(v.Findings, Finding{sequence, fmt.Sprintf(format, args...)})
		}
	}
	listed, err := b.listed(find)
	if err != nil {
		return v, err
	}
	if root, ok := listed[h.Size]; !ok || root != h.Root {
		find(0, "%s of the audit does not list the newest head, which has %v", headsName, h)
	}
	last, err := b.log.Last(ctx)
	if err != nil {
		return v, err
	}
	if last < uint64(h.Size) { //nolint:gosec // not negative
		find(0, "the log has %d events, and its newest head has %v: it was rolled back", last, h)
	}
	c := &comparison{b: b, v: &v, find: find, listed: listed, signed: audit.NewSignatures("", b.signers())}
	if since != nil && since.Size == 0 {
		since = nil
	}
	err = b.log.Walk(ctx, 1, min(last, uint64(h.Size)), func(m events.Message, sequence uint64, stored time.Time) error { //nolint:gosec // not negative
		err := c.add(m, sequence, stored)
		if err == nil && since != nil && c.tree.Size == since.Size {
			c.then, err = c.tree.Root()
		}
		return err
	})
	if err != nil {
		return v, fmt.Errorf("audit verify: %w", err)
	}
	root, err := c.tree.Root()
	if err != nil {
		return v, err
	}
	if c.tree.Size == h.Size && root != h.Root {
		find(0, "the log leads to the root %s, and its newest head has %v: the log was rewritten", root, h)
	}
	if err := c.origins(ctx, h, find); err != nil {
		return v, err
	}
	if since != nil {
		c.since(*since, h, find)
	}
	v.Signatures = c.signed.Report()
	why, err := b.Halted()
	if why != "" {
		find(0, "the owner makes no head any more: %s", why)
	}
	return v, err
}

// listed returns the roots of the listed heads by their size.
func (b *Book) listed(find func(sequence uint64, format string, args ...any)) (map[int64]audit.Hash, error) {
	text, err := read(b.store, headsName)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("audit: %w", err)
	}
	roots := map[int64]audit.Hash{}
	for _, l := range headLines(text) {
		if had, ok := roots[l.Size]; ok && had != l.Root {
			find(0, "%s of the audit lists two heads of size %d: %s and %s: the log forked", headsName, l.Size, had, l.Root)
		}
		roots[l.Size] = l.Root
	}
	return roots, nil
}
