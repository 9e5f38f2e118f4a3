package ledger

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
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
	notes, err := had.notes(o.Store, dirName, previous)
	switch {
	case err != nil:
		return bad(err)
	case len(notes) > 0:
		c.Earlier = append(slices.Clone(had.Earlier), Earlier{Origin: had.Origin, Key: had.Key, Note: string(notes[0].signed)})
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

// knownNote is a note that a key has signed.
type knownNote struct {
	signed []byte
	audit.Head
}

// notes returns the notes of the origin that are known: those in the directory of a ledger,
// and another. The newest is the first.
func (c Config) notes(store, dir string, other []byte) (list []knownNote, err error) {
	texts := [][]byte{other}
	for _, name := range noteNames {
		text, err := beneath.At(store).ReadFile(filepath.Join(store, dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		texts = append(texts, text)
	}
	for _, text := range texts {
		if h, ok := c.opens(text); ok {
			list = append(list, knownNote{text, h})
		}
	}
	slices.SortStableFunc(list, func(a, b knownNote) int { return cmp.Compare(b.Size, a.Size) })
	return list, nil
}

// noteNames are the files of a ledger that hold a note.
var noteNames = []string{checkpointName, notedName}

// notes returns the notes of the earlier origin that are known, the newest first. An owner
// that had the key may have published one after the origin ended.
func (e Earlier) notes(store, dir string) ([]knownNote, error) {
	return Config{Key: e.Key}.notes(store, dir, []byte(e.Note))
}

// lost returns the origins of the log that a recovered store had before.
func lost(store string, formerly []string) ([]Earlier, error) {
	for _, id := range formerly {
		list, err := lostIn(store, asideName(id))
		if err != nil {
			return nil, fmt.Errorf("evidence of the lost log, %s: %w: move that directory away to begin without it", filepath.Join(store, asideName(id)), err)
		}
		if len(list) > 0 {
			return list, nil
		}
	}
	return nil, nil
}

// lostIn returns the origins of the lost log whose evidence is in a directory, none if no
// note of it is known.
func lostIn(store, dir string) ([]Earlier, error) {
	text, err := beneath.At(store).ReadFile(filepath.Join(store, dir, configName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var c Config
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err != nil {
		return nil, err
	}
	for _, name := range noteNames {
		signed, err := beneath.At(store).ReadFile(filepath.Join(store, dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		_, own := c.opens(signed)
		if _, earlier := c.earlier(signed); !own && !earlier {
			return nil, fmt.Errorf("%w: no key of its configuration has signed the note in %s", ErrDamaged, name)
		}
	}
	notes, err := c.notes(store, dir, nil)
	if err != nil {
		return nil, err
	}
	if len(notes) > 0 {
		return append(c.Earlier, Earlier{Origin: c.Origin, Key: c.Key, Note: string(notes[0].signed), Apart: true}), nil
	}
	if len(c.Earlier) == 0 {
		return nil, nil
	}
	// Of the origin itself no head was published: the one before it is followed.
	e := &c.Earlier[len(c.Earlier)-1]
	if notes, err = e.notes(store, dir); err != nil {
		return nil, err
	}
	if len(notes) == 0 {
		return nil, fmt.Errorf("%w: its configuration has no note of the origin %s", ErrDamaged, e.Origin)
	}
	e.Note, e.Apart = string(notes[0].signed), true
	return c.Earlier, nil
}

// asideName is the directory of the evidence about the lost log of a store.
func asideName(id string) string { return dirName + "." + id }

// begins reports whether a message is an audit.sealed with which the origin of the
// configuration began: it names the key, and quotes a note of the origin before.
func (c Config) begins(m events.Message, sequence uint64) bool {
	if len(c.Earlier) == 0 {
		return false
	}
	s, err := audit.ParseSealed(m, sequence)
	if err != nil || s.Key != c.Key {
		return false
	}
	_, ok := Config{Key: c.Earlier[len(c.Earlier)-1].Key}.opens([]byte(s.Previous))
	return ok
}

// followedSuffix ends the name of the file next to a key that tells which origins the key's
// follows. Until the key has signed a head, all that is in the store may be forged: a user who
// can write there could replace the earlier origin and its key, and have the new key sign a
// decision that quotes a note of theirs.
const followedSuffix = ".follows"

// followed is the content of that file.
type followed struct {
	Key     string `json:"key"`     // verifier key of the origin
	Earlier string `json:"earlier"` // SHA-256 of the earlier origins in JSON, in hex
}

func (c Config) followed() (followed, error) {
	text, err := json.Marshal(c.Earlier)
	if err != nil {
		return followed{}, err
	}
	sum := sha256.Sum256(text)
	return followed{c.Key, hex.EncodeToString(sum[:])}, nil
}

// keepFollowed writes which origins a new one follows, next to its key.
func (c Config) keepFollowed() error {
	if len(c.Earlier) == 0 {
		return nil
	}
	f, err := c.followed()
	if err != nil {
		return err
	}
	text, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return durable.Write(c.Signer+followedSuffix, append(text, '\n'))
}

// checkFollowed returns [ErrDamaged] if the configuration names other earlier origins than
// when its key was made. Of a key that an older version has made, it cannot tell: known is
// false.
func (c Config) checkFollowed() (known bool, err error) {
	path := c.Signer + followedSuffix
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	var had, has followed
	if err == nil {
		err = json.Unmarshal(text, &had)
	}
	if err == nil {
		has, err = c.followed()
	}
	switch {
	case err != nil:
		return false, fmt.Errorf("%w: the origins that the key follows, %s: %w", ErrDamaged, path, err)
	case had.Key == c.Key && had != has:
		return false, fmt.Errorf("%w: %s of the audit was changed since its key was made: it names other origins before %s than %s has: restore the file from a backup, or begin another origin: `ckptstore audit keygen FILE --new-origin --previous NOTE`", ErrDamaged, configName, c.Origin, path)
	}
	return had.Key == c.Key, nil
}

// quoted returns the newest known note of the origin that this one follows, nil if it
// follows none or has begun. It returns [ErrDamaged] if the log has as many events as one
// of these notes, and others. Until the key has signed something, all that heads and the
// log hold may be forged, an audit.sealed of this key too: only the old key has signed.
func (k *Keeper) quoted(ctx context.Context) ([]byte, error) {
	if len(k.config.Earlier) == 0 || k.begun && k.vouched {
		return nil, nil
	}
	if k.signer != nil {
		known, err := k.config.checkFollowed()
		if err != nil {
			return nil, err
		}
		if !known {
			k.o.Logger.Warn("audit: the note that the new origin quotes is taken from the store: nothing next to the key names it, as of a key that an older version made")
		}
	}
	e := k.config.Earlier[len(k.config.Earlier)-1]
	notes, err := e.notes(k.store, dirName)
	if err != nil {
		return nil, err
	}
	if len(notes) == 0 {
		return nil, fmt.Errorf("%w: %s of the audit has no note of the origin %s, which this one follows", ErrDamaged, configName, e.Origin)
	}
	if e.Apart {
		return notes[0].signed, nil
	}
	last, err := k.log.Last(ctx)
	if err != nil {
		return nil, err
	}
	for _, n := range notes {
		size := uint64(n.Size) //nolint:gosec // not negative
		if size == 0 || size > last {
			continue // such as in a restored backup
		}
		k.known = max(k.known, size)
		if err := k.foldUntil(ctx, size); err != nil {
			return nil, err
		}
		root, err := k.rootAt(ctx, n.Size)
		if err != nil {
			return nil, err
		}
		if root != n.Root {
			return nil, fmt.Errorf("%w: the log was rewritten: it leads to the root %s at size %d, and a note of %s has %v: restore log/ from a backup; both roots are the evidence", ErrDamaged, root, n.Size, e.Origin, n.Head)
		}
	}
	return notes[0].signed, nil
}

// begin begins an origin that follows an earlier one, before the owner appends anything
// else: with an audit.sealed that quotes a note of that.
func (k *Keeper) begin(ctx context.Context, quoted []byte) error {
	if quoted == nil {
		return nil
	}
	last, err := k.log.Last(ctx)
	if err == nil {
		err = k.foldUntil(ctx, last)
	}
	if err != nil || k.begun {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, sealWithin)
	defer cancel()
	sequence, err := k.decide(ctx, string(quoted))
	if err == nil {
		err = k.foldUntil(ctx, sequence)
	}
	if err == nil {
		k.o.Logger.Info("audit: new origin", "origin", k.config.Origin, "follows", k.config.Earlier[len(k.config.Earlier)-1].Origin, "event", sequence)
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
	// Checked reports that a key of the log before has signed that head. Otherwise the
	// policy has no such key, and the head is the word of this log.
	Checked bool `json:"checked"`
}

// String returns the origin in one line.
func (o Origin) String() string {
	has := "has its events"
	if !o.Kept {
		has = "does not have its events"
	}
	if !o.Checked {
		has += fmt.Sprintf("; nothing shows that %s had it: the policy has no line `log` with its key", o.Follows)
	}
	return fmt.Sprintf("event %d begins the log %s, which follows %s: that had size %d, root %s, and this one %s", o.Sequence, o.Origin, o.Follows, o.Size, o.Root, has)
}

// origin returns the origin that a decision of the log began. The log leads to head. It
// returns [audit.ErrTampered] if the quoted note is not signed by that of logs whose name
// it has.
func (b *Book) origin(ctx context.Context, s audit.SealedMap, sequence uint64, head audit.Head, logs []note.Verifier) (o Origin, err error) {
	begun, err := audit.ParseBeginning(s, sequence)
	if err != nil {
		return o, err
	}
	q := begun.Quoted
	_, err = begun.Open(logs...)
	if err != nil && !errors.Is(err, audit.ErrPolicy) {
		return o, fmt.Errorf("event %d begins the log %s, and quotes a note of %s: %w", sequence, begun.Origin, q.Origin, err)
	}
	o = Origin{Sequence: sequence, Origin: begun.Origin, Follows: q.Origin, Size: q.Size, Root: q.Root.String(), Checked: err == nil}
	if q.Size > 0 && uint64(q.Size) < sequence {
		root, err := tlog.TreeHash(q.Size, b.hashes(ctx, head))
		if err != nil {
			return o, tampered(err)
		}
		o.Kept = root == q.Root
	}
	return o, nil
}
