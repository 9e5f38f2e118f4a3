package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/storage/backend/local"
	"github.com/zeebo/blake3"
)

// ErrReplaced says that a file which is written was begun anew, or removed.
var ErrReplaced = errors.New("the file was begun anew or removed meanwhile")

// maxLiteral bounds what of a file is kept in memory, in bytes.
const maxLiteral = 64 << 20

// PendingFile is one file of a [Pending]. Another process writes it, by its
// path, and says how far it has come; it is digested here behind that.
type PendingFile struct {
	p    *Pending
	name string // in the directory

	up   *local.Growing
	jobs chan job
	over chan struct{} // closed when the digester has ended

	mu     sync.Mutex
	err    error
	closed bool
	whole  bool
	said   int64 // bytes that are said to be written

	// Owned by the digester until over is closed.
	size int64
	segs []segment
	kept int
	hash *blake3.Hasher
	sums blockSums
}

// segment is a run of bytes that was written as one: a tensor's, of which the
// digest is known, or something else, which is kept in memory.
type segment struct {
	offset, size int64
	payload      bool
	digest       plan.Digest
	sums         []uint32
	data         []byte // of what is no payload; nil if there was too much of it
}

// Cut says that something else begins at an offset in a file: the bytes of one
// tensor, or whatever lies between.
type Cut struct {
	Offset  int64
	Payload bool
}

// job is a run of bytes to be digested.
type job struct {
	offset int64
	size   int
	cuts   []Cut
}

// behind is how many runs may wait to be digested.
const behind = 64

func newPendingFile(p *Pending, name string, up *local.Growing) *PendingFile {
	f := &PendingFile{p: p, name: name, up: up, jobs: make(chan job, behind), over: make(chan struct{})}
	go f.digest()
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

// Err is why the file cannot be written any more, or nil.
func (f *PendingFile) Err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// Path is where the file is written.
func (f *PendingFile) Path() string { return f.up.Path() }

// Wrote says that the next size bytes are in the file, with the cuts that lie in
// them, and that about next more will come: too little room for those is an
// error. It returns at once, unless the digester is far behind. After an error of
// the disk, or when the file was given up, it and Close return that.
func (f *PendingFile) Wrote(ctx context.Context, size int, cuts []Cut, next int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return f.err
	}
	if f.closed {
		return errors.New("the file is closed")
	}
	if size > 0 {
		select {
		case f.jobs <- job{f.said, size, cuts}:
		case <-ctx.Done():
			return ctx.Err()
		}
		f.said += int64(size)
	}
	if next > 0 {
		if err := f.p.root.reserve(ctx, next); err != nil {
			return err
		}
		f.p.root.release(next)
	}
	return nil
}

// Said is how many bytes are said to be written.
func (f *PendingFile) Said() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.said
}

// digest digests one run after the other.
func (f *PendingFile) digest() {
	defer close(f.over)
	for j := range f.jobs {
		f.mu.Lock()
		given := f.err != nil
		f.mu.Unlock()
		if given {
			continue
		}
		if err := f.up.See(j.offset, j.size, func(data []byte) { f.take(data, j.cuts) }); err != nil {
			f.fail(err)
		}
	}
	f.endSegment()
}

func (f *PendingFile) take(data []byte, cuts []Cut) {
	for _, c := range cuts {
		k := int(c.Offset - f.size)
		if k < 0 || k > len(data) {
			f.fail(fmt.Errorf("a cut at %d does not lie in what was written", c.Offset))
			return
		}
		f.add(data[:k])
		data = data[k:]
		f.cut(c.Payload)
	}
	f.add(data)
}

func (f *PendingFile) cut(payload bool) {
	f.endSegment()
	f.segs = append(f.segs, segment{offset: f.size, payload: payload})
	if payload {
		f.hash, f.sums = blake3.New(), blockSums{}
	}
}

func (f *PendingFile) endSegment() {
	if len(f.segs) == 0 {
		return
	}
	if s := &f.segs[len(f.segs)-1]; s.payload && f.hash != nil {
		f.hash.Sum(s.digest[:0])
		s.sums, f.hash = f.sums.end(), nil
	}
}

func (f *PendingFile) add(p []byte) {
	if len(p) == 0 {
		return
	}
	if len(f.segs) == 0 {
		f.cut(false)
	}
	s := &f.segs[len(f.segs)-1]
	switch {
	case s.payload:
		// In pieces that are still in the cache for the second pass.
		for rest := p; len(rest) > 0; {
			n := min(len(rest), BlockSize)
			_, _ = f.hash.Write(rest[:n]) // never fails
			f.sums.add(rest[:n])
			rest = rest[n:]
		}
	case int64(len(s.data)) == s.size && f.kept+len(p) <= maxLiteral:
		s.data = append(s.data, p...)
		f.kept += len(p)
	default:
		f.kept -= len(s.data)
		s.data = nil
	}
	s.size += int64(len(p))
	f.size += int64(len(p))
}

// Close waits until all is digested, and makes the bytes durable. It may be
// repeated.
func (f *PendingFile) Close() error {
	f.mu.Lock()
	first := !f.closed
	f.closed = true
	f.mu.Unlock()
	if !first {
		<-f.over
		return f.Err()
	}
	close(f.jobs)
	<-f.over
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

// Size is the file's, once it is closed.
func (f *PendingFile) Size() int64 { return f.size }

// Abort gives the file up, unless it is closed.
func (f *PendingFile) Abort() {
	f.mu.Lock()
	first := !f.closed
	f.closed = true
	if first && f.err == nil {
		f.err = ErrReplaced
	}
	f.mu.Unlock()
	if first {
		close(f.jobs)
		<-f.over
		f.up.Abort()
	}
}

// find is the segment that holds an offset, nil if there is none.
func (f *PendingFile) find(off int64) *segment {
	i, ok := slices.BinarySearchFunc(f.segs, off, func(s segment, at int64) int {
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
	return &f.segs[i]
}

// literal are bytes of a closed file that are in memory; nil if not all are.
func (f *PendingFile) literal(off, n int64) []byte {
	s := f.find(off)
	if s == nil || s.payload || int64(len(s.data)) != s.size || off+n > s.offset+s.size {
		return nil
	}
	return s.data[off-s.offset:][:n]
}

// payload is what is known of a run of bytes that was written as one.
func (f *PendingFile) payload(off, n int64) *segment {
	s := f.find(off)
	if s == nil || !s.payload || s.offset != off || s.size != n {
		return nil
	}
	return s
}
