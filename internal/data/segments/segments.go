// Package segments knows the contents of a file that another program writes from beginning to end:
// the digests of its tensors, and the bytes between them.
//
//	Cut          where a segment begins
//	Contents     the segments so far
//	Description  the contents, as another machine gets them
package segments

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/scan"
)

// maxLiteral bounds the bytes of a file that are kept in memory.
const maxLiteral = 64 << 20

// segment is a run of bytes that was written as one: a tensor, whose digest is known, or
// other data, which is kept in memory.
type segment struct {
	offset, size int64
	payload      bool
	digest       checkpoint.Digest
	sums         []uint32
	data         []byte // if it is not a payload; nil if it was too large
}

// Cut marks an offset in a file at which another segment begins: the bytes of one tensor, or
// the bytes between tensors.
type Cut struct {
	Offset  int64
	Payload bool
}

// Contents are the known contents of a file that is written from beginning to end. They are not for
// concurrent use.
type Contents struct {
	size int64
	segs []segment
	kept int            // bytes in memory
	last *scan.Digester // of the last segment, if it is an unfinished payload
}

// See takes the next bytes, with the cuts in them.
func (c *Contents) See(data []byte, cuts []Cut) error {
	for _, at := range cuts {
		k := int(at.Offset - c.size)
		if k < 0 || k > len(data) {
			return fmt.Errorf("a cut at %d lies outside the written bytes", at.Offset)
		}
		c.add(data[:k])
		data = data[k:]
		c.cut(at.Payload)
	}
	c.add(data)
	return nil
}

func (c *Contents) cut(payload bool) {
	c.End()
	c.segs = append(c.segs, segment{offset: c.size, payload: payload})
	if payload {
		c.last = scan.NewDigester(0)
	}
}

// End finishes the digest or the literal of the last segment.
func (c *Contents) End() {
	if len(c.segs) == 0 {
		return
	}
	if s := &c.segs[len(c.segs)-1]; s.payload && c.last != nil {
		s.digest, s.sums = c.last.End()
		c.last.Free()
		c.last = nil
	}
}

func (c *Contents) add(p []byte) {
	if len(p) == 0 {
		return
	}
	if len(c.segs) == 0 {
		c.cut(false)
	}
	s := &c.segs[len(c.segs)-1]
	switch {
	case s.payload:
		c.last.Add(p)
	case int64(len(s.data)) == s.size && c.kept+len(p) <= maxLiteral:
		s.data = append(s.data, p...)
		c.kept += len(p)
	default:
		c.kept -= len(s.data)
		s.data = nil
	}
	s.size += int64(len(p))
	c.size += int64(len(p))
}

// find returns the segment that holds an offset, nil if there is none.
func (c *Contents) find(off int64) *segment {
	i, ok := slices.BinarySearchFunc(c.segs, off, func(s segment, at int64) int {
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
	return &c.segs[i]
}

// Literal returns bytes of a closed file that are in memory; nil unless all are.
func (c *Contents) Literal(off, n int64) []byte {
	s := c.find(off)
	if s == nil || s.payload || int64(len(s.data)) != s.size || off+n > s.offset+s.size {
		return nil
	}
	return s.data[off-s.offset:][:n]
}

// Payload returns the digest and the checksums of the blocks of a run of bytes that was written as
// one tensor. ok is false if it was not.
func (c *Contents) Payload(off, n int64) (digest checkpoint.Digest, sums []uint32, ok bool) {
	s := c.find(off)
	if s == nil || !s.payload || s.offset != off || s.size != n {
		return digest, nil, false
	}
	return s.digest, s.sums, true
}

// Size returns the number of bytes so far.
func (c *Contents) Size() int64 { return c.size }

// Description is what the machine that wrote a pending file knows of it.
type Description struct {
	Size     int64     `json:"size"`
	Segments []Segment `json:"segments"`
}

// Segment is a run of bytes that was written as one: a tensor with its digest and the
// checksums of its blocks, or other bytes themselves, unless they are too many.
type Segment struct {
	Offset  int64              `json:"offset"`
	Size    int64              `json:"size"`
	Payload bool               `json:"payload,omitempty"`
	Digest  *checkpoint.Digest `json:"digest,omitempty"`
	Sums    []byte             `json:"sums,omitempty"` // u32 little endian
	Data    []byte             `json:"data,omitempty"`
}

// Describe describes the contents for another machine.
func (c *Contents) Describe() Description {
	d := Description{Size: c.size}
	for _, s := range c.segs {
		out := Segment{Offset: s.offset, Size: s.size, Payload: s.payload, Data: s.data}
		if s.payload {
			out.Digest = &s.digest
			for _, sum := range s.sums {
				out.Sums = binary.LittleEndian.AppendUint32(out.Sums, sum)
			}
		}
		d.Segments = append(d.Segments, out)
	}
	return d
}

// Contents checks the description and returns the contents that it describes.
func (d Description) Contents() (c Contents, err error) {
	end := int64(0)
	for i, s := range d.Segments {
		switch {
		case s.Offset != end || s.Size < 0:
			return c, fmt.Errorf("segment %d of %d bytes is at %d, after %d", i, s.Size, s.Offset, end)
		case s.Payload && (s.Digest == nil || int64(len(s.Sums)) != 4*checkpoint.Blocks(s.Size)):
			return c, fmt.Errorf("segment %d of %d bytes has no digest, or %d bytes of checksums", i, s.Size, len(s.Sums))
		case int64(len(s.Data)) > s.Size:
			return c, fmt.Errorf("segment %d of %d bytes has %d", i, s.Size, len(s.Data))
		}
		end += s.Size
		in := segment{offset: s.Offset, size: s.Size, payload: s.Payload, data: s.Data}
		if s.Payload {
			in.digest = *s.Digest
			for sums := s.Sums; len(sums) > 0; sums = sums[4:] {
				in.sums = append(in.sums, binary.LittleEndian.Uint32(sums))
			}
		}
		c.segs = append(c.segs, in)
	}
	if end != d.Size {
		return c, fmt.Errorf("the segments have %d bytes, and the file %d", end, d.Size)
	}
	c.size = end
	return c, nil
}
