package viewdb

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/cockroachdb/pebble/v2"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

// A keyframe is the table as of a sequence, without reports and rollups. The database has
// the keyframes next to the rows: of each row, one version for each keyframe at which it
// differs from the keyframe before.
//
//	0x00 "frames"                               {at, every, thinned, reducer, kinds}, JSON
//	0x00 'h' row's key, escaped, ~keyframe      the row's value and a mark; see [overlay]
//
// In an escaped key, 0x00 is followed by 0xff, and its end is 0x00 0x01. Versions are
// therefore in the order of the rows, the newest version of a row first. The row as of a
// keyframe is its newest version at or before it.
//
// A version and the cursor of the keyframes are in one batch, which is written after the
// rows that have its events: after a crash there are no keyframes ahead of the view.
var (
	framesKey    = []byte("\x00frames")
	firstVersion = []byte("\x00h")
	lastVersion  = []byte("\x00i")
)

// keyframes is the list of the keyframes: the multiples of Every up to At, which is a multiple.
type keyframes struct {
	At      uint64 `json:"at"`
	Every   uint64 `json:"every"`
	Thinned uint64 `json:"thinned"` // no version serves only keyframes that are closer
	Reducer int    `json:"reducer"`
	Kinds   string `json:"kinds"` // [knownKinds] of the program that folded them
}

// knownKinds returns a digest of the events that this program knows. Rows that were folded without one
// of them can be wrong as of a keyframe although nothing in the present rows shows it.
var knownKinds = sync.OnceValue(func() string {
	h := sha256.New()
	for _, k := range events.Pattern("*.*").Kinds() {
		for v := 1; (events.Event{Kind: k, Version: v}).Known(); v++ {
			fmt.Fprintf(h, "%s.v%d\n", k, v)
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
})

// errKeyframes reports that the list of keyframes is damaged. The next opening drops it.
var errKeyframes = errors.New("the list of keyframes is damaged; delete the views, they are rebuilt from the log")

// readKeyframes returns the keyframes of a database. One without has that at 0, the empty one.
func readKeyframes(r pebble.Reader, every uint64) (k keyframes, err error) {
	none := keyframes{Every: every, Thinned: every, Reducer: projections.Version, Kinds: knownKinds()}
	text, err := get(r, framesKey)
	if err != nil || text == nil {
		return none, err
	}
	if err := json.Unmarshal(text, &k); err != nil || k.Every == 0 || k.At%k.Every != 0 {
		return none, fmt.Errorf("%w: %q", errKeyframes, text)
	}
	return k, nil
}

// write puts the list of keyframes into a batch.
func (k keyframes) write(b *pebble.Batch) error {
	text, err := json.Marshal(k)
	if err != nil {
		return err
	}
	return b.Set(framesKey, text, nil)
}

// before returns the last keyframe at or before a sequence.
func (k keyframes) before(seq uint64) uint64 { return min(k.At, seq-seq%k.Every) }

// has reports whether there is a keyframe at a sequence.
func (k keyframes) has(seq uint64) bool { return seq <= k.At && seq%k.Every == 0 }

// dropKeyframes removes all keyframes.
func dropKeyframes(b *pebble.Batch) error {
	return errors.Join(b.DeleteRange(firstVersion, lastVersion, nil), b.Delete(framesKey, nil))
}

// Ends of keys of versions.
const (
	escape    = 0xff // behind a 0x00 of the row's key
	keyEnd    = 0x01 // behind the 0x00 at its end
	behindKey = 0x02 // in place of keyEnd: behind all versions of the row
)

// versionsOf appends what the keys of all versions of a row begin with.
func versionsOf(b, key []byte) []byte {
	b = append(b, firstVersion...)
	for _, c := range key {
		if b = append(b, c); c == 0 {
			b = append(b, escape)
		}
	}
	return append(b, 0, keyEnd)
}

// rowOf appends the row's key to b. versions is what [versionsOf] returns.
func rowOf(b, versions []byte) []byte {
	for rest := versions[len(firstVersion) : len(versions)-2]; len(rest) > 0; rest = rest[1:] {
		if b = append(b, rest[0]); rest[0] == 0 {
			rest = rest[1:]
		}
	}
	return b
}

// cutVersion splits the key of a version.
func cutVersion(key []byte) (versions []byte, keyframe uint64, err error) {
	end := len(key) - 8
	if end < len(firstVersion)+2 || key[end-2] != 0 || key[end-1] != keyEnd {
		return nil, 0, fmt.Errorf("version %q of a row is damaged; delete the views, they are rebuilt from the log", key)
	}
	return key[:end], ^binary.BigEndian.Uint64(key[end:]), nil
}

// version appends the keyframe to what the keys of all versions of a row begin with.
func version(versions []byte, keyframe uint64) []byte {
	return binary.BigEndian.AppendUint64(versions, ^keyframe)
}

// frame has the rows as of a keyframe.
type frame struct {
	iterators
	at uint64
}

var (
	_ behind  = (*frame)(nil)
	_ scanner = (*frameScan)(nil)
)

// get implements [behind].
func (f *frame) get(key []byte) (value []byte, err error) {
	versions := versionsOf(make([]byte, 0, len(key)+24), key)
	low := version(bytes.Clone(versions), f.at)
	versions[len(versions)-1] = behindKey
	it, err := f.take(&pebble.IterOptions{LowerBound: low, UpperBound: versions})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	if !it.First() {
		return nil, it.Error()
	}
	marked, err := it.ValueAndErr()
	if err != nil || marked[len(marked)-1] == removed {
		return nil, err
	}
	return append([]byte{}, marked[:len(marked)-1]...), nil
}

// scan implements [behind].
func (f *frame) scan(lo, hi []byte) (scanner, error) {
	b := &pebble.IterOptions{LowerBound: versionsOf(nil, lo), UpperBound: lastVersion}
	if hi != nil {
		b.UpperBound = versionsOf(nil, hi)
	}
	it, err := f.take(b)
	if err != nil {
		return nil, err
	}
	s := &frameScan{it: it, at: f.at}
	it.First()
	s.settle()
	return s, nil
}

// frameScan is at a row of a keyframe.
type frameScan struct {
	it         idling
	at         uint64
	key, value []byte
	target     []byte // that is sought
	err        error
}

// Valid implements [scanner].
func (s *frameScan) Valid() bool { return s.err == nil && s.it.Valid() }

// Key implements [scanner].
func (s *frameScan) Key() []byte { return s.key }

// ValueAndErr implements [scanner].
func (s *frameScan) ValueAndErr() ([]byte, error) { return s.value, s.err }

// Error implements [scanner].
func (s *frameScan) Error() error { return errors.Join(s.err, s.it.Error()) }

// Close implements [scanner].
func (s *frameScan) Close() error { return s.it.Close() }

// Next implements [scanner].
func (s *frameScan) Next() bool {
	if versions, _, err := cutVersion(s.it.Key()); err != nil {
		s.err = err
	} else {
		s.leave(versions)
		s.settle()
	}
	return s.Valid()
}

// settle moves on to a version at or before the keyframe that is not a removal.
func (s *frameScan) settle() {
	for s.it.Valid() {
		versions, at, err := cutVersion(s.it.Key())
		if err != nil {
			s.err = err
			return
		}
		if at > s.at {
			s.seek(version(append(s.target[:0], versions...), s.at))
			continue
		}
		marked, err := s.it.ValueAndErr()
		if err != nil {
			s.err = err
			return
		}
		if end := len(marked) - 1; marked[end] == present {
			s.key, s.value = rowOf(s.key[:0], versions), marked[:end]
			return
		}
		s.leave(versions)
	}
}

// leave moves behind the versions of a row.
func (s *frameScan) leave(versions []byte) {
	target := append(s.target[:0], versions...)
	target[len(target)-1] = behindKey
	s.seek(target)
}

// steps is how many versions a scan passes one by one before it seeks: most rows have few.
const steps = 4

// seek moves forward to a key or behind it.
func (s *frameScan) seek(target []byte) {
	s.target = target
	for range steps {
		if !s.it.Next() || bytes.Compare(s.it.Key(), target) >= 0 {
			return
		}
	}
	s.it.SeekGE(target)
}

// changes is an overlay on a keyframe that knows which rows the next keyframe changes.
type changes struct {
	*overlay
	keys map[string]struct{} // set or deleted since the last keyframe
	kept map[string]struct{} // that keyframes since the first one have
}

var _ projections.Table = (*changes)(nil)

func newChanges(f *frame) *changes {
	o := &overlay{behind: f, rows: projections.NewMemory()}
	return &changes{o, map[string]struct{}{}, map[string]struct{}{}}
}

// Set implements [projections.Table].
func (c *changes) Set(key, value []byte) error {
	c.keys[string(key)] = struct{}{}
	return c.overlay.Set(key, value)
}

// Delete implements [projections.Table].
func (c *changes) Delete(key []byte) error {
	c.keys[string(key)] = struct{}{}
	return c.overlay.Delete(key)
}

// write puts the versions of a keyframe into a batch. A row that came and went between two
// keyframes has none.
func (c *changes) write(b *pebble.Batch, at uint64) error {
	for key := range c.keys {
		marked, err := c.rows.Get([]byte(key))
		if err != nil {
			return err
		}
		_, kept := c.kept[key]
		if marked[len(marked)-1] == present {
			c.kept[key] = struct{}{}
		} else if !kept {
			had, err := c.behind.get([]byte(key))
			if err != nil {
				return err
			}
			if had == nil {
				continue
			}
		}
		if err := b.Set(version(versionsOf(nil, []byte(key)), at), marked, nil); err != nil {
			return err
		}
	}
	clear(c.keys)
	return nil
}

// thin removes the versions that serve only keyframes between the multiples of every, and the
// removals that have nothing before them, in batches of most. Each keyframe at a multiple
// stays as it was, whatever was removed before an interruption. The error of proceed, which is
// called between two batches and after each most versions, ends it.
func thin(db *pebble.DB, from pebble.Reader, every uint64, most uint32, proceed func() error) (err error) {
	it, err := from.NewIter(&pebble.IterOptions{LowerBound: firstVersion, UpperBound: lastVersion})
	if err != nil {
		return err
	}
	b := db.NewBatch()
	defer func() { err = errors.Join(err, it.Close(), b.Close()) }()
	commit := func() error {
		err := b.Commit(pebble.NoSync)
		if err == nil {
			err = errors.Join(b.Close(), proceed())
			b = db.NewBatch()
		}
		return err
	}
	var row []byte        // of the version before
	var trailing [][]byte // the removals of the row that were left, behind its last other version
	newer := uint64(0)    // keyframe of the version before
	drop := func(key []byte) error {
		if err := b.Delete(key, nil); err != nil || b.Count() < most {
			return err
		}
		return commit()
	}
	ended := func() error {
		for _, key := range trailing {
			if err := drop(key); err != nil {
				return err
			}
		}
		trailing = nil
		return nil
	}
	seen := uint32(0)
	for it.First(); it.Valid(); it.Next() {
		if seen++; seen%most == 0 {
			if err := proceed(); err != nil {
				return err
			}
		}
		versions, at, err := cutVersion(it.Key())
		if err != nil {
			return err
		}
		same := bytes.Equal(versions, row)
		if !same {
			if err := ended(); err != nil {
				return err
			}
		}
		next := (at + every - 1) / every * every // the first keyframe that the version serves
		if same && newer <= next {
			err = drop(it.Key())
		} else {
			var marked []byte
			if marked, err = it.ValueAndErr(); err == nil {
				if marked[len(marked)-1] == removed {
					trailing = append(trailing, bytes.Clone(it.Key()))
				} else {
					trailing = nil
				}
			}
		}
		if err != nil {
			return err
		}
		row, newer = append(row[:0], versions...), at
	}
	if err := it.Error(); err != nil {
		return err
	}
	if err := ended(); err != nil {
		return err
	}
	return commit()
}
