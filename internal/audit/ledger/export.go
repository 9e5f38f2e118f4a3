package ledger

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

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
