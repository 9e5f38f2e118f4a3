package viewdb

import (
	"context"
	"encoding/json"
	"errors"
	"math"

	"github.com/cockroachdb/pebble/v2"

	"github.com/ckptstore/ckptstore/projections"
)

// Every sets the distance of keyframes of new views, and how many there may be.
func (h *History) Every(events, most uint64) { h.every, h.most = events, most }

// Build makes the keyframes up to the present.
func (h *History) Build(ctx context.Context) error {
	for {
		if next, err := h.stretch(ctx, math.MaxUint64); err != nil || next > 0 {
			return err
		}
	}
}

// Keyframes returns the last keyframe and the distance of two.
func (h *History) Keyframes() (at, every uint64, err error) {
	err = h.views.ViewAt(func(live projections.Reader, _ uint64) error {
		_, k, err := h.keyframes(live)
		at, every = k.At, k.Every
		return err
	})
	return at, every, err
}

// Forget drops the results of queries.
func (h *History) Forget() { h.recent = nil }

// Versions returns how many versions of rows the keyframes have, and the most of one row.
func (db *DB) Versions() (n, most int, err error) {
	it, err := db.pebble.NewIter(&pebble.IterOptions{LowerBound: firstVersion, UpperBound: lastVersion})
	if err != nil {
		return 0, 0, err
	}
	row, of := "", 0
	for it.First(); it.Valid(); it.Next() {
		versions, _, err := cutVersion(it.Key())
		if err != nil {
			return 0, 0, errors.Join(err, it.Close())
		}
		if string(versions) != row {
			row, of = string(versions), 0
		}
		n, of = n+1, of+1
		most = max(most, of)
	}
	return n, most, it.Close()
}

// Disguise makes the keyframes those of another version of the folds, or text that is none.
func (db *DB) Disguise(reducer int, text string) error {
	k, err := readKeyframes(db.pebble, 1)
	if err != nil {
		return err
	}
	k.Reducer = reducer
	if text != "" {
		return db.pebble.Set(framesKey, []byte(text), pebble.Sync)
	}
	return db.keep(nil, k)
}

// StartKeyframes does what an opening does about keyframes.
func (db *DB) StartKeyframes() error { return db.startKeyframes() }

// Age makes the rows those of the version of the folds before this one.
func (db *DB) Age() error {
	c, _, err := readCursor(db.pebble)
	if err != nil {
		return err
	}
	c.Reducer--
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return db.pebble.Set(cursorKey, text, pebble.Sync)
}
