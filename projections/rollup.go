package projections

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

// A rollup summarizes the reports of 16, 256, 4096 and more iterations of an attempt, all
// metrics in one row: a chart of a million reports then reads some thousand rows. A rollup
// of level 1 exists once all of its 16 reports do, one of a higher level once all of its 16
// rollups do. It is merged from them in the order of iterations. So it does not depend on
// the order in which reports came, and never changes. Queries read what has no rollup yet
// from the level below.
//
//	version of this layout: 1           1 byte
//	highest sequence of its reports     uvarint
//	and how much lower the lowest is    uvarint
//	steps: first, last, least, greatest 4 varints
//	time of the last report, in µs      varint
//	seconds of all reports              8 bytes, of a float64, little-endian
//	number of metrics                   uvarint, and for each of them, sorted by name:
//	  name                              its length, a uvarint, and its bytes
//	  reports with a number             uvarint
//	  reports with another value        uvarint
//	  NaN, +Inf, -Inf among the numbers 3 uvarints
//	  if any number is finite: sum, min, max    3 x 8 bytes
//	                           at min, at max   2 uvarints: iterations after the first
//	  if there is a number:    last             8 bytes
//	                           at last          uvarint
type rollup struct {
	sequence uint64 // the highest
	since    uint64 // the lowest
	first    int    // iteration
	last     int
	steps    [4]int64
	at       int64 // µs
	seconds  float64
	metrics  tallies
}

// fan is the number of rows that one rollup is merged from.
const fan = 16

// topLevel is the highest level of rollups: its rows are of 16^12 iterations.
const topLevel = 12

// rollupLayout is the version of the layout.
const rollupLayout = 1

// tally summarizes one metric over some iterations.
type tally struct {
	name          string
	numbers       int // including those that are not finite
	others        int // strings and booleans
	nan, inf, neg int
	sum, min, max float64 // of the finite numbers
	atMin, atMax  int     // iterations, the first of equals
	value         float64 // the last number
	atLast        int
}

func (t *tally) finite() int { return t.numbers - t.nan - t.inf - t.neg }

// add adds the value of a later iteration.
func (t *tally) add(iteration int, v float64, number bool) {
	if !number {
		t.others++
		return
	}
	t.numbers++
	t.value, t.atLast = v, iteration
	switch {
	case math.IsNaN(v):
		t.nan++
	case math.IsInf(v, 1):
		t.inf++
	case math.IsInf(v, -1):
		t.neg++
	default:
		t.finiteOf(tally{sum: v, min: v, max: v, atMin: iteration, atMax: iteration}, t.finite() == 1)
	}
}

// merge adds later iterations.
func (t *tally) merge(o *tally) {
	if o.finite() > 0 {
		t.finiteOf(*o, t.finite() == 0)
	}
	if o.numbers > 0 {
		t.value, t.atLast = o.value, o.atLast
	}
	t.numbers, t.others = t.numbers+o.numbers, t.others+o.others
	t.nan, t.inf, t.neg = t.nan+o.nan, t.inf+o.inf, t.neg+o.neg
}

// finiteOf adds the finite numbers of later iterations, which may be the first.
func (t *tally) finiteOf(o tally, first bool) {
	if first {
		t.sum, t.min, t.max, t.atMin, t.atMax = o.sum, o.min, o.max, o.atMin, o.atMax
		return
	}
	t.sum += o.sum
	if o.min < t.min {
		t.min, t.atMin = o.min, o.atMin
	}
	if o.max > t.max {
		t.max, t.atMax = o.max, o.atMax
	}
}

// tallies are sorted by name.
type tallies []*tally

// of returns the tally of a name. guess is where it is if the names are those of the row
// before.
func (t *tallies) of(name []byte, guess int) *tally {
	if list := *t; guess < len(list) && list[guess].name == string(name) {
		return list[guess]
	}
	i, found := slices.BinarySearchFunc(*t, name, func(t *tally, name []byte) int { return bytes.Compare([]byte(t.name), name) })
	if !found {
		*t = slices.Insert(*t, i, &tally{name: string(name)})
	}
	return (*t)[i]
}

// spanOf returns the number of iterations of a rollup.
func spanOf(level int) int { return 1 << (4 * level) }

// bucketOf returns the rollup of a level that has an iteration, counted from 0.
func bucketOf(level, iteration int) int { return (iteration - 1) / spanOf(level) }

func rollupKey(run, trial string, attempt, level, bucket int) []byte {
	k := append(number(key(keyRollup, run, trial), uint64(attempt)), byte(level))
	return number(k, uint64(bucket))
}

// roll writes the rollups that a new report completes. Only the last report of its 16, and a
// report that it has overtaken, can complete them: when the last one comes, the missing ones
// get the row of an awaited iteration.
func (f *fold) roll(attempt, iteration int) error {
	bucket := bucketOf(1, iteration)
	if last := (bucket + 1) * fan; iteration != last {
		value, err := f.t.Get(reportKey(f.run, f.name, attempt, last))
		if err != nil || value == nil {
			return err // it is awaited by checkpoints
		}
	}
	row, missing, err := rollReports(f.t, f.run, f.name, attempt, bucket)
	if err != nil {
		return err
	}
	for _, i := range missing {
		k := awaitKey(f.run, f.name, attempt, i)
		_, found, err := load[awaiting](f.t, k)
		if err == nil && !found {
			err = store(f.t, k, awaiting{})
		}
		if err != nil {
			return err
		}
	}
	for level := 1; row != nil; level++ {
		if err := f.t.Set(rollupKey(f.run, f.name, attempt, level, bucket), row.encode()); err != nil {
			return err
		}
		if level == topLevel {
			return nil
		}
		if last := bucket | (fan - 1); last != bucket {
			value, err := f.t.Get(rollupKey(f.run, f.name, attempt, level, last))
			if err != nil || value == nil {
				return err
			}
		}
		if row, err = rollRollups(f.t, f.run, f.name, attempt, level, bucket/fan); err != nil {
			return err
		}
		bucket /= fan
	}
	return nil
}

// rollReports merges the 16 reports of a rollup. If some are missing, it returns them.
func rollReports(r Reader, run, trial string, attempt, bucket int) (*rollup, []int, error) {
	first := bucket*fan + 1
	out := &rollup{first: first, last: first + fan - 1}
	var rows [fan][]byte
	found := 0
	err := r.Scan(reportKey(run, trial, attempt, out.last), reportKey(run, trial, attempt, first-1), func(k, value []byte) error {
		rows[iterationOf(k)-first] = bytes.Clone(value)
		found++
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	if found < fan {
		var missing []int
		for i, row := range rows {
			if row == nil {
				missing = append(missing, first+i)
			}
		}
		return nil, missing, nil
	}
	var raw rawReport
	for i, row := range rows {
		if err := raw.read(row); err != nil {
			return nil, nil, err
		}
		out.add(first+i, &raw)
	}
	at, err := time.Parse(time.RFC3339Nano, string(raw.time))
	out.at = at.UnixMicro()
	return out, nil, err
}

// iterationOf returns the iteration at the end of a report's key.
func iterationOf(k []byte) int { return int(^binary.BigEndian.Uint64(k[len(k)-8:])) }

// add adds the report of the next iteration.
func (u *rollup) add(iteration int, r *rawReport) {
	u.span(r.sequence, r.sequence)
	u.step(r.step, r.step, r.step, r.step, iteration == u.first)
	u.seconds += r.seconds
	for i, v := range r.values {
		u.metrics.of(v.name, i).add(iteration, v.value, v.number)
	}
}

// span adds a lowest and a highest sequence.
func (u *rollup) span(since, sequence uint64) {
	if u.sequence == 0 {
		u.since = since
	}
	u.since, u.sequence = min(u.since, since), max(u.sequence, sequence)
}

// step adds the first, last, least and greatest step of later iterations.
func (u *rollup) step(first, last, least, most int64, begins bool) {
	if begins {
		u.steps = [4]int64{first, last, least, most}
		return
	}
	u.steps = [4]int64{u.steps[0], last, min(u.steps[2], least), max(u.steps[3], most)}
}

// rollRollups merges the 16 rollups of one of the next level. It returns nil if one is
// missing.
func rollRollups(r Reader, run, trial string, attempt, level, bucket int) (*rollup, error) {
	span := spanOf(level + 1)
	out := &rollup{first: bucket*span + 1, last: (bucket + 1) * span}
	found := 0
	lo, hi := rollupKey(run, trial, attempt, level, bucket*fan), rollupKey(run, trial, attempt, level, (bucket+1)*fan)
	err := r.Scan(lo, hi, func(k, value []byte) error {
		one, err := decodeRollup(k, value, nil)
		if err != nil {
			return err
		}
		out.span(one.since, one.sequence)
		out.step(one.steps[0], one.steps[1], one.steps[2], one.steps[3], found == 0)
		out.at, out.seconds = one.at, out.seconds+one.seconds
		for i, t := range one.metrics {
			out.metrics.of([]byte(t.name), i).merge(t)
		}
		found++
		return nil
	})
	if err != nil || found < fan {
		return nil, err
	}
	return out, nil
}

func (u *rollup) encode() []byte {
	b := append(make([]byte, 0, 64+80*len(u.metrics)), rollupLayout)
	b = binary.AppendUvarint(binary.AppendUvarint(b, u.sequence), u.sequence-u.since)
	for _, step := range u.steps {
		b = binary.AppendVarint(b, step)
	}
	b = binary.AppendVarint(b, u.at)
	b = appendFloat(b, u.seconds)
	b = binary.AppendUvarint(b, uint64(len(u.metrics)))
	for _, t := range u.metrics {
		b = binary.AppendUvarint(b, uint64(len(t.name)))
		b = append(b, t.name...)
		for _, n := range [...]int{t.numbers, t.others, t.nan, t.inf, t.neg} {
			b = binary.AppendUvarint(b, uint64(n))
		}
		if t.finite() > 0 {
			b = appendFloat(appendFloat(appendFloat(b, t.sum), t.min), t.max)
			b = binary.AppendUvarint(b, uint64(t.atMin-u.first))
			b = binary.AppendUvarint(b, uint64(t.atMax-u.first))
		}
		if t.numbers > 0 {
			b = appendFloat(b, t.value)
			b = binary.AppendUvarint(b, uint64(t.atLast-u.first))
		}
	}
	return b
}

// appendFloat appends a number; all NaNs are one.
func appendFloat(b []byte, v float64) []byte {
	if math.IsNaN(v) {
		v = math.NaN()
	}
	return binary.LittleEndian.AppendUint64(b, math.Float64bits(v))
}

// errRollup reports a rollup that ends early or has more than it should.
var errRollup = errors.New("its length is not that of its content")

// decodeRollup decodes the row of a key, all metrics or those that want accepts.
func decodeRollup(k, value []byte, want func(name []byte) bool) (*rollup, error) {
	level := int(k[len(k)-9])
	bucket := int(binary.BigEndian.Uint64(k[len(k)-8:]))
	u := &rollup{first: bucket*spanOf(level) + 1, last: (bucket + 1) * spanOf(level)}
	d := decoder{rest: value}
	if version := d.byte(); version != rollupLayout {
		d.bad = true
	}
	u.sequence = d.uvarint()
	u.since = u.sequence - min(u.sequence, d.uvarint())
	for i := range u.steps {
		u.steps[i] = d.varint()
	}
	u.at, u.seconds = d.varint(), d.float()
	n := d.uvarint()
	if want == nil && !d.bad && n < uint64(len(value)) {
		u.metrics = make(tallies, 0, n)
	}
	for range n {
		if d.bad {
			break
		}
		name := d.bytes(d.uvarint())
		t := tally{numbers: d.int(), others: d.int(), nan: d.int(), inf: d.int(), neg: d.int()}
		if t.finite() > 0 {
			t.sum, t.min, t.max = d.float(), d.float(), d.float()
			t.atMin, t.atMax = u.first+d.int(), u.first+d.int()
		}
		if t.numbers > 0 {
			t.value, t.atLast = d.float(), u.first+d.int()
		}
		if !d.bad && (want == nil || want(name)) {
			t.name = string(name)
			u.metrics = append(u.metrics, &t)
		}
	}
	if d.bad || len(d.rest) > 0 {
		return nil, fmt.Errorf("row %q is damaged: %w; delete the views, they are rebuilt from the log", k, errRollup)
	}
	return u, nil
}

// decoder reads the parts of a rollup. After bad is set they are zero.
type decoder struct {
	rest []byte
	bad  bool
}

func (d *decoder) bytes(n uint64) []byte {
	if d.bad || n > uint64(len(d.rest)) {
		d.bad = true
		return nil
	}
	b := d.rest[:n]
	d.rest = d.rest[n:]
	return b
}

func (d *decoder) byte() byte {
	if b := d.bytes(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.rest)
	d.bytes(uint64(max(n, 0)))
	if n <= 0 {
		d.bad = true
	}
	return v
}

func (d *decoder) varint() int64 {
	v, n := binary.Varint(d.rest)
	d.bytes(uint64(max(n, 0)))
	if n <= 0 {
		d.bad = true
	}
	return v
}

func (d *decoder) int() int { return int(d.uvarint()) }

func (d *decoder) float() float64 {
	b := d.bytes(8)
	if b == nil {
		return 0
	}
	return math.Float64frombits(binary.LittleEndian.Uint64(b))
}
