package data

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/local"
)

// ErrReplaced reports that a file was replaced or removed while it was written.
var ErrReplaced = errors.New("the file was replaced or removed meanwhile")

// PendingFile is one file of a [Pending]. Its bytes arrive in pieces, in memory that another
// process fills. Each piece is digested and written from that memory, in parallel.
type PendingFile struct {
	p    *Pending
	name string // in the directory

	up      *local.Growing
	slots   chan struct{} // holds one for each run in progress
	digests chan *job
	writes  chan *job
	workers sync.WaitGroup // the digester and the writers
	ended   chan struct{}  // closed when no run is in progress and none will follow

	mu     sync.Mutex
	err    error
	closed bool
	whole  bool
	said   int64 // bytes that were accepted

	segments // owned by the digester until ended is closed
}

// job is a run of bytes to be digested and written.
type job struct {
	offset int64
	data   []byte
	cuts   []Cut
	left   atomic.Int32 // of the digest and the write
	done   func()
}

// end records that the digest or the write of a run is done.
func (f *PendingFile) end(j *job) {
	if j.left.Add(-1) == 0 {
		<-f.slots
		j.done()
	}
}

// behind is the number of runs that may be in progress.
const behind = 64

func newPendingFile(p *Pending, name string, up *local.Growing) *PendingFile {
	f := &PendingFile{
		p: p, name: name, up: up, ended: make(chan struct{}),
		slots: make(chan struct{}, behind), digests: make(chan *job, behind), writes: make(chan *job, behind),
	}
	f.workers.Go(f.digest)
	for range up.Depth() {
		f.workers.Go(f.write)
	}
	return f
}

func (f *PendingFile) fail(err error) {
	if err == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = err
	}
}

// Err returns the reason why the file can no longer be written, or nil.
func (f *PendingFile) Err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// Write accepts the next bytes of the file, with the cuts in them. The caller must not change
// the bytes until done is called, which happens once, after both the digest and the file have
// them. Write returns immediately unless many runs are waiting. After a disk error or an
// abort, it and Close return that error. done is not called for bytes that Write refused.
func (f *PendingFile) Write(ctx context.Context, data []byte, cuts []Cut, done func()) error {
	select {
	case f.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	err := f.take(&job{data: data, cuts: cuts, done: done})
	if err != nil {
		<-f.slots
	}
	return err
}

func (f *PendingFile) take(j *job) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return f.err
	}
	if f.closed {
		return errors.New("the file is closed")
	}
	j.offset = f.said
	f.said += int64(len(j.data))
	j.left.Store(2)
	// Neither blocks: there is one slot for each place.
	f.digests <- j
	f.writes <- j
	return nil
}

// Room returns an error if the disk has too little room for size more bytes, or if the file
// can no longer be written.
func (f *PendingFile) Room(ctx context.Context, size int64) error {
	if err := f.Err(); err != nil {
		return err
	}
	if err := f.p.root.reserve(ctx, size); err != nil {
		return err
	}
	f.p.root.release(size)
	return nil
}

// Accepted returns the number of bytes that were accepted.
func (f *PendingFile) Accepted() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.said
}

// digest digests one run after the other.
func (f *PendingFile) digest() {
	for j := range f.digests {
		if f.Err() == nil {
			var err error
			if !object.Readable(func() { err = f.see(j.data, j.cuts) }) {
				err = fmt.Errorf("read %d bytes in memory, which are at %d of the file: the memory was unmapped or truncated", len(j.data), j.offset)
			}
			f.fail(err)
		}
		f.end(j)
	}
	f.endSegment()
}

// write is a goroutine that writes runs. It and digest read the same memory. A byte that
// changes in between therefore fails its digest when it is read back.
func (f *PendingFile) write() {
	for j := range f.writes {
		if f.Err() == nil {
			if _, err := f.up.WriteAt(j.data, j.offset); err != nil {
				f.fail(fmt.Errorf("write %d bytes at %d: %w", len(j.data), j.offset, err))
			}
		}
		f.end(j)
	}
}

// drain waits until no run is in progress, after closed was set.
func (f *PendingFile) drain() {
	close(f.digests)
	close(f.writes)
	f.workers.Wait()
}

// Close waits until everything is digested and written, and makes the bytes durable. It may
// be repeated.
func (f *PendingFile) Close() error {
	f.mu.Lock()
	first := !f.closed
	f.closed = true
	f.mu.Unlock()
	if !first {
		<-f.ended
		return f.Err()
	}
	defer close(f.ended)
	f.drain()
	err := f.Err()
	if err == nil {
		err = f.up.Finish(f.size)
	} else {
		f.up.Abort()
	}
	f.fail(err)
	f.mu.Lock()
	f.whole = f.err == nil
	f.mu.Unlock()
	return err
}

// Whole reports whether the file was closed without an error.
func (f *PendingFile) Whole() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.whole && f.err == nil
}

// at returns the whole file under another name in another directory.
func (f *PendingFile) at(p *Pending, lies string) *PendingFile {
	return &PendingFile{p: p, name: lies, up: f.up, ended: f.ended, closed: true, whole: true, said: f.said, segments: f.segments}
}

// Size returns the file's size, once it is closed.
func (f *PendingFile) Size() int64 { return f.size }

// Abort abandons the file, unless it is closed. On return no run is in progress.
func (f *PendingFile) Abort() {
	f.mu.Lock()
	first := !f.closed
	f.closed = true
	if first && f.err == nil {
		f.err = ErrReplaced
	}
	f.mu.Unlock()
	if !first {
		<-f.ended
		return
	}
	defer close(f.ended)
	f.drain()
	f.up.Abort()
}

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

// segments are the known contents of a file that is written from beginning to end.
type segments struct {
	size int64
	segs []segment
	kept int            // bytes in memory
	last *scan.Digester // of the last segment, if it is an unfinished payload
}

// see takes the next bytes, with the cuts in them.
func (g *segments) see(data []byte, cuts []Cut) error {
	for _, c := range cuts {
		k := int(c.Offset - g.size)
		if k < 0 || k > len(data) {
			return fmt.Errorf("a cut at %d lies outside the written bytes", c.Offset)
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
		g.last = scan.NewDigester(0)
	}
}

// endSegment finishes the digest or the literal of the last segment.
func (g *segments) endSegment() {
	if len(g.segs) == 0 {
		return
	}
	if s := &g.segs[len(g.segs)-1]; s.payload && g.last != nil {
		s.digest, s.sums = g.last.End()
		g.last.Free()
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
		g.last.Add(p)
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

// find returns the segment that holds an offset, nil if there is none.
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

// literal returns bytes of a closed file that are in memory; nil unless all are.
func (g *segments) literal(off, n int64) []byte {
	s := g.find(off)
	if s == nil || s.payload || int64(len(s.data)) != s.size || off+n > s.offset+s.size {
		return nil
	}
	return s.data[off-s.offset:][:n]
}

// payload returns the known segment of a run of bytes that was written as one.
func (g *segments) payload(off, n int64) *segment {
	s := g.find(off)
	if s == nil || !s.payload || s.offset != off || s.size != n {
		return nil
	}
	return s
}

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

// Describe describes a whole file for [Pending.Give] on another machine.
func (f *PendingFile) Describe() Description {
	d := Description{Size: f.size}
	for _, s := range f.segs {
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

// segments checks the description and returns the contents that it describes.
func (d Description) segments() (g segments, err error) {
	end := int64(0)
	for i, s := range d.Segments {
		switch {
		case s.Offset != end || s.Size < 0:
			return g, fmt.Errorf("segment %d of %d bytes is at %d, after %d", i, s.Size, s.Offset, end)
		case s.Payload && (s.Digest == nil || int64(len(s.Sums)) != 4*checkpoint.Blocks(s.Size)):
			return g, fmt.Errorf("segment %d of %d bytes has no digest, or %d bytes of checksums", i, s.Size, len(s.Sums))
		case int64(len(s.Data)) > s.Size:
			return g, fmt.Errorf("segment %d of %d bytes has %d", i, s.Size, len(s.Data))
		}
		end += s.Size
		in := segment{offset: s.Offset, size: s.Size, payload: s.Payload, data: s.Data}
		if s.Payload {
			in.digest = *s.Digest
			for sums := s.Sums; len(sums) > 0; sums = sums[4:] {
				in.sums = append(in.sums, binary.LittleEndian.Uint32(sums))
			}
		}
		g.segs = append(g.segs, in)
	}
	if end != d.Size {
		return g, fmt.Errorf("the segments have %d bytes, and the file %d", end, d.Size)
	}
	g.size = end
	return g, nil
}
