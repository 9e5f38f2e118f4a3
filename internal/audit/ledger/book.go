package ledger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Log is what a ledger reads of the log, and where it appends audit.sealed. Walk calls
// each with the messages from a sequence to another in order; with until 0 it follows
// the log until ctx ends. A decision is durable when Decide returns.
type Log interface {
	Walk(ctx context.Context, from, until uint64, each func(m events.Message, sequence uint64, stored time.Time) error) error
	Last(ctx context.Context) (uint64, error)
	LaneEnd(ctx context.Context, agg events.Aggregate) (uint64, error)
	Decide(ctx context.Context, d events.Decision, after uint64) (uint64, error)
}

// Book reads a ledger, in any process that can read the directory and the log. Its
// methods may be called concurrently.
type Book struct {
	store       string
	log         Log
	config      Config
	salts       *salts
	policy      *audit.Policy // see Accept
	unwitnessed bool          // the policy may want no cosignature
	own         bool          // the policy is that of the store itself

	mu   sync.Mutex
	from int64    // index of the first entry in tail
	tail [][]byte // entries behind the last full bundle
}

// OpenBook opens the ledger of the store in a directory.
func OpenBook(store string, log Log) (*Book, error) {
	c, err := ReadConfig(store)
	if err != nil {
		return nil, err
	}
	return &Book{store: store, log: log, config: c, salts: newSalts(store)}, nil
}

// Config returns the ledger's configuration.
func (b *Book) Config() Config { return b.config }

// Accept makes the book accept heads by a policy. Without it, the key that the store's
// configuration names suffices, and a user who can write to the store can replace that. It
// must not be called concurrently with other methods.
func (b *Book) Accept(p audit.Policy, acceptUnwitnessed bool) {
	b.policy, b.unwitnessed, b.own = &p, acceptUnwitnessed, false
}

// AcceptOwn makes the book accept heads by the policy that the store itself names: see
// [Book.OwnPolicy]. It must not be called concurrently with other methods.
func (b *Book) AcceptOwn(acceptUnwitnessed bool) error {
	p, err := b.OwnPolicy()
	if err == nil {
		b.policy, b.unwitnessed, b.own = &p, acceptUnwitnessed, true
	}
	return err
}

// quotable returns the keys by which notes count that an audit.sealed quotes: those of the
// accepted policy, or the keys that the store itself names.
func (b *Book) quotable() ([]note.Verifier, error) {
	if b.policy != nil && !b.own {
		return b.policy.Logs, nil
	}
	return b.Logs()
}

// OwnPolicy returns the policy that the store itself names: its key and its witnesses.
func (b *Book) OwnPolicy() (p audit.Policy, err error) {
	v, err := note.NewVerifier(b.config.Key)
	if err == nil {
		p, err = audit.ParsePolicy(b.config.Policy)
	}
	if err != nil {
		return p, fmt.Errorf("%w: %s of the audit: %w", ErrDamaged, configName, err)
	}
	p.Logs = []note.Verifier{v}
	return p, nil
}

// Checkpoint returns the newest published note and its head, whose signatures are checked:
// see [Book.Accept].
func (b *Book) Checkpoint() ([]byte, audit.Head, error) {
	signed, err := read(b.store, checkpointName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, audit.Head{}, fmt.Errorf("audit: %w: no head was published yet: open the store for writing, or run `ckptstore audit checkpoint`", ErrOff)
	}
	if err != nil {
		return nil, audit.Head{}, fmt.Errorf("audit: %w", err)
	}
	h, err := b.opens(signed)
	if err != nil {
		if old, ok := b.config.earlier(signed); ok {
			err = fmt.Errorf("audit: %w: no head was published yet under the origin %s, and the newest of %s has %v: open the store for writing, or run `ckptstore audit checkpoint`", ErrOff, b.config.Origin, old.Origin, old)
		}
	}
	return signed, h, err
}

// opens returns the head of a note: see [Book.Accept].
func (b *Book) opens(signed []byte) (audit.Head, error) {
	if b.policy != nil {
		return b.policy.Open(signed, b.unwitnessed)
	}
	v, err := note.NewVerifier(b.config.Key)
	if err != nil {
		return audit.Head{}, fmt.Errorf("audit: %w: the verifier key: %w", ErrDamaged, err)
	}
	return audit.OpenHead(signed, v)
}

// entry returns the entry of a message.
func (b *Book) entry(m events.Message, sequence uint64, stored time.Time) ([]byte, audit.Salt, error) {
	salt, err := b.salts.of(m.Subject, sequence, false)
	if err != nil {
		return nil, salt, err
	}
	return audit.Entry(m, sequence, stored, salt), salt, nil
}

// entries returns the entries of the bundle n, as far as width.
func (b *Book) entries(ctx context.Context, n int64, width int) (list [][]byte, err error) {
	bundle, err := b.file(audit.TilePath(audit.Entries, n, audit.TileWidth))
	if err == nil {
		for len(list) < width {
			var entry []byte
			if entry, bundle, err = audit.CutBundle(bundle); err != nil {
				return nil, fmt.Errorf("%w: bundle %d of the audit's entries: %w", ErrDamaged, n, err)
			}
			list = append(list, entry)
		}
		return list, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	first := n * audit.TileWidth
	if b.from != first || len(b.tail) < width {
		b.from, b.tail = first, nil
		err = b.log.Walk(ctx, uint64(first)+1, uint64(first)+uint64(width), func(m events.Message, sequence uint64, stored time.Time) error { //nolint:gosec // not negative
			entry, _, err := b.entry(m, sequence, stored)
			b.tail = append(b.tail, entry)
			return err
		})
		if err != nil {
			b.tail = nil
			return nil, err
		}
	}
	return b.tail[:width], nil
}

// remember keeps the entry of a sequence behind the last full bundle, which begins at an
// index, so that it is not read from the log again. It keeps only the entry that follows
// the others: a reader may have replaced them in the meantime.
func (b *Book) remember(from int64, sequence uint64, entry []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.from != from {
		b.from, b.tail = from, nil
	}
	if entry != nil && int64(sequence)-1 == from+int64(len(b.tail)) { //nolint:gosec // not that long
		b.tail = append(b.tail, entry)
	}
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

// sealedSubject is the subject of each audit.sealed.
var sealedSubject = events.Subject(events.Scope{Run: events.None, Trial: events.None, Actor: events.Server}, events.AuditSealed{}.Kind())

// tile returns the first hashes of a tile, in bytes. Full tiles are files; others, and
// full ones whose file is missing, are computed.
func (b *Book) tile(ctx context.Context, level int, n int64, width int) ([]byte, error) {
	data, err := b.file(audit.TilePath(level, n, audit.TileWidth))
	if err == nil {
		if len(data) != audit.TileWidth*tlog.HashSize {
			return nil, fmt.Errorf("%w: tile %d of level %d of the audit has %d bytes", ErrDamaged, n, level, len(data))
		}
		return data[:width*tlog.HashSize], nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	hashes := make([]audit.Hash, 0, width)
	if level == 0 {
		list, err := b.entries(ctx, n, width)
		if err != nil {
			return nil, err
		}
		for _, e := range list {
			hashes = append(hashes, audit.EntryHash(e))
		}
		return audit.TileOf(hashes), nil
	}
	for i := range int64(width) {
		below, err := b.tile(ctx, level-1, n*audit.TileWidth+i, audit.TileWidth)
		if err != nil {
			return nil, err
		}
		h, err := audit.TileRoot(below)
		if err != nil {
			return nil, err
		}
		hashes = append(hashes, h)
	}
	return audit.TileOf(hashes), nil
}

func (b *Book) file(path string) ([]byte, error) { return read(b.store, path) }

// hashes reads hashes of the tree of a head. What tiles have is checked against its root.
func (b *Book) hashes(ctx context.Context, h audit.Head) tlog.HashReader {
	return tlog.TileHashReader(h.Tree(), &tiles{b: b, ctx: ctx, kept: map[tlog.Tile][]byte{}})
}

// tiles implements [tlog.TileReader] for one call. It keeps the tiles that it has read.
type tiles struct {
	b    *Book
	ctx  context.Context //nolint:containedctx // the interface has none
	kept map[tlog.Tile][]byte
}

// tilesMost bounds the tiles that are kept, of 8 KiB each. The proof of one event needs
// about two for each level, and of events in order mostly the same.
const tilesMost = 128

var _ tlog.TileReader = (*tiles)(nil)

// Height implements [tlog.TileReader].
func (*tiles) Height() int { return audit.TileHeight }

// ReadTiles implements [tlog.TileReader].
func (t *tiles) ReadTiles(list []tlog.Tile) (out [][]byte, err error) {
	for _, x := range list {
		data := t.kept[x]
		if data == nil {
			if data, err = t.b.tile(t.ctx, x.L, x.N, x.W); err != nil {
				return nil, err
			}
		}
		out = append(out, data)
	}
	return out, nil
}

// SaveTiles implements [tlog.TileReader].
func (t *tiles) SaveTiles(list []tlog.Tile, data [][]byte) {
	if len(t.kept) > tilesMost {
		clear(t.kept)
	}
	for i, x := range list {
		t.kept[x] = data[i]
	}
}
