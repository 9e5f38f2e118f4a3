package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Earlier is an origin that a store had before.
type Earlier struct {
	Origin string `json:"origin"`
	Key    string `json:"key"`  // verifier key
	Note   string `json:"note"` // the newest known: the first audit.sealed of the next origin quotes it
	// Apart reports that its log is lost: the log of the next origin has other events.
	Apart bool `json:"apart,omitempty"`
}

// NewOrigin gives a store that keeps evidence a new origin and a new key. The next owner
// begins it with an audit.sealed that quotes the newest known note of the old origin: that
// of the store, that of the store it was copied from, or previous, if it is newer. Salts,
// tiles and listed heads stay, so that the root over the old events stays, too; the saved
// state does not, because the old key has signed it. An empty Policy keeps the witnesses.
// The change is one write: after an error the store has the old origin or the new one.
func NewOrigin(o KeygenOptions, previous []byte) (c Config, err error) {
	bad := func(err error) (Config, error) { return c, fmt.Errorf("audit keygen: %w", err) }
	had, err := ReadConfig(o.Store)
	if err != nil {
		return bad(err)
	}
	file, err := filepath.Abs(o.File)
	if err == nil {
		err = outside(o.Store, file)
	}
	if err == nil && o.Policy != "" {
		_, err = audit.ParsePolicy(o.Policy)
	}
	if err != nil {
		return bad(err)
	}
	if previous != nil {
		if _, ok := had.opens(previous); !ok {
			return bad(problem.Errorf(problem.Invalid, "the previous note is not of the log %s, or not signed by its key", had.Origin))
		}
	}
	c = Config{Policy: had.Policy, Optional: had.Optional || o.Optional, Earlier: had.Earlier}
	if o.Policy != "" {
		c.Policy, c.Optional = withoutLogs(o.Policy), o.Optional
	}
	signed, _, ok := had.newestNote(o.Store, previous)
	switch {
	case ok:
		c.Earlier = append(slices.Clone(had.Earlier), Earlier{Origin: had.Origin, Key: had.Key, Note: string(signed)})
	case len(had.Earlier) == 0:
		return bad(problem.Errorf(problem.NotFound, "no note of the log %s is known, which a new origin quotes: give one by --previous; if none was ever published, rename %s and run this without --new-origin", had.Origin, filepath.Join(o.Store, dirName)))
	}
	c.Origin = unused(o.Origin, append(slices.Clone(c.Earlier), Earlier{Origin: had.Origin}))
	return c.begin(o.Store, file)
}

// unused returns an origin that the store has not had: witnesses and verifiers tell
// origins apart by name.
func unused(origin string, had []Earlier) string {
	next := origin
	for n := 2; slices.ContainsFunc(had, func(e Earlier) bool { return e.Origin == next }); n++ {
		next = fmt.Sprintf("%s/%d", origin, n)
	}
	return next
}

// opens returns the head of a note that the key of the configuration has signed.
func (c Config) opens(signed []byte) (audit.Head, bool) {
	v, err := note.NewVerifier(c.Key)
	if err != nil {
		return audit.Head{}, false
	}
	h, err := audit.OpenHead(signed, v)
	return h, err == nil
}

// earlier returns the head of a note of an earlier origin.
func (c Config) earlier(signed []byte) (audit.Head, bool) {
	for _, e := range c.Earlier {
		if h, ok := (Config{Key: e.Key}).opens(signed); ok {
			return h, true
		}
	}
	return audit.Head{}, false
}

// newestNote returns the newest note of the origin that is known, which may be another.
func (c Config) newestNote(store string, other []byte) (signed []byte, h audit.Head, ok bool) {
	notes := [][]byte{other}
	for _, name := range []string{checkpointName, notedName} {
		if text, err := read(store, name); err == nil {
			notes = append(notes, text)
		}
	}
	for _, text := range notes {
		if had, fits := c.opens(text); fits && (!ok || had.Size > h.Size) {
			signed, h, ok = text, had, true
		}
	}
	return signed, h, ok
}

// lost returns the origins of the log that a recovered store had before.
func lost(store string, formerly []string) ([]Earlier, error) {
	for _, id := range formerly {
		dir := asideName(id)
		text, err := beneath.At(store).ReadFile(filepath.Join(store, dir, configName))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var c Config
		if err == nil {
			err = json.Unmarshal(text, &c)
		}
		var signed []byte
		if err == nil {
			signed, err = beneath.At(store).ReadFile(filepath.Join(store, dir, checkpointName))
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil // it has published no head
		}
		if err != nil {
			return nil, fmt.Errorf("evidence of the lost log, %s: %w: move that directory away to begin without it", filepath.Join(store, dir), err)
		}
		if _, ok := c.opens(signed); !ok {
			return nil, fmt.Errorf("evidence of the lost log, %s: %w: the key of its configuration has not signed its newest note: move that directory away to begin without it", filepath.Join(store, dir), ErrDamaged)
		}
		return append(c.Earlier, Earlier{Origin: c.Origin, Key: c.Key, Note: string(signed), Apart: true}), nil
	}
	return nil, nil
}

// asideName is the directory of the evidence about the lost log of a store.
func asideName(id string) string { return dirName + "." + id }

// sealed reports whether a message is an audit.sealed of the configuration's key.
func (c Config) sealed(m events.Message, sequence uint64) bool {
	s, err := audit.ParseSealed(m, sequence)
	return err == nil && s.Key == c.Key
}

// begin begins an origin that follows an earlier one, before the owner appends anything
// else: with an audit.sealed that quotes the newest known note of that. It returns
// [ErrDamaged] if the log has as many events as the note, and others.
func (k *Keeper) begin(ctx context.Context) error {
	if len(k.config.Earlier) == 0 || k.begun {
		return nil
	}
	last, err := k.log.Last(ctx)
	if err == nil {
		err = k.foldUntil(ctx, last)
	}
	if err != nil || k.begun {
		return err
	}
	e := k.config.Earlier[len(k.config.Earlier)-1]
	before := Config{Key: e.Key}
	signed, quoted, ok := before.newestNote(k.store, []byte(e.Note)) // an owner may have published another since
	if !ok {
		return fmt.Errorf("%w: %s of the audit has no note of the origin %s, which this one follows", ErrDamaged, configName, e.Origin)
	}
	if !e.Apart && quoted.Size > 0 && quoted.Size <= k.size() {
		root, err := k.rootAt(ctx, quoted.Size)
		if err != nil {
			return err
		}
		if root != quoted.Root {
			return fmt.Errorf("%w: the log was rewritten: it leads to the root %s at size %d, and the newest note of %s has %v: restore log/ from a backup; both roots are the evidence", ErrDamaged, root, quoted.Size, e.Origin, quoted)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, sealWithin)
	defer cancel()
	sequence, err := k.decide(ctx, string(signed))
	if err == nil {
		err = k.foldUntil(ctx, sequence)
	}
	if err == nil {
		k.o.Logger.Info("audit: new origin", "origin", k.config.Origin, "follows", e.Origin, "event", sequence)
	}
	return err
}

// rootAt returns the root of the folded log at a size.
func (k *Keeper) rootAt(ctx context.Context, size int64) (audit.Hash, error) {
	k.mu.Lock()
	now := audit.Head{Size: k.tree.Size}
	root, err := k.tree.Root()
	k.mu.Unlock()
	if err != nil || size == now.Size {
		return root, err
	}
	now.Root = root
	root, err = tlog.TreeHash(size, k.hashes(ctx, now))
	return root, tampered(err)
}

// Logs returns the keys of the log: that of the store's configuration, and those of its
// earlier origins.
func (b *Book) Logs() (logs []note.Verifier, err error) {
	for _, key := range append([]string{b.config.Key}, keysOf(b.config.Earlier)...) {
		v, err := note.NewVerifier(key)
		if err != nil {
			return nil, fmt.Errorf("%w: %s of the audit: %w", ErrDamaged, configName, err)
		}
		logs = append(logs, v)
	}
	return logs, nil
}

func keysOf(list []Earlier) (keys []string) {
	for _, e := range list {
		keys = append(keys, e.Key)
	}
	return keys
}

// follows returns the decisions by which the log of a head has left an earlier origin, the
// newest first, and the sequence of the last of them.
func (b *Book) follows(ctx context.Context, origin string, h audit.Head) (items []audit.Item, left uint64, err error) {
	var at []uint64 // of each audit.sealed that is long enough to quote a note
	least := uint32(0)
	for _, e := range b.config.Earlier {
		if n := uint32(len(e.Origin)); least == 0 || n < least { //nolint:gosec // a name
			least = n
		}
	}
	if err := b.eachEntry(ctx, h.Size, func(leaf audit.Leaf, _ []byte) error {
		if leaf.Subject == sealedSubject && leaf.Length >= quoteLeast+least {
			at = append(at, leaf.Sequence)
		}
		return nil
	}); err != nil {
		return nil, 0, err
	}
	wants := h.Origin
	for _, sequence := range slices.Backward(at) {
		if wants == origin {
			break
		}
		err := b.log.Walk(ctx, sequence, sequence, func(m events.Message, sequence uint64, stored time.Time) error {
			s, err := audit.ParseSealed(m, sequence)
			if err != nil || s.Previous == "" {
				return err
			}
			begun, err := audit.ParseBeginning(s, sequence)
			if err != nil || begun.Origin != wants {
				return err
			}
			it, err := b.item(m, sequence, stored, h, b.hashes(ctx, h))
			items, left, wants = append(items, it), sequence, begun.Quoted.Origin
			return err
		})
		if err != nil {
			return nil, 0, err
		}
	}
	if wants != origin {
		return nil, 0, problem.Errorf(problem.NotFound, "the older head is of the log %s, and no decision of this log, %s, shows that it follows that one", origin, h.Origin)
	}
	return items, left, nil
}

// quoteLeast is the least length of an audit.sealed that quotes a note, without the names
// in the note: two roots in hex, a root and a signature in base64.
const quoteLeast = 64 + 64 + 44 + 96

// Origin is an origin that began in the log.
type Origin struct {
	Sequence uint64 `json:"sequence"` // of the decision
	Origin   string `json:"origin"`
	Follows  string `json:"follows"` // the origin before
	Size     int64  `json:"size"`    // of the quoted head of that
	Root     string `json:"root"`
	Kept     bool   `json:"kept"` // the log has the events of that head
}

// String returns the origin in one line.
func (o Origin) String() string {
	has := "has its events"
	if !o.Kept {
		has = "does not have its events"
	}
	return fmt.Sprintf("event %d begins the log %s, which follows %s: that had size %d, root %s, and this one %s", o.Sequence, o.Origin, o.Follows, o.Size, o.Root, has)
}

// origin returns the origin that a decision of the log began. The log leads to head.
func (b *Book) origin(ctx context.Context, s audit.SealedMap, sequence uint64, head audit.Head) (o Origin, err error) {
	begun, err := audit.ParseBeginning(s, sequence)
	if err != nil {
		return o, err
	}
	q := begun.Quoted
	o = Origin{Sequence: sequence, Origin: begun.Origin, Follows: q.Origin, Size: q.Size, Root: q.Root.String()}
	if q.Size > 0 && uint64(q.Size) < sequence {
		root, err := tlog.TreeHash(q.Size, b.hashes(ctx, head))
		if err != nil {
			return o, tampered(err)
		}
		o.Kept = root == q.Root
	}
	return o, nil
}
