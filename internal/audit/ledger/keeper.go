package ledger

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/private"
)

// When a head and an audit.sealed are due.
const (
	headEvery   = 500 * time.Millisecond // at most
	sealEvery   = time.Minute            // if other events were appended
	sealEvents  = 1 << 12                // or after so many
	sealWithin  = 10 * time.Second       // for an audit.sealed to be appended and folded
	stateEvents = 1 << 10                // after which the state is saved, or more with many trials
	headsMost   = 1 << 20                // bytes of heads, of which the newest lines stay
	pendingMost = 1 << 8                 // full tiles and bundles that are no files yet
	endWithin   = 10 * time.Second       // a last head at the end
)

// Options configure a [Keeper].
type Options struct {
	Store  string // its directory
	Log    Log
	Logger *slog.Logger
	Stamp  func() events.Stamp
	// Fed is set if the messages come by [Keeper.Feed]. The keeper then reads from the log
	// only what was not fed.
	Fed bool
	// Lost is closed when another owner has taken the store: the keeper then writes
	// nothing more. Nil: never.
	Lost <-chan struct{}
	// Reread, when set, counts the events that this keeper reads from the log, in addition to
	// those that are counted already, such as by the keeper of the owner before.
	Reread *atomic.Int64
	// Step is called before each write of the owner, and again when it is durable: done.
	// Its error counts as one of the write. Nil but in tests.
	Step func(step string, done bool) error
}

// Keeper keeps the ledger of the store that this process owns.
type Keeper struct {
	*Book
	o         Options
	disk      *disk
	signer    note.Signer // nil without a key: heads are listed and not signed
	witnesses *witnesses
	anchor    anchor
	known     uint64 // the log up to here has salts: it was hashed by earlier owners
	vouched   bool   // the key has signed a head or a state that the log leads to

	mu      sync.Mutex
	tree    audit.Tree
	runs    *audit.Runs
	bundle  []byte     // entries of the tree's last bundle that is not full
	room    int        // bytes of the last full bundle
	pending []tile     // full, and no files yet: see flush
	sealed  int64      // size of the tree at the last audit.sealed
	others  int64      // events since then that are no audit.sealed
	head    audit.Head // the newest in heads
	listed  int        // bytes of heads
	signed  bool       // the head is published
	saved   int64      // size of the saved state
	sealing time.Time
	granted string // the request that the last audit.sealed is for
	begun   bool   // the log has an audit.sealed of this key

	flushing sync.Mutex // held while pending tiles are written
	feed     feed
	reread   *atomic.Int64 // events that were read from the log, and not fed
}

// Open opens the ledger for the owner of the store, before it appends anything. It folds
// the log up to the newest head and compares the root, compares what a new origin follows,
// and asks the witnesses for a later head. It returns [ErrDamaged] if the log is shorter
// than its newest head, or another one, or if a witness knows a later head. Nothing is
// signed before the log is compared with all that is kept here.
func Open(ctx context.Context, o Options) (_ *Keeper, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("audit: %w", err)
		}
	}()
	b, err := OpenBook(o.Store, o.Log)
	if err == nil {
		err = b.salts.open()
	}
	if err != nil {
		return nil, err
	}
	if o.Step == nil {
		o.Step = func(string, bool) error { return nil }
	}
	if o.Reread == nil {
		o.Reread = new(atomic.Int64)
	}
	k := &Keeper{reread: o.Reread, feed: feed{grown: make(chan struct{}, 1)}, Book: b, o: o, disk: &disk{store: o.Store, lost: o.Lost, step: o.Step}, runs: &audit.Runs{}, sealing: time.Now()}
	b.salts.disk = k.disk
	if k.signer, err = b.config.signer(o.Store); err != nil {
		if errors.Is(err, private.ErrNotPrivate) || !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return nil, err
		}
		o.Logger.Warn("heads of the audit are not signed: no key; a process that can read it signs the next", "error", err)
	}
	if k.witnesses, err = witnessesOf(b.config.Policy); err != nil {
		return nil, err
	}
	if err := k.compare(ctx); err != nil {
		return nil, err
	}
	quoted, err := k.quoted(ctx)
	if err != nil {
		return nil, err
	}
	if err := k.askFirst(ctx); err != nil {
		return nil, err
	}
	if err := k.begin(ctx, quoted); err != nil {
		k.witnesses.close()
		return nil, err
	}
	return k, k.resume()
}

// compare folds the log up to the newest head, and compares it with what earlier owners
// have listed, published and kept next to the key.
func (k *Keeper) compare(ctx context.Context) (err error) {
	if k.head, err = k.newest(); err != nil {
		return err
	}
	if k.signer != nil {
		if k.anchor, err = readAnchor(k.config); err != nil {
			return err
		}
	}
	last, err := k.log.Last(ctx)
	if err != nil {
		return err
	}
	if last < uint64(k.head.Size) { //nolint:gosec // not negative
		return fmt.Errorf("%w: the log has %d events, and its newest head has %v: it was rolled back: restore log/ from a backup", ErrDamaged, last, k.head)
	}
	if err := k.anchor.reached(last); err != nil {
		return err
	}
	k.known = uint64(max(k.head.Size, k.anchor.Size)) //nolint:gosec // not negative
	if err := k.load(); err != nil {
		return err
	}
	if err := k.foldUntil(ctx, uint64(k.head.Size)); err != nil { //nolint:gosec // not negative
		return err
	}
	root, err := k.tree.Root()
	if err != nil {
		return err
	}
	if k.head.Size > 0 && root != k.head.Root {
		return fmt.Errorf("%w: the log was rewritten: it leads to the root %s at size %d, and its newest head has %v: restore log/ from a backup; both roots are the evidence", ErrDamaged, root, k.head.Size, k.head)
	}
	if err := k.published(ctx); err != nil {
		return err
	}
	return k.checkAnchor(ctx)
}

// foldUntil folds the log up to a sequence. Full tiles are durable when it returns.
func (k *Keeper) foldUntil(ctx context.Context, last uint64) error {
	err := k.walkUntil(ctx, last)
	return errors.Join(err, k.flush())
}

func (k *Keeper) walkUntil(ctx context.Context, last uint64) error {
	next := uint64(k.size()) + 1 //nolint:gosec // not negative
	if next > last {
		return nil
	}
	return k.log.Walk(ctx, next, last, func(m events.Message, sequence uint64, stored time.Time) error {
		k.reread.Add(1)
		return k.fold(m, sequence, stored)
	})
}

// fold adds a message. If it fails, the state is as before, so that the message can be
// folded again.
func (k *Keeper) fold(m events.Message, sequence uint64, stored time.Time) error {
	salt, err := k.salts.of(m.Subject, sequence, sequence > k.known)
	if err != nil {
		return err
	}
	k.mu.Lock()
	full := len(k.pending) >= pendingMost
	k.mu.Unlock()
	if full {
		if err := k.flush(); err != nil {
			return err
		}
	}
	entry := audit.Entry(m, sequence, stored, salt)
	hash := audit.EntryHash(entry)
	k.mu.Lock()
	defer k.mu.Unlock()
	if uint64(k.tree.Size)+1 != sequence { //nolint:gosec // not negative
		return fmt.Errorf("%w: event %d follows %d", ErrDamaged, sequence, k.tree.Size)
	}
	if k.bundle == nil {
		k.bundle = make([]byte, 0, k.room)
	}
	k.bundle = audit.AppendBundle(k.bundle, entry)
	if sequence%audit.TileWidth == 0 {
		n := int64(sequence/audit.TileWidth) - 1 //nolint:gosec // not that long
		k.pending = append(k.pending, tile{audit.TilePath(audit.Entries, n, audit.TileWidth), k.bundle})
		k.bundle, k.room, entry = nil, len(k.bundle), nil
	}
	if err := k.tree.Append(hash, func(level int, n int64, data []byte) error {
		k.pending = append(k.pending, tile{audit.TilePath(level, n, audit.TileWidth), data})
		return nil
	}); err != nil {
		return err
	}
	k.remember(int64(sequence)/audit.TileWidth*audit.TileWidth, sequence, entry) //nolint:gosec // not that long
	k.runs.Add(m.Subject, sequence, hash)
	if m.Subject == sealedSubject {
		k.begun = k.begun || k.config.begins(m, sequence)
		k.sealed, k.others = int64(sequence), 0 //nolint:gosec // as above
	} else {
		k.others++
	}
	return nil
}

// flush makes the full tiles durable that are no files yet. A head includes a tile only
// after that. Profile: fold took 11 µs of CPU time an event while it wrote each tile itself,
// of which 4.6 µs were the ten or so system calls that sync (file, directory and the
// directories above) for each 256 events, twice; the log's own syncs waited for them. With
// one write for all tiles of a head it takes 2 µs.
func (k *Keeper) flush() error {
	k.flushing.Lock()
	defer k.flushing.Unlock()
	k.mu.Lock()
	list := k.pending
	k.mu.Unlock()
	if len(list) == 0 {
		return nil
	}
	if err := k.disk.tiles(list); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pending = append([]tile(nil), k.pending[len(list):]...)
	return nil
}

// Keep folds the log and makes heads until ctx ends, and a last one then. It ends early
// if the store is lost to another owner, or if the log contradicts the ledger.
func (k *Keeper) Keep(ctx context.Context) {
	defer k.witnesses.close()
	live, halt := context.WithCancel(ctx)
	defer halt()
	followed := make(chan error, 1)
	go func() {
		err := k.follow(live)
		if errors.Is(err, ErrDamaged) {
			k.halt(err)
			halt()
		}
		followed <- err
	}()
	var heads repeated
	damaged := false
	for !damaged && pause(live, headEvery) && k.disk.held() == nil {
		err := k.flush()
		if damaged = errors.Is(err, ErrDamaged); damaged {
			k.halt(err)
			break
		}
		if err == nil {
			err = k.turn(live)
		}
		if live.Err() == nil && heads.changed(err) && err != nil {
			k.o.Logger.Error("audit: no head made; retrying", "error", err)
		}
	}
	halt()
	if err := <-followed; damaged || errors.Is(err, ErrDamaged) {
		return
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), endWithin)
	defer cancel()
	if err := k.end(last); err != nil {
		k.o.Logger.Warn("audit: no last head; the next owner makes it", "error", err)
	}
}

// follow folds the log until ctx ends or the log contradicts the ledger.
func (k *Keeper) follow(ctx context.Context) error {
	if k.o.Fed {
		return k.followFed(ctx)
	}
	var walks repeated
	for {
		err := k.log.Walk(ctx, uint64(k.size())+1, 0, k.fold) //nolint:gosec // not negative
		if errors.Is(err, ErrDamaged) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if walks.changed(err) {
			k.o.Logger.Warn("audit: log not followed; retrying", "error", err)
		}
		if !pause(ctx, headEvery) {
			return ctx.Err()
		}
	}
}

// repeated tells whether an error has another cause than the last.
type repeated struct{ last string }

func (r *repeated) changed(err error) bool {
	text := causeOf(err)
	changed := err != nil && text != r.last
	r.last = text
	return changed
}

// end makes the last head of this owner.
func (k *Keeper) end(ctx context.Context) error {
	if err := k.disk.held(); err != nil {
		return err
	}
	last, err := k.log.Last(ctx)
	if err == nil {
		err = k.foldUntil(ctx, last)
	}
	if err == nil {
		err = k.makeHead(ctx)
	}
	if err == nil {
		err = k.saveLast()
	}
	return err
}

// turn makes what is due. A request leads to one audit.sealed, however long its head
// takes.
func (k *Keeper) turn(ctx context.Context) error {
	request, err := k.request()
	if err != nil {
		return err
	}
	k.mu.Lock()
	due := k.others > 0 && (time.Since(k.sealing) >= sealEvery || k.others >= sealEvents)
	k.mu.Unlock()
	if due || request != "" && request != k.granted {
		if err := k.seal(ctx); err != nil {
			return err
		}
		k.granted = request
	}
	if err := k.makeHead(ctx); err != nil {
		return err
	}
	if request != "" && k.signed {
		err = k.grant(request)
	}
	return err
}

// seal appends audit.sealed with the run map of all events that are in the log, and folds
// it.
func (k *Keeper) seal(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, sealWithin)
	defer cancel()
	last, err := k.log.Last(ctx)
	if err == nil {
		err = k.folded(ctx, last)
	}
	if err != nil {
		return err
	}
	sequence, err := k.decide(ctx, "")
	if err != nil || sequence == 0 {
		return err
	}
	return k.folded(ctx, sequence)
}

// decide appends audit.sealed about all folded events, which may quote a note. It returns
// 0 if there are none.
func (k *Keeper) decide(ctx context.Context, previous string) (uint64, error) {
	k.mu.Lock()
	size, rows := k.tree.Size, k.runs.Rows()
	root, err := k.tree.Root()
	k.mu.Unlock()
	if err != nil || size == 0 {
		return 0, err
	}
	runs, err := audit.RowsRoot(rows)
	if err != nil {
		return 0, err
	}
	d, err := events.NewDecision(k.o.Stamp(), events.Aggregate{}, &events.AuditSealed{
		Size: uint64(size), Root: hex.EncodeToString(root[:]), //nolint:gosec // not negative
		Rows: uint64(len(rows)), Runs: hex.EncodeToString(runs[:]), Key: k.config.Key, Previous: previous,
	})
	if err != nil {
		return 0, err
	}
	end, err := k.log.LaneEnd(ctx, events.Aggregate{})
	if err != nil {
		return 0, err
	}
	var sequence uint64
	err = k.disk.do(stepSealed, func() (err error) {
		sequence, err = k.log.Decide(ctx, d, end)
		return err
	})
	if err == nil {
		k.sealing = time.Now()
	}
	return sequence, err
}

// folded waits until the follower has folded an event.
func (k *Keeper) folded(ctx context.Context, sequence uint64) error {
	for k.size() < int64(sequence) { //nolint:gosec // not that long
		if !pause(ctx, 5*time.Millisecond) {
			return fmt.Errorf("event %d is not folded, event %d is: %w", sequence, k.size(), ctx.Err())
		}
	}
	return nil
}

// Folded returns the number of events that are hashed: the first ones of the log.
func (k *Keeper) Folded() int64 { return k.size() }

// Reread returns how many events the keeper has read from the log because they were not fed:
// see [Keeper.Feed] and [Options].
func (k *Keeper) Reread() int64 { return k.reread.Load() }

func (k *Keeper) size() int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.tree.Size
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
