package viewdb

import (
	"bytes"
	"errors"

	"github.com/cockroachdb/pebble/v2"

	"github.com/ckptstore/ckptstore/projections"
)

// reader reads the projections' rows of a database or of a snapshot.
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
	it, err := r.from.NewIter(bounds(lo, hi))
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

// bounds keeps a scan out of the keys that are not the projections'.
func bounds(lo, hi []byte) *pebble.IterOptions {
	if bytes.Compare(lo, firstRow) < 0 {
		lo = firstRow
	}
	return &pebble.IterOptions{LowerBound: lo, UpperBound: hi}
}
