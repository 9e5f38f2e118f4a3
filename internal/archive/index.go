package archive

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
)

// index locates the messages of a segment:
//
//	frames     count, then of each: its first sequence less that of the segment,
//	           and its offset in the file
//	subjects   count, then of each, in order: length and bytes of the subject, and
//	           its last sequence less the segment's first
//	lanes      count, then of each, in order: length and bytes of the lane's filter,
//	           the number of its messages, and their sequences: the first less
//	           the segment's first, the others less their predecessor
//
// All numbers are uvarints.
type index struct {
	first    uint64 // of the segment
	frames   []place
	subjects []subject
	lanes    []lane
}

type place struct {
	first  uint64 // sequence
	offset int64
}

type subject struct {
	name string
	last uint64
}

type lane struct {
	name      string
	sequences []uint64
}

func (x index) encode() []byte {
	var b []byte
	number := func(n uint64) { b = binary.AppendUvarint(b, n) }
	text := func(s string) {
		number(uint64(len(s)))
		b = append(b, s...)
	}
	number(uint64(len(x.frames)))
	for _, p := range x.frames {
		number(p.first - x.first)
		number(uint64(p.offset)) //nolint:gosec // not negative
	}
	number(uint64(len(x.subjects)))
	for _, s := range x.subjects {
		text(s.name)
		number(s.last - x.first)
	}
	number(uint64(len(x.lanes)))
	for _, l := range x.lanes {
		text(l.name)
		number(uint64(len(l.sequences)))
		before := x.first
		for _, seq := range l.sequences {
			number(seq - before)
			before = seq
		}
	}
	return b
}

// decodeIndex decodes the output of encode.
func decodeIndex(raw []byte, first uint64) (x index, err error) {
	x.first = first
	bad := false
	number := func() uint64 {
		n, size := binary.Uvarint(raw)
		if size <= 0 {
			bad = true
			return 0
		}
		raw = raw[size:]
		return n
	}
	text := func() string {
		n := number()
		if n > uint64(len(raw)) {
			bad = true
			return ""
		}
		s := string(raw[:n])
		raw = raw[n:]
		return s
	}
	for n := number(); n > 0 && !bad; n-- {
		x.frames = append(x.frames, place{first: first + number(), offset: int64(number())}) //nolint:gosec // checked where it is used
	}
	for n := number(); n > 0 && !bad; n-- {
		x.subjects = append(x.subjects, subject{name: text(), last: first + number()})
	}
	for n := number(); n > 0 && !bad; n-- {
		l := lane{name: text()}
		before := first
		for k := number(); k > 0 && !bad; k-- {
			before += number()
			l.sequences = append(l.sequences, before)
		}
		x.lanes = append(x.lanes, l)
	}
	if bad || len(raw) > 0 || len(x.frames) == 0 {
		return x, fmt.Errorf("%w: the index cannot be read", ErrDamaged)
	}
	return x, nil
}

// lane returns the sequences of a lane, in order; nil if the segment has none.
func (x index) lane(name string) []uint64 {
	i, ok := slices.BinarySearchFunc(x.lanes, name, func(l lane, name string) int { return strings.Compare(l.name, name) })
	if !ok {
		return nil
	}
	return x.lanes[i].sequences
}

// frame returns the position of the frame that holds a sequence.
func (x index) frame(sequence uint64) int {
	i, ok := slices.BinarySearchFunc(x.frames, sequence, func(p place, seq uint64) int {
		switch {
		case p.first < seq:
			return -1
		case p.first > seq:
			return 1
		}
		return 0
	})
	if !ok {
		i--
	}
	return i
}

// laneOf returns the filter of the lane that a subject is in; "" if it is in none. The
// subject of a decision is ckpt.<run>.<trial>.s.<family>.<kind>.
func laneOf(subject string) string {
	rest := subject
	for range 3 {
		_, after, ok := strings.Cut(rest, ".")
		if !ok {
			return ""
		}
		rest = after
	}
	if !strings.HasPrefix(rest, "s.") {
		return ""
	}
	return subject[:len(subject)-len(rest)] + "s.>"
}

// isLane reports whether a filter selects exactly one lane.
func isLane(filter string) bool {
	head, ok := strings.CutSuffix(filter, ".>")
	return ok && strings.Count(head, ".") == 3 && !strings.Contains(head, "*") && strings.HasSuffix(head, ".s")
}

// matches reports whether a subject falls under a filter, by the rules of NATS: *
// stands for one token, > at the end for one or more.
func matches(filter, subject string) bool {
	for {
		want, filterRest, more := strings.Cut(filter, ".")
		if want == ">" {
			return subject != ""
		}
		got, subjectRest, gotMore := strings.Cut(subject, ".")
		if want != "*" && want != got {
			return false
		}
		if !more || !gotMore {
			return more == gotMore
		}
		filter, subject = filterRest, subjectRest
	}
}
