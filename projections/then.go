package projections

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"

	"github.com/ckptstore/ckptstore/events"
)

// Then is the table as of an event of the past. Rows of reports and rollups never change once
// they exist, and have the sequence that they exist from: Then takes them from the rows of a
// later time, and has only the other rows itself. It is the same table, byte for byte, as a
// fold from the first event on would give.
type Then struct {
	rows Table  // without reports and rollups
	live Reader // of the same log at a later time
	at   uint64 // sequence of the last event
	seen uint64 // highest sequence of visible rows of live: at, or less during an event
}

var _ Table = (*Then)(nil)

// NewThen returns the table as of the event at a sequence. rows are those of another Then at
// that sequence, or empty at 0: Then writes to them, and never a report or a rollup. live
// holds a later state.
func NewThen(rows Table, live Reader, at uint64) *Then {
	return &Then{rows: rows, live: live, at: at, seen: at}
}

// Apply folds the next event, as [Apply] does.
func (t *Then) Apply(r events.Recorded) error {
	if r.Sequence != t.at+1 {
		return fmt.Errorf("event %d cannot follow event %d", r.Sequence, t.at)
	}
	if err := Apply(t, r); err != nil {
		return err
	}
	t.at, t.seen = r.Sequence, r.Sequence
	return nil
}

// later reports whether rows of a key are taken from the later state.
func later(key []byte) bool { return len(key) > 0 && (key[0] == keyReport || key[0] == keyRollup) }

// sequenceIn returns the sequence that a row of a report or a rollup exists from.
func sequenceIn(key, value []byte) (seq uint64, err error) {
	bad := true
	if key[0] == keyRollup && len(value) > 1 {
		var n int
		seq, n = binary.Uvarint(value[1:])
		bad = n <= 0
	} else if rest, ok := bytes.CutPrefix(value, []byte(`{"sequence":`)); ok {
		digits, _, _ := bytes.Cut(rest, []byte{','})
		seq, err = strconv.ParseUint(string(digits), 10, 64)
		bad = err != nil
	}
	if bad {
		return 0, fmt.Errorf("row %q is damaged: it has no sequence; delete the views, they are rebuilt from the log", key)
	}
	return seq, nil
}

// Get implements [Reader].
func (t *Then) Get(key []byte) ([]byte, error) {
	if !later(key) {
		return t.rows.Get(key)
	}
	value, err := t.live.Get(key)
	if err != nil || value == nil {
		return nil, err
	}
	seq, err := sequenceIn(key, value)
	if err != nil || seq > t.seen {
		return nil, err
	}
	return value, nil
}

// Scan implements [Reader].
func (t *Then) Scan(lo, hi []byte, visit func(key, value []byte) error) error {
	visible := func(key, value []byte) error {
		seq, err := sequenceIn(key, value)
		if err != nil || seq > t.seen {
			return err
		}
		return visit(key, value)
	}
	for _, part := range [...]struct {
		from, to []byte
		live     bool
	}{
		{nil, []byte{keyReport}, false},
		{[]byte{keyReport}, []byte{keyReport + 1}, true},
		{[]byte{keyReport + 1}, []byte{keyRollup}, false},
		{[]byte{keyRollup}, []byte{keyRollup + 1}, true},
		{[]byte{keyRollup + 1}, nil, false},
	} {
		from, to := lo, hi
		if bytes.Compare(from, part.from) < 0 {
			from = part.from
		}
		if to == nil || part.to != nil && bytes.Compare(part.to, to) < 0 {
			to = part.to
		}
		if to != nil && bytes.Compare(from, to) >= 0 {
			continue
		}
		var err error
		switch {
		case !part.live:
			err = t.rows.Scan(from, to, visit)
		case part.from[0] == keyReport:
			err = t.scanReports(from, to, visit)
		default:
			err = t.live.Scan(from, to, visible)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// scanReports visits the reports that exist already. An attempt's come the newest first, so
// those of the future lie before them: it skips them by rollups.
func (t *Then) scanReports(from, to []byte, visit func(key, value []byte) error) error {
	for {
		var next []byte
		err := t.live.Scan(from, to, func(key, value []byte) error {
			seq, err := sequenceIn(key, value)
			if err != nil {
				return err
			}
			if seq <= t.seen {
				return visit(key, value)
			}
			if iteration := iterationOf(key); iteration > 0 && iteration%fan == 0 {
				if next, err = t.behind(key, iteration); err == nil && next != nil {
					err = errFound
				}
			}
			return err
		})
		if next == nil || !errors.Is(err, errFound) {
			return err
		}
		from = next
		if to != nil && bytes.Compare(from, to) >= 0 {
			return nil
		}
	}
}

// behind returns the key behind the reports of the largest rollup that ends with an iteration
// and whose reports are all later; nil if there is none. key is that of the iteration.
func (t *Then) behind(key []byte, iteration int) ([]byte, error) {
	attempt := key[1 : len(key)-8]
	level := 1
	for level < topLevel && iteration%spanOf(level+1) == 0 {
		level++
	}
	for ; level > 0; level-- {
		k := append(append([]byte{keyRollup}, attempt...), byte(level))
		k = number(k, uint64(bucketOf(level, iteration)))
		value, err := t.live.Get(k)
		if err != nil {
			return nil, err
		}
		if value == nil {
			continue
		}
		highest, n := binary.Uvarint(value[1:])
		less, m := binary.Uvarint(value[1+max(n, 0):])
		if n > 0 && m > 0 && less <= highest && highest-less > t.seen {
			return number(append([]byte{keyReport}, attempt...), ^uint64(iteration-spanOf(level))), nil
		}
	}
	return nil, nil
}

// Set implements [Table].
func (t *Then) Set(key, value []byte) error {
	if !later(key) {
		return t.rows.Set(key, value)
	}
	t.seen = t.at + 1 // the later state has the row from this event on
	return nil
}

// Delete implements [Table]. Reports and rollups are never deleted.
func (t *Then) Delete(key []byte) error { return t.rows.Delete(key) }
