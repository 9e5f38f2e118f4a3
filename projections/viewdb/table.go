package viewdb

import (
	"bytes"
	"errors"

	"github.com/cockroachdb/pebble/v2"

	"github.com/ckptstore/ckptstore/projections"
)

// reader reads the projections' rows of a snapshot or of a batch.
type reader struct{ from pebble.Reader }

var _ projections.Reader = reader{}

// get is the caller's copy of a value, nil if there is none.
func get(r pebble.Reader, key []byte) ([]byte, error) {
	value, closer, err := r.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	owned := append([]byte{}, value...)
	return owned, closer.Close()
}

// Get implements [projections.Reader].
func (r reader) Get(key []byte) ([]byte, error) { return get(r.from, key) }

// Scan implements [projections.Reader].
func (r reader) Scan(lo, hi []byte, visit func(key, value []byte) error) (err error) {
	if bytes.Compare(lo, firstRow) < 0 {
		lo = firstRow
	}
	it, err := r.from.NewIter(&pebble.IterOptions{LowerBound: lo, UpperBound: hi})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for it.First(); it.Valid(); it.Next() {
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

// table folds into an indexed batch, whose writes it reads back.
type table struct {
	reader
	batch *pebble.Batch
}

var _ projections.Table = table{}

// Set implements [projections.Table].
func (t table) Set(key, value []byte) error { return t.batch.Set(key, value, nil) }

// Delete implements [projections.Table].
func (t table) Delete(key []byte) error { return t.batch.Delete(key, nil) }
