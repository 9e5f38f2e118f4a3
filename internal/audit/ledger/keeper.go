package ledger

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// When a head and an audit.sealed are due.
const (
	headEvery   = 500 * time.Millisecond // at most
	sealEvery   = time.Minute            // if other events were appended
	sealEvents  = 1 << 12                // or after so many
	stateEvents = 1 << 10                // after which the state is saved, or more with many trials
	headsMost   = 1 << 20                // bytes of heads, of which the newest lines stay
	endWithin   = 10 * time.Second       // a last head at the end
)

// Options configure a [Keeper].
type Options struct {
	Store  string // its directory
	Log    Log
	Logger *slog.Logger
	Stamp  func() events.Stamp
	// Step is called with the name of each step of a head that is durable: folded,
	// listed, signed, witnessed, published. Nil but in tests.
	Step func(step string)
}

// Keeper keeps the ledger of the store that this process owns.
type Keeper struct {
	*Book
	o         Options
	signer    note.Signer // nil without a key: heads are listed and not signed
	witnesses *witnesses

	mu      sync.Mutex
	tree    audit.Tree
	runs    *audit.Runs
	bundle  []byte     // entries of the tree's last bundle that is not full
	head    audit.Head // the newest in heads
	signed  bool       // the head is published
	saved   int64      // size of the saved state
	sealed  int64      // size of the tree at the last audit.sealed
	others  int64      // events since then that are no audit.sealed
	sealing time.Time
}

type headLine struct {
	Size int64      `json:"size"`
	Root audit.Hash `json:"root"`
}

type state struct {
	Tree   audit.Tree  `json:"tree"`
	Rows   []audit.Row `json:"rows"`
	Sealed int64       `json:"sealed"`
	Others int64       `json:"others"`
	Bundle []byte      `json:"bundle"`
}

// Open opens the ledger for the owner of the store, before it appends anything. It folds
// the log up to the newest head and compares the root, and asks the witnesses for a later
// head. It returns [ErrDamaged] if the log is shorter than its newest head, or another
// one, or if a witness knows a later head.
func Open(ctx context.Context, o Options) (_ *Keeper, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("audit: %w", err)
		}
	}()
	b, err := OpenBook(o.Store, o.Log)
	if err != nil {
		return nil, err
	}
	if o.Step == nil {
		o.Step = func(string) {}
	}
	k := &Keeper{Book: b, o: o, runs: &audit.Runs{}, sealing: time.Now()}
	if k.signer, err = b.config.signer(o.Store); err != nil {
		if errors.Is(err, private.ErrNotPrivate) || !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return nil, err
		}
		o.Logger.Warn("heads of the audit are not signed: no key; a process that can read it signs the next", "error", err)
	}
	if k.witnesses, err = witnessesOf(b.config.Policy); err != nil {
		return nil, err
	}
	if k.head, err = k.newest(); err != nil {
		return nil, err
	}
	last, err := o.Log.Last(ctx)
	if err != nil {
		return nil, err
	}
	if last < uint64(k.head.Size) { //nolint:gosec // not negative
		return nil, fmt.Errorf("%w: the log has %d events, and its newest head has %v: it was rolled back: restore log/ from a backup", ErrDamaged, last, k.head)
	}
	if err := k.load(); err != nil {
		return nil, err
	}
	if err := k.foldUntil(ctx, uint64(k.head.Size)); err != nil { //nolint:gosec // not negative
		return nil, err
	}
	root, err := k.tree.Root()
	if err != nil {
		return nil, err
	}
	if k.head.Size > 0 && root != k.head.Root {
		return nil, fmt.Errorf("%w: the log was rewritten: it leads to the root %s at size %d, and its newest head has %v: restore log/ from a backup; both roots are the evidence", ErrDamaged, root, k.head.Size, k.head)
	}
	if err := k.published(); err != nil {
		return nil, err
	}
	return k, k.askFirst(ctx)
}

// newest returns the last head in heads. A line that is cut off was never signed.
func (k *Keeper) newest() (h audit.Head, err error) {
	h.Origin = k.config.Origin
	text, err := read(k.store, headsName)
	if errors.Is(err, fs.ErrNotExist) {
		return h, nil
	}
	if err != nil {
		return h, err
	}
	end := bytes.LastIndexByte(text, '\n') + 1
	for line := range bytes.Lines(text[:end]) {
		var l headLine
		if json.Unmarshal(line, &l) != nil {
			continue // cut off by a crash: the next line followed it
		}
		if l.Size < h.Size || l.Size == h.Size && h.Size > 0 && l.Root != h.Root {
			return h, fmt.Errorf("%w: %s of the audit has the head %s at size %d after %v: restore it from a backup", ErrDamaged, headsName, l.Root, l.Size, h)
		}
		h.Size, h.Root = l.Size, l.Root
	}
	if end > headsMost {
		return h, k.shorten(text[:end])
	}
	return h, nil
}

// shorten keeps the newest half of heads.
func (k *Keeper) shorten(text []byte) error {
	text = text[len(text)/2:]
	text = text[bytes.IndexByte(text, '\n')+1:]
	return durable.WriteBelow(beneath.At(k.store), filepath.Join(k.store, dirName, headsName), text)
}

// load reads the saved state. It is a cache: without a fitting one the log is folded
// from its beginning.
func (k *Keeper) load() error {
	text, err := read(k.store, stateName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var s state
	if err := json.Unmarshal(text, &s); err != nil || s.Tree.Size > k.head.Size || s.Tree.Size < 0 {
		k.o.Logger.Warn("state of the audit unusable; folding the log again", "error", err, "size", s.Tree.Size)
		return nil
	}
	k.tree, k.runs, k.sealed, k.others, k.bundle, k.saved = s.Tree, audit.RunsOf(s.Rows), s.Sealed, s.Others, s.Bundle, s.Tree.Size
	for rest := s.Bundle; len(rest) > 0; {
		var entry []byte
		if entry, rest, err = audit.CutBundle(rest); err != nil {
			return fmt.Errorf("%w: %s of the audit: %w: delete it, it is rebuilt", ErrDamaged, stateName, err)
		}
		k.remember(s.Tree.Size/audit.TileWidth*audit.TileWidth, entry)
	}
	return nil
}

// published checks the published note against the newest head.
func (k *Keeper) published() error {
	_, h, err := k.Checkpoint()
	if errors.Is(err, ErrOff) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if h.Size > k.head.Size || h.Size == k.head.Size && h.Root != k.head.Root {
		return fmt.Errorf("%w: the published head has %v, and %s has %v: restore audit/ and log/ from one backup", ErrDamaged, h, headsName, k.head)
	}
	k.signed = h == k.head
	return nil
}

// foldUntil folds the log up to a sequence.
func (k *Keeper) foldUntil(ctx context.Context, last uint64) error {
	k.mu.Lock()
	next := uint64(k.tree.Size) + 1 //nolint:gosec // not negative
	k.mu.Unlock()
	if next > last {
		return nil
	}
	return k.log.Walk(ctx, next, last, k.fold)
}

// fold adds a message. Full tiles are durable when it returns.
func (k *Keeper) fold(m events.Message, sequence uint64, stored time.Time) error {
	salt, err := k.salts.of(m.Subject, sequence, true)
	if err != nil {
		return err
	}
	entry := audit.Entry(m, sequence, stored, salt)
	hash := audit.EntryHash(entry)
	k.mu.Lock()
	defer k.mu.Unlock()
	if uint64(k.tree.Size)+1 != sequence { //nolint:gosec // not negative
		return fmt.Errorf("%w: event %d follows %d", ErrDamaged, sequence, k.tree.Size)
	}
	k.bundle = audit.AppendBundle(k.bundle, entry)
	if sequence%audit.TileWidth == 0 {
		n := int64(sequence/audit.TileWidth) - 1 //nolint:gosec // not that long
		if err := k.write(audit.TilePath(audit.Entries, n, audit.TileWidth), k.bundle); err != nil {
			return err
		}
		k.bundle, entry = nil, nil
	}
	k.remember(int64(sequence)/audit.TileWidth*audit.TileWidth, entry) //nolint:gosec // not that long
	if err := k.tree.Append(hash, func(level int, n int64, tile []byte) error {
		return k.write(audit.TilePath(level, n, audit.TileWidth), tile)
	}); err != nil {
		return err
	}
	k.runs.Add(m.Subject, sequence, hash)
	if m.Subject == sealedSubject {
		k.sealed, k.others = int64(sequence), 0 //nolint:gosec // as above
	} else {
		k.others++
	}
	return nil
}

// Keep folds the log and makes heads until ctx ends, and a last one then.
func (k *Keeper) Keep(ctx context.Context) {
	defer k.witnesses.close()
	follow := make(chan error, 1)
	go func() {
		for {
			k.mu.Lock()
			next := uint64(k.tree.Size) + 1 //nolint:gosec // not negative
			k.mu.Unlock()
			err := k.log.Walk(ctx, next, 0, k.fold)
			if ctx.Err() != nil || errors.Is(err, ErrDamaged) {
				follow <- err
				return
			}
			k.o.Logger.Warn("audit: log not followed; retrying", "error", err)
			if !pause(ctx, headEvery) {
				follow <- ctx.Err()
				return
			}
		}
	}()
	said := ""
	for pause(ctx, headEvery) {
		err := k.turn(ctx)
		if err == nil {
			said = ""
		} else if ctx.Err() == nil && err.Error() != said {
			said = err.Error()
			k.o.Logger.Error("audit: no head made; retrying", "error", err)
		}
	}
	if err := <-follow; errors.Is(err, ErrDamaged) {
		k.o.Logger.Error("audit halted", "error", err)
		return
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), endWithin)
	defer cancel()
	if err := k.end(last); err != nil {
		k.o.Logger.Warn("audit: no last head; the next owner makes it", "error", err)
	}
}

// end makes the last head of this owner.
func (k *Keeper) end(ctx context.Context) error {
	last, err := k.log.Last(ctx)
	if err == nil {
		err = k.foldUntil(ctx, last)
	}
	if err == nil {
		err = k.makeHead(ctx)
	}
	if err == nil {
		err = k.save()
	}
	return err
}

// turn makes what is due.
func (k *Keeper) turn(ctx context.Context) error {
	wanted := k.wanted()
	k.mu.Lock()
	due := k.others > 0 && (time.Since(k.sealing) >= sealEvery || k.others >= sealEvents)
	k.mu.Unlock()
	if due || wanted {
		if err := k.seal(ctx); err != nil {
			return err
		}
	}
	if err := k.makeHead(ctx); err != nil {
		return err
	}
	if wanted {
		return k.grant()
	}
	return nil
}

// seal appends audit.sealed with the run map of the folded events, and folds it.
func (k *Keeper) seal(ctx context.Context) error {
	k.mu.Lock()
	size, rows := k.tree.Size, k.runs.Rows()
	root, err := k.tree.Root()
	k.mu.Unlock()
	if err != nil || size == 0 {
		return err
	}
	runs, err := audit.RowsRoot(rows)
	if err != nil {
		return err
	}
	d, err := events.NewDecision(k.o.Stamp(), events.Aggregate{}, &events.AuditSealed{
		Size: uint64(size), Root: hex.EncodeToString(root[:]), //nolint:gosec // not negative
		Rows: uint64(len(rows)), Runs: hex.EncodeToString(runs[:]), Key: k.config.Key,
	})
	if err != nil {
		return err
	}
	end, err := k.log.LaneEnd(ctx, events.Aggregate{})
	if err != nil {
		return err
	}
	sequence, err := k.log.Decide(ctx, d, end)
	if err != nil {
		return err
	}
	k.sealing = time.Now()
	for k.size() < int64(sequence) { //nolint:gosec // not that long
		if !pause(ctx, 5*time.Millisecond) {
			return ctx.Err()
		}
	}
	return nil
}

func (k *Keeper) size() int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.tree.Size
}

// makeHead lists, signs, has witnessed and publishes a head of all folded events. Where
// the newest head was not published, it continues with that or with a later one.
func (k *Keeper) makeHead(ctx context.Context) error {
	k.mu.Lock()
	h := audit.Head{Origin: k.config.Origin, Size: k.tree.Size}
	root, err := k.tree.Root()
	k.mu.Unlock()
	if err != nil || h.Size == 0 || h.Size == k.head.Size && k.signed {
		return err
	}
	h.Root = root
	k.o.Step("folded")
	if h.Size != k.head.Size {
		line, err := json.Marshal(headLine{h.Size, h.Root})
		if err != nil {
			return err
		}
		if err := appendLine(k.store, headsName, line); err != nil {
			return err
		}
		k.head, k.signed = h, false
	}
	k.o.Step("listed")
	if h.Size-k.saved >= max(stateEvents, int64(4*k.runs.Len())) {
		if err := k.save(); err != nil {
			return err
		}
	}
	if k.signer == nil {
		return nil
	}
	signed, err := audit.Sign(h, k.signer)
	if err != nil {
		return err
	}
	k.o.Step("signed")
	signed, err = k.witness(ctx, h, signed)
	if err != nil {
		return err
	}
	k.o.Step("witnessed")
	if err := durable.WriteBelow(beneath.At(k.store), filepath.Join(k.store, dirName, checkpointName), signed); err != nil {
		return err
	}
	k.signed = true
	k.o.Step("published")
	return nil
}

// save saves the state, if it is that of the newest head.
func (k *Keeper) save() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.tree.Size != k.head.Size || k.tree.Size == k.saved {
		return nil
	}
	text, err := json.Marshal(state{Tree: k.tree, Rows: k.runs.Rows(), Sealed: k.sealed, Others: k.others, Bundle: k.bundle})
	if err != nil {
		return err
	}
	if err := durable.WriteBelow(beneath.At(k.store), filepath.Join(k.store, dirName, stateName), text); err != nil {
		return err
	}
	k.saved = k.tree.Size
	return nil
}

// A process that is not the owner asks for a head with a new audit.sealed by the file
// want. The owner removes it when the head is published.

func (k *Keeper) wanted() bool {
	_, err := os.Lstat(filepath.Join(k.store, dirName, wantName))
	return err == nil
}

func (k *Keeper) grant() error {
	err := beneath.At(k.store).Remove(filepath.Join(k.store, dirName, wantName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// wantEvery is how often [Book.Want] looks.
const wantEvery = 20 * time.Millisecond

// Want asks the owner for a head that includes a new audit.sealed of all events that are
// in the log now, and returns its note. It waits until ctx ends.
func (b *Book) Want(ctx context.Context) ([]byte, audit.Head, error) {
	bad := func(err error) ([]byte, audit.Head, error) {
		return nil, audit.Head{}, fmt.Errorf("audit checkpoint: %w", err)
	}
	last, err := b.log.Last(ctx)
	if err != nil {
		return bad(err)
	}
	path := filepath.Join(b.store, dirName, wantName)
	if err := durable.WriteBelow(beneath.At(b.store), path, nil); err != nil {
		return bad(err)
	}
	for {
		_, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			signed, h, err := b.Checkpoint()
			if err != nil {
				return bad(err)
			}
			if h.Size > int64(last) { //nolint:gosec // not that long
				return signed, h, nil
			}
			// The owner granted an earlier request.
			if err := durable.WriteBelow(beneath.At(b.store), path, nil); err != nil {
				return bad(err)
			}
		}
		if !pause(ctx, wantEvery) {
			return bad(problem.Errorf(problem.Late, "the owner of the store has published no head of event %d: its log tells why, such as a witness that does not answer; %w", last, ctx.Err()))
		}
	}
}

// pause waits. It returns false when ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
