package faultproxy

import (
	"cmp"
	"errors"
	"io"
	"slices"
	"sync/atomic"
)

// errCut ends a body whose connection is closed in the middle of it.
var errCut = errors.New("the connection is cut by a fault")

// kind is what an edit does to a body.
type kind int

const (
	flip   kind = iota // the lowest bit of the byte at the offset
	insert             // a byte before the offset
	end                // at the offset, as if the body were complete
	cut                // at the offset, with an error
	stall              // at the offset
)

// edit is one change to a body. Offsets count the bytes of the body before any edit. A
// negative one counts from the end. One past the end is that of the last byte, for an
// insertion the end, so that every edit of a body that is not empty has an effect.
type edit struct {
	do kind
	at int64
}

// resolve returns the edits of a body of size bytes, -1 if unknown, ordered by their
// offsets, and the size after them.
func resolve(edits []edit, size int64) ([]edit, int64) {
	edits = slices.Clone(edits)
	after := size
	for i := range edits {
		e := &edits[i]
		if e.at < 0 {
			e.at = max(0, e.at+max(0, size))
		}
		if size < 0 {
			continue
		}
		switch e.do {
		case insert:
			e.at = min(e.at, size)
			after++
		case end:
			e.at = min(e.at, max(0, size-1))
			after = e.at
		default:
			e.at = min(e.at, max(0, size-1))
		}
	}
	slices.SortStableFunc(edits, func(a, b edit) int { return cmp.Compare(a.at, b.at) })
	return edits, after
}

// stream is a body with edits. One goroutine reads it.
type stream struct {
	from  io.Reader
	edits []edit        // resolved, not yet done
	off   int64         // in from
	count *atomic.Int64 // of the bytes of from
	stall func() error  // blocks; the error ends the body
}

// Read implements [io.Reader].
func (s *stream) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		limit := len(p)
		flipped := false
		if len(s.edits) > 0 {
			next := s.edits[0]
			if next.at > s.off {
				limit = int(min(int64(limit), next.at-s.off))
			} else {
				switch next.do {
				case cut:
					return 0, errCut
				case end:
					return 0, io.EOF
				case insert:
					s.edits = s.edits[1:]
					p[0] = 0
					return 1, nil
				case stall:
					s.edits = s.edits[1:]
					if err := s.stall(); err != nil {
						return 0, err
					}
					continue
				case flip:
					limit, flipped = 1, true
				}
			}
		}
		n, err := s.from.Read(p[:limit])
		s.off += int64(n)
		s.count.Add(int64(n))
		if n > 0 && flipped {
			p[0] ^= 1
			s.edits = s.edits[1:]
		}
		if n == 0 && errors.Is(err, io.EOF) && s.trailing() {
			continue
		}
		if n > 0 && errors.Is(err, io.EOF) && len(s.edits) > 0 {
			err = nil // the next call does them
		}
		return n, err
	}
}

// trailing moves the edits that are left to the end of the body, and reports whether there
// are any.
func (s *stream) trailing() bool {
	s.edits = slices.DeleteFunc(s.edits, func(e edit) bool { return e.do == flip || e.do == end })
	for i := range s.edits {
		s.edits[i].at = s.off
	}
	return len(s.edits) > 0
}
