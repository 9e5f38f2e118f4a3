package data

import (
	"fmt"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// maxLiteral bounds what of a file is kept in memory, in bytes.
const maxLiteral = 64 << 20

// segment is a run of bytes that was written as one: a tensor's, of which the
// digest is known, or something else, which is kept in memory.
type segment struct {
	offset, size int64
	payload      bool
	digest       checkpoint.Digest
	sums         []uint32
	data         []byte // of what is no payload; nil if there was too much of it
}

// Cut says that something else begins at an offset in a file: the bytes of one
// tensor, or whatever lies between.
type Cut struct {
	Offset  int64
	Payload bool
}

// segments are what is known of a file that is written from its beginning to its end.
type segments struct {
	size int64
	segs []segment
	kept int       // bytes in memory
	last *digester // of the last segment, if it is a payload that goes on
}

// see takes the next bytes, with the cuts that lie in them.
func (g *segments) see(data []byte, cuts []Cut) error {
	for _, c := range cuts {
		k := int(c.Offset - g.size)
		if k < 0 || k > len(data) {
			return fmt.Errorf("a cut at %d does not lie in what was written", c.Offset)
		}
		g.add(data[:k])
		data = data[k:]
		g.cut(c.Payload)
	}
	g.add(data)
	return nil
}

func (g *segments) cut(payload bool) {
	g.endSegment()
	g.segs = append(g.segs, segment{offset: g.size, payload: payload})
	if payload {
		g.last = newDigester(0)
	}
}

// endSegment finds what is to be known of the last one.
func (g *segments) endSegment() {
	if len(g.segs) == 0 {
		return
	}
	if s := &g.segs[len(g.segs)-1]; s.payload && g.last != nil {
		s.digest, s.sums = g.last.end()
		g.last.free()
		g.last = nil
	}
}

func (g *segments) add(p []byte) {
	if len(p) == 0 {
		return
	}
	if len(g.segs) == 0 {
		g.cut(false)
	}
	s := &g.segs[len(g.segs)-1]
	switch {
	case s.payload:
		g.last.add(p)
	case int64(len(s.data)) == s.size && g.kept+len(p) <= maxLiteral:
		s.data = append(s.data, p...)
		g.kept += len(p)
	default:
		g.kept -= len(s.data)
		s.data = nil
	}
	s.size += int64(len(p))
	g.size += int64(len(p))
}

// find is the segment that holds an offset, nil if there is none.
func (g *segments) find(off int64) *segment {
	i, ok := slices.BinarySearchFunc(g.segs, off, func(s segment, at int64) int {
		switch {
		case s.offset+s.size <= at:
			return -1
		case s.offset > at:
			return 1
		}
		return 0
	})
	if !ok {
		return nil
	}
	return &g.segs[i]
}

// literal are bytes of a closed file that are in memory; nil if not all are.
func (g *segments) literal(off, n int64) []byte {
	s := g.find(off)
	if s == nil || s.payload || int64(len(s.data)) != s.size || off+n > s.offset+s.size {
		return nil
	}
	return s.data[off-s.offset:][:n]
}

// payload is what is known of a run of bytes that was written as one.
func (g *segments) payload(off, n int64) *segment {
	s := g.find(off)
	if s == nil || !s.payload || s.offset != off || s.size != n {
		return nil
	}
	return s
}
