package ledger

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Prove returns the file that proves the event at a sequence under the newest head. If
// since is not nil, it also proves that the log continues that head.
func (b *Book) Prove(ctx context.Context, sequence uint64, since *audit.Head) ([]byte, error) {
	signed, h, err := b.Checkpoint()
	if err != nil {
		return nil, err
	}
	if sequence == 0 || sequence > uint64(h.Size) { //nolint:gosec // not negative
		return nil, problem.Errorf(problem.NotFound, "audit prove: event %d is not in the newest head (%v): `ckptstore audit checkpoint` makes one", sequence, h)
	}
	var consistency *audit.Consistency
	if since != nil {
		if consistency, err = b.Since(ctx, *since, h); err != nil {
			return nil, fmt.Errorf("audit prove: %w", err)
		}
	}
	var it audit.Item
	err = b.log.Walk(ctx, sequence, sequence, func(m events.Message, sequence uint64, stored time.Time) (err error) {
		it, err = b.item(m, sequence, stored, h, b.hashes(ctx, h))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("audit prove: %w", err)
	}
	proof, err := audit.MarshalProof(it, int64(sequence)-1, signed, consistency) //nolint:gosec // checked above
	if err != nil {
		return nil, fmt.Errorf("audit prove: %w", err)
	}
	p, err := b.OwnPolicy()
	if err != nil {
		return nil, fmt.Errorf("audit prove: %w", err)
	}
	// The verifier's policy decides about witnesses.
	if _, err := audit.VerifyProof(proof, audit.Policy{Logs: p.Logs}, true, nil); err != nil {
		return nil, fmt.Errorf("audit prove: the proof of event %d does not verify: %w", sequence, err)
	}
	return proof, nil
}

// tampered marks an error of reading the tree: the library reports hashes that do not
// lead to the root as a plain error.
func tampered(err error) error {
	if err == nil || errors.Is(err, ErrDamaged) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: %w", audit.ErrTampered, err)
}

// Since proves that a head continues an older one of this log.
func (b *Book) Since(ctx context.Context, old, h audit.Head) (*audit.Consistency, error) {
	c := &audit.Consistency{Size: old.Size}
	if old.Origin != h.Origin {
		var left uint64
		var err error
		if c.Follows, left, err = b.follows(ctx, old.Origin, h); err != nil {
			return nil, err
		}
		if uint64(old.Size) >= left { //nolint:gosec // not negative
			return nil, &audit.ReplacedError{Old: old, New: h, Left: left}
		}
	}
	switch {
	case old.Size > h.Size:
		return nil, &audit.ForkError{Old: old, New: h}
	case old.Size == 0:
		return c, nil
	}
	read := b.hashes(ctx, h)
	var err error
	if c.Root, err = tlog.TreeHash(old.Size, read); err != nil {
		return nil, tampered(err)
	}
	if old.Size < h.Size {
		if c.Proof, err = tlog.ProveTree(h.Size, old.Size, read); err != nil {
			return nil, tampered(err)
		}
	}
	return c, nil
}

// item returns the event at a sequence with the proof that it is in the log of a head,
// whose hashes it reads.
func (b *Book) item(m events.Message, sequence uint64, stored time.Time, h audit.Head, read tlog.HashReader) (it audit.Item, err error) {
	entry, salt, err := b.entry(m, sequence, stored)
	if err != nil {
		return it, err
	}
	it = audit.NewItem(m, entry, salt)
	it.Proof, err = tlog.ProveRecord(h.Size, int64(sequence)-1, read) //nolint:gosec // checked by the caller
	if err != nil {
		return it, tampered(err)
	}
	index := int64(sequence) - 1 //nolint:gosec // as above
	if err := tlog.CheckRecord(it.Proof, h.Size, h.Root, index, audit.EntryHash(entry)); err != nil {
		return it, fmt.Errorf("%w: event %d of the log is not the one of the head: %w", audit.ErrTampered, sequence, err)
	}
	return it, nil
}
