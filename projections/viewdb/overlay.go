package viewdb

import (
	"bytes"
	"errors"
	"sync/atomic"

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
// Nothing else may change the rows behind an overlay while it is in use.
type overlay struct {
	behind behind
	rows   *projections.Memory // values end with one of the marks below
	bytes  int                 // of all values set, an upper bound of what rows holds
}

// Marks at the end of a value in [overlay.rows].
const (
	removed byte = iota
	present
)

var _ projections.Table = (*overlay)(nil)

// behind has the rows behind an overlay.
type behind interface {
	// get returns the caller's copy of a value, nil if there is none.
	get(key []byte) ([]byte, error)
	// scan returns the rows of a range, at the first one.
	scan(lo, hi []byte) (scanner, error)
	// close releases what is kept between reads.
	close() error
}

// scanner is at a row of a range. Its methods are those of [pebble.Iterator].
type scanner interface {
	Valid() bool
	Next() bool
	Key() []byte
	ValueAndErr() ([]byte, error)
	Error() error
	Close() error
}

var (
	_ behind  = (*table)(nil)
	_ scanner = idling{}
)

// iterators keeps an iterator for the next scan. Several goroutines may use it.
type iterators struct {
	from pebble.Reader
	idle atomic.Pointer[pebble.Iterator] // nil before the first scan and during one
}

// take returns the idle iterator, or a new one if a visit scans.
func (i *iterators) take(b *pebble.IterOptions) (idling, error) {
	it := i.idle.Swap(nil)
	if it == nil {
		it, err := i.from.NewIter(b)
		return idling{it, i}, err
	}
	it.SetBounds(b.LowerBound, b.UpperBound)
	return idling{it, i}, nil
}

// close releases the idle iterator.
func (i *iterators) close() error {
	if it := i.idle.Swap(nil); it != nil {
		return it.Close()
	}
	return nil
}

// idling is an iterator that is kept when it is closed.
type idling struct {
	*pebble.Iterator
	of *iterators
}

// Close keeps the iterator for the next scan: what it reads does not change before the overlay
// is closed.
func (i idling) Close() error {
	if i.Error() != nil || !i.of.idle.CompareAndSwap(nil, i.Iterator) {
		return i.Iterator.Close()
	}
	return nil
}

// table has the rows of the database.
type table struct{ iterators }

func (t *table) get(key []byte) ([]byte, error) { return get(t.from, key) }

func (t *table) scan(lo, hi []byte) (scanner, error) {
	it, err := t.take(bounds(lo, hi))
	if err != nil {
		return nil, err
	}
	it.First()
	return it, nil
}

func newOverlay(db *pebble.DB) *overlay {
	return &overlay{behind: &table{iterators{from: db}}, rows: projections.NewMemory()}
}

// Get implements [projections.Reader].
func (o *overlay) Get(key []byte) ([]byte, error) {
	marked, err := o.rows.Get(key)
	if err != nil {
		return nil, err
	}
	if marked == nil {
		return o.behind.get(key)
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
	it, err := o.behind.scan(lo, hi)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	// below visits the rows behind the overlay before key, or all of them if key is nil.
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

// close releases what the rows behind it keep.
func (o *overlay) close() error { return o.behind.close() }
