package viewdb

import (
	"bytes"
	"errors"

	"github.com/cockroachdb/pebble/v2"

	"github.com/ckptstore/ckptstore/projections"
)

// overlay is the table that a batch of events is folded into: the rows that the batch
// changed, in memory, in front of those of the database. One save changes the rows of
// its checkpoint, its attempt and its trial five times, and the next save changes the
// last two again. The database receives each row once per batch. With an indexed batch
// of Pebble it received every version, and sorting, flushing and compacting them slowed
// the fold down as the log grew.
//
// Nothing else may write to the database while an overlay is in use.
type overlay struct {
	db    *pebble.DB
	rows  *projections.Memory // values end with one of the marks below
	bytes int                 // of all values set, an upper bound of what rows holds
	idle  *pebble.Iterator    // for the next scan; nil before the first and during one
}

// Marks at the end of a value in [overlay.rows].
const (
	removed byte = iota
	present
)

var _ projections.Table = (*overlay)(nil)

func newOverlay(db *pebble.DB) *overlay { return &overlay{db: db, rows: projections.NewMemory()} }

// Get implements [projections.Reader].
func (o *overlay) Get(key []byte) ([]byte, error) {
	marked, err := o.rows.Get(key)
	if err != nil {
		return nil, err
	}
	if marked == nil {
		return get(o.db, key)
	}
	return value(marked), nil
}

// value returns the content of a marked value, nil for a removed row.
func value(marked []byte) []byte {
	end := len(marked) - 1
	if marked[end] == removed {
		return nil
	}
	return marked[:end:end]
}

// Scan implements [projections.Reader]. It merges the rows of both.
func (o *overlay) Scan(lo, hi []byte, visit func(key, value []byte) error) (err error) {
	it, err := o.iterator(lo, hi)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, o.release(it)) }()
	it.First()
	// below visits the rows of the database before key, or all of them if key is nil.
	below := func(key []byte) error {
		for ; it.Valid() && (key == nil || bytes.Compare(it.Key(), key) < 0); it.Next() {
			value, err := it.ValueAndErr()
			if err != nil {
				return err
			}
			if err := visit(it.Key(), value); err != nil {
				return err
			}
		}
		return it.Error()
	}
	err = o.rows.Scan(lo, hi, func(key, marked []byte) error {
		if err := below(key); err != nil {
			return err
		}
		if it.Valid() && bytes.Equal(it.Key(), key) {
			it.Next()
		}
		if v := value(marked); v != nil {
			return visit(key, v)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return below(nil)
}

// iterator returns the idle iterator, or a new one if a visit scans.
func (o *overlay) iterator(lo, hi []byte) (*pebble.Iterator, error) {
	b := bounds(lo, hi)
	it := o.idle
	if it == nil {
		return o.db.NewIter(b)
	}
	o.idle = nil
	it.SetBounds(b.LowerBound, b.UpperBound)
	return it, nil
}

// release keeps an iterator for the next scan: the database does not change before the
// overlay is written.
func (o *overlay) release(it *pebble.Iterator) error {
	if o.idle != nil || it.Error() != nil {
		return it.Close()
	}
	o.idle = it
	return nil
}

// Set implements [projections.Table].
func (o *overlay) Set(key, value []byte) error { return o.mark(key, value, present) }

// Delete implements [projections.Table].
func (o *overlay) Delete(key []byte) error { return o.mark(key, nil, removed) }

func (o *overlay) mark(key, value []byte, mark byte) error {
	marked := append(append(make([]byte, 0, len(value)+1), value...), mark)
	o.bytes += len(key) + len(marked)
	return o.rows.Set(key, marked)
}

// write puts the rows into a batch.
func (o *overlay) write(b *pebble.Batch) error {
	return o.rows.Scan(nil, nil, func(key, marked []byte) error {
		if v := value(marked); v != nil {
			return b.Set(key, v, nil)
		}
		return b.Delete(key, nil)
	})
}

// close releases the database's iterator.
func (o *overlay) close() error {
	if o.idle == nil {
		return nil
	}
	defer func() { o.idle = nil }()
	return o.idle.Close()
}
