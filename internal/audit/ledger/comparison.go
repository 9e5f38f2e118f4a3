package ledger

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
)

// comparison compares the messages of a log with the files of its ledger.
type comparison struct {
	b      *Book
	v      *VerifiedLog
	find   func(sequence uint64, format string, args ...any)
	listed map[int64]audit.Hash // roots of the listed heads; nil after the first that differs
	tree   audit.Tree
	bundle []byte
	signed *audit.Signatures
	then   audit.Hash // the root at the size of the older head
	began  []sealedAt // each audit.sealed that quotes a note

	// The state that the next audit.sealed describes lies a little before it.
	behind  audit.Tree
	runs    audit.Runs
	waiting []leafOf // between behind and tree
}

type sealedAt struct {
	audit.SealedMap
	sequence uint64
}

// origins finds the origins that began in the log.
func (c *comparison) origins(ctx context.Context, h audit.Head, find func(sequence uint64, format string, args ...any)) error {
	logs, err := c.b.quotable()
	if err != nil {
		return err
	}
	for _, s := range c.began {
		o, err := c.b.origin(ctx, s.SealedMap, s.sequence, h, logs)
		if err != nil {
			find(s.sequence, "%v", err)
			continue
		}
		c.v.Origins = append(c.v.Origins, o)
	}
	return nil
}

// since compares the log with an older head.
func (c *comparison) since(old, h audit.Head, find func(sequence uint64, format string, args ...any)) {
	if old.Origin == h.Origin {
		if old.Size > h.Size || c.then != old.Root {
			find(0, "%v", &audit.ForkError{Old: old, New: h, At: c.then})
		}
		return
	}
	origin, left := h.Origin, uint64(0)
	for _, o := range slices.Backward(c.v.Origins) {
		if origin != old.Origin && o.Origin == origin {
			if !o.Checked {
				find(o.Sequence, "%v: nothing shows that the log %s follows %s, and so the older head's: add a line `log` with the key of %s", audit.ErrPolicy, o.Origin, o.Follows, o.Follows)
				return
			}
			origin, left = o.Follows, o.Sequence
		}
	}
	switch {
	case origin != old.Origin:
		find(0, "the older head is of the log %s, and no decision of this log, %s, shows that it follows that one", old.Origin, h.Origin)
	case uint64(old.Size) >= left: //nolint:gosec // not negative
		find(left, "%v", &audit.ReplacedError{Old: old, New: h, Left: left})
	case c.then != old.Root:
		find(left, "%v", &audit.ReplacedError{Old: old, New: h, Left: left, At: c.then})
	}
}

type leafOf struct {
	subject string
	hash    audit.Hash
}

// waitMost bounds the memory of a comparison. An audit.sealed that is further from its
// state is a finding.
const waitMost = 1 << 20

func (c *comparison) add(m events.Message, sequence uint64, stored time.Time) error {
	entry, _, err := c.b.entry(m, sequence, stored)
	if err != nil {
		return err
	}
	if v, decides := c.signed.Message(m, sequence, stored); decides && v.Problem != "" {
		c.find(sequence, "%s", v.Problem)
	}
	if m.Subject == sealedSubject {
		if err := c.sealed(m, sequence); err != nil {
			return err
		}
	}
	hash := audit.EntryHash(entry)
	c.waiting = append(c.waiting, leafOf{m.Subject, hash})
	if len(c.waiting) > waitMost {
		if err := c.advance(c.behind.Size + 1); err != nil {
			return err
		}
	}
	c.bundle = audit.AppendBundle(c.bundle, entry)
	c.v.Events++
	err = c.tree.Append(hash, func(level int, n int64, tile []byte) error {
		c.compare(audit.TilePath(level, n, audit.TileWidth), tile, sequence)
		return nil
	})
	if c.tree.Size%audit.TileWidth == 0 {
		c.compare(audit.TilePath(audit.Entries, c.tree.Size/audit.TileWidth-1, audit.TileWidth), c.bundle, sequence)
		c.bundle = c.bundle[:0]
	}
	if root, ok := c.listed[c.tree.Size]; ok && err == nil {
		var leads audit.Hash
		if leads, err = c.tree.Root(); err == nil && leads != root {
			c.find(sequence, "%s of the audit lists the root %s at size %d, and the log leads to %s: the log was rewritten", headsName, root, c.tree.Size, leads)
			c.listed = nil // those that follow differ too
		}
	}
	return err
}

// advance moves the state behind to a size.
func (c *comparison) advance(size int64) error {
	for ; c.behind.Size < size; c.waiting = c.waiting[1:] {
		w := c.waiting[0]
		if err := c.behind.Append(w.hash, func(int, int64, []byte) error { return nil }); err != nil {
			return err
		}
		c.runs.Add(w.subject, uint64(c.behind.Size), w.hash) //nolint:gosec // not negative
	}
	return nil
}

// compare compares a file with what the log leads to. A missing file is computed when it
// is asked for.
func (c *comparison) compare(path string, want []byte, sequence uint64) {
	got, err := c.b.file(path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		c.find(sequence, "%s: %v", path, err)
	} else if string(got) != string(want) {
		c.find(sequence, "%s has other bytes than the log leads to", path)
	}
}

// sealed compares an audit.sealed with the log before it.
func (c *comparison) sealed(m events.Message, sequence uint64) error {
	s, err := audit.ParseSealed(m, sequence)
	switch {
	case err != nil:
		c.find(sequence, "%v", err)
		return nil
	case s.Size < c.behind.Size:
		c.find(sequence, "audit.sealed is of size %d, and an earlier one of a later state", s.Size)
		return nil
	}
	if err := c.advance(s.Size); err != nil {
		return err
	}
	c.v.Sealed++
	if s.Previous != "" {
		c.began = append(c.began, sealedAt{s, sequence})
	}
	if root, err := c.behind.Root(); err != nil || root != s.Root {
		c.find(sequence, "the root at size %d is %s, and audit.sealed names %s", s.Size, root, s.Root)
	}
	rows := c.runs.Rows()
	if runs, err := audit.RowsRoot(rows); err != nil || runs != s.Runs || int64(len(rows)) != s.Rows {
		c.find(sequence, "the root of the run map at size %d is %s, and audit.sealed names %s", s.Size, runs, s.Runs)
	}
	return nil
}
