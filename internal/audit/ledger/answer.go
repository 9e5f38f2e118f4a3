package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
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

// Blobs returns a content that is kept outside the log.
type Blobs func(ctx context.Context, claim events.Blob) ([]byte, error)

// ExportOptions choose what is in a bundle.
type ExportOptions struct {
	Run         string // as a user names it
	From, Until uint64 // events with their content; Until 0: to the end
	Since       *audit.Head
	Blobs       Blobs
}

// Export writes a bundle with the events of a run. It proves that the run has no others
// up to the newest audit.sealed of the newest head.
func (b *Book) Export(ctx context.Context, o ExportOptions, to io.Writer) error {
	bad := func(err error) error { return fmt.Errorf("audit export: %w", err) }
	signed, h, err := b.Checkpoint()
	if err != nil {
		return bad(err)
	}
	head := audit.BundleHead{Format: audit.BundleFormat, Run: events.EncodeName(o.Run), From: max(o.From, 1), Until: o.Until, Checkpoint: string(signed)}
	if o.Since != nil {
		if head.Consistency, err = b.Since(ctx, *o.Since, h); err != nil {
			return bad(err)
		}
	}
	sealedAt, sealed, err := b.lastSealed(ctx, h)
	if err != nil {
		return bad(err)
	}
	read := b.hashes(ctx, h)
	if err := b.log.Walk(ctx, sealedAt, sealedAt, func(m events.Message, sequence uint64, stored time.Time) (err error) {
		head.Sealed, err = b.item(m, sequence, stored, h, read)
		return err
	}); err != nil {
		return bad(err)
	}
	if head.Until == 0 || head.Until > uint64(sealed.Size) { //nolint:gosec // not negative
		head.Until = uint64(sealed.Size) //nolint:gosec // as above
	}
	if head.From > head.Until {
		return bad(problem.Errorf(problem.Invalid, "no event lies from %d to %d: the newest audit.sealed covers events up to %d: `ckptstore audit checkpoint` makes one", head.From, head.Until, sealed.Size))
	}
	// The run map is computed from the log, which also counts the items.
	runs := audit.Runs{}
	var keys []uint64 // events about keys
	if err := b.eachEntry(ctx, sealed.Size, func(leaf audit.Leaf, entry []byte) error {
		runs.Add(leaf.Subject, leaf.Sequence, audit.EntryHash(entry))
		run, trial := audit.Trial(leaf.Subject)
		if run == head.Run {
			head.Items++
		}
		if run == audit.NoRun && trial == events.Keys {
			keys = append(keys, leaf.Sequence)
		}
		return nil
	}); err != nil {
		return bad(err)
	}
	rows := runs.Rows()
	root, err := audit.RowsRoot(rows)
	if err != nil {
		return bad(err)
	}
	if root != sealed.Runs {
		return bad(fmt.Errorf("%w: the run map of event %d differs from that of the log: %s, not %s", audit.ErrTampered, sealedAt, sealed.Runs, root))
	}
	if head.Items == 0 {
		return bad(problem.Errorf(problem.NotFound, "the log has no event of run %q up to event %d, which the newest audit.sealed covers: if the run is newer, `ckptstore audit checkpoint` makes one", o.Run, sealed.Size))
	}
	if head.Rows, err = audit.ProveRun(rows, head.Run); err != nil {
		return bad(err)
	}
	if len(keys) > 0 {
		if err := b.keys(ctx, &head, keys, rows, h, read); err != nil {
			return bad(err)
		}
	}
	out := json.NewEncoder(to)
	if err := out.Encode(head); err != nil {
		return bad(err)
	}
	w := &itemWriter{b: b, o: o, head: head, h: h, read: read, out: out}
	for n := int64(0); n*audit.TileWidth < sealed.Size; n++ {
		if err := w.bundle(ctx, n, int(min(audit.TileWidth, sealed.Size-n*audit.TileWidth))); err != nil {
			return bad(err)
		}
	}
	return nil
}

// keys adds to a bundle what its signatures are checked with: see [audit.BundleHead].
func (b *Book) keys(ctx context.Context, head *audit.BundleHead, keys []uint64, rows []audit.Row, h audit.Head, read tlog.HashReader) (err error) {
	if head.KeyRows, err = audit.ProveRun(rows, audit.NoRun); err != nil {
		return err
	}
	for _, at := range append([]uint64{1}, keys...) {
		if err := b.log.Walk(ctx, at, at, func(m events.Message, sequence uint64, stored time.Time) error {
			it, err := b.item(m, sequence, stored, h, read)
			if sequence == 1 {
				head.Created = &it
			} else {
				head.Keys = append(head.Keys, it)
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// itemWriter writes the items of a run.
type itemWriter struct {
	b    *Book
	o    ExportOptions
	head audit.BundleHead
	h    audit.Head
	read tlog.HashReader
	out  *json.Encoder
}

// bundle writes the items of the run in a bundle of entries. Messages are read from the log
// at once from the first to the last that has its content: a run may be a small part of a
// long log, or most of it.
func (w *itemWriter) bundle(ctx context.Context, n int64, width int) error {
	var own []audit.Leaf
	var entries [][]byte
	if err := w.b.eachOf(ctx, n, width, func(leaf audit.Leaf, entry []byte) error {
		if run, _ := audit.Trial(leaf.Subject); run == w.head.Run {
			own, entries = append(own, leaf), append(entries, entry)
		}
		return nil
	}); err != nil {
		return err
	}
	within := func(l audit.Leaf) bool { return w.head.From <= l.Sequence && l.Sequence <= w.head.Until }
	first := slices.IndexFunc(own, within)
	if first < 0 {
		first = len(own)
	}
	end := first
	for end < len(own) && within(own[end]) {
		end++
	}
	for _, entry := range entries[:first] {
		if err := w.out.Encode(audit.Item{Entry: entry}); err != nil {
			return err
		}
	}
	if first < end {
		if err := w.contents(ctx, own[first:end]); err != nil {
			return err
		}
	}
	for _, entry := range entries[end:] {
		if err := w.out.Encode(audit.Item{Entry: entry}); err != nil {
			return err
		}
	}
	return nil
}

// contents writes items with their content.
func (w *itemWriter) contents(ctx context.Context, own []audit.Leaf) error {
	err := w.b.log.Walk(ctx, own[0].Sequence, own[len(own)-1].Sequence, func(m events.Message, sequence uint64, stored time.Time) error {
		if len(own) == 0 || own[0].Sequence != sequence {
			return nil // of another run
		}
		own = own[1:]
		it, err := w.b.item(m, sequence, stored, w.h, w.read)
		if err != nil {
			return err
		}
		if claim := audit.Claim(m); claim.Digest != "" {
			if it.Blob, err = w.o.Blobs(ctx, claim); err != nil {
				return fmt.Errorf("event %d: %w", sequence, err)
			}
		}
		return w.out.Encode(it)
	})
	if err == nil && len(own) > 0 {
		err = fmt.Errorf("%w: the log lacks event %d", ErrDamaged, own[0].Sequence)
	}
	return err
}

// eachEntry yields the entries of the first events, from the bundles of entries.
func (b *Book) eachEntry(ctx context.Context, size int64, each func(leaf audit.Leaf, entry []byte) error) error {
	for n := int64(0); n*audit.TileWidth < size; n++ {
		if err := b.eachOf(ctx, n, int(min(audit.TileWidth, size-n*audit.TileWidth)), each); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// eachOf yields the first entries of a bundle of entries.
func (b *Book) eachOf(ctx context.Context, n int64, width int, each func(leaf audit.Leaf, entry []byte) error) error {
	list, err := b.entries(ctx, n, width)
	if err != nil {
		return err
	}
	for i, entry := range list {
		leaf, err := audit.ParseEntry(entry)
		if err == nil && leaf.Sequence != uint64(n*audit.TileWidth)+uint64(i)+1 { //nolint:gosec // not negative
			err = fmt.Errorf("%w: it is of event %d", audit.ErrTampered, leaf.Sequence)
		}
		if err != nil {
			return fmt.Errorf("%w: entry %d of the audit: %w", ErrDamaged, n*audit.TileWidth+int64(i)+1, err)
		}
		if err := each(leaf, entry); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// lastSealed returns the last audit.sealed that a head includes.
func (b *Book) lastSealed(ctx context.Context, h audit.Head) (at uint64, s audit.SealedMap, err error) {
	for n := (h.Size - 1) / audit.TileWidth; n >= 0 && at == 0 && h.Size > 0; n-- {
		list, err := b.entries(ctx, n, int(min(audit.TileWidth, h.Size-n*audit.TileWidth)))
		if err != nil {
			return 0, s, err
		}
		for _, entry := range list {
			leaf, err := audit.ParseEntry(entry)
			if err != nil {
				return 0, s, fmt.Errorf("%w: %w", ErrDamaged, err)
			}
			if leaf.Subject == sealedSubject {
				at = leaf.Sequence
			}
		}
	}
	if at == 0 {
		return 0, s, problem.Errorf(problem.NotFound, "the newest head (%v) includes no audit.sealed: `ckptstore audit checkpoint` makes one", h)
	}
	err = b.log.Walk(ctx, at, at, func(m events.Message, sequence uint64, _ time.Time) (err error) {
		s, err = audit.ParseSealed(m, sequence)
		return err
	})
	return at, s, err
}

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

var sealedSubject = events.Subject(events.Scope{Run: events.None, Trial: events.None, Actor: events.Server}, events.AuditSealed{}.Kind())
