package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/storage/backend"
	"github.com/zeebo/blake3"
)

// ErrReplaced says that a file which is written was begun anew, or removed.
var ErrReplaced = errors.New("the file was begun anew or removed meanwhile")

// maxLiteral bounds what of a file is kept in memory, in bytes.
const maxLiteral = 64 << 20

// PendingFile is one file of a [Pending]. Blocks are posted in their order by
// one goroutine; they are written and digested beside each other.
type PendingFile struct {
	p    *Pending
	name string // in the directory

	up    backend.Upload
	jobs  chan job
	over  chan struct{} // closed when the digester has ended
	slots chan struct{} // one for each write that may be on its way
	busy  sync.WaitGroup

	mu     sync.Mutex
	err    error
	closed bool
	whole  bool

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

// job is a block to be digested.
type job struct {
	data []byte
	cuts []Cut
	done *sync.WaitGroup
}

func newPendingFile(p *Pending, name string, up backend.Upload) *PendingFile {
	f := &PendingFile{
		p: p, name: name, up: up,
		jobs: make(chan job, 4), over: make(chan struct{}), slots: make(chan struct{}, max(up.Depth(), 1)),
	}
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

// Post takes the next block: it begins where the one before ended, and all but
// the last have a multiple of [backend.Align] bytes. Cuts are those that lie in
// it. done is called when data is needed no more. Post returns at once, unless
// many blocks are on their way. After an error of the disk, or when the file was
// given up, it and Close return that.
func (f *PendingFile) Post(data []byte, offset int64, cuts []Cut, done func()) error {
	f.mu.Lock()
	err := f.err
	if err == nil && f.closed {
		err = errors.New("the file is closed")
	}
	if err == nil {
		f.busy.Add(1)
	}
	f.mu.Unlock()
	if err != nil {
		done()
		return err
	}
	var both sync.WaitGroup
	both.Add(2)
	f.jobs <- job{data, cuts, &both}
	f.slots <- struct{}{}
	go func() {
		f.fail(f.write(data, offset))
		<-f.slots
		both.Done()
		both.Wait()
		done()
		f.busy.Done()
	}()
	return nil
}

func (f *PendingFile) write(data []byte, offset int64) error {
	c := &claim{root: f.p.root, left: int64(len(data))}
	if err := f.p.root.reserve(context.Background(), c.left); err != nil {
		return err
	}
	defer c.give()
	n, err := f.up.WriteAt(data, offset)
	if err == nil && n < len(data) {
		err = fmt.Errorf("%d of %d bytes were written", n, len(data))
	}
	return err
}

// digest digests one block after the other.
func (f *PendingFile) digest() {
	defer close(f.over)
	for j := range f.jobs {
		at := 0
		for _, c := range j.cuts {
			k := int(c.Offset - f.size)
			if k < 0 || k > len(j.data)-at {
				f.fail(fmt.Errorf("a cut at %d does not lie in the block", c.Offset))
				break
			}
			f.add(j.data[at : at+k])
			at += k
			f.cut(c.Payload)
		}
		f.add(j.data[at:])
		j.done.Done()
	}
	f.endSegment()
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

// Close waits for all blocks, and makes the bytes durable. It may be repeated.
func (f *PendingFile) Close(ctx context.Context) error {
	f.mu.Lock()
	first := !f.closed
	f.closed = true
	f.mu.Unlock()
	if first {
		f.busy.Wait()
		close(f.jobs)
		<-f.over
		err := f.Err()
		if err == nil {
			err = f.up.Commit(ctx)
		} else {
			f.up.Abort()
		}
		f.mu.Lock()
		f.whole = err == nil
		f.mu.Unlock()
		f.fail(err)
	}
	return f.Err()
}

// Whole reports whether the file was closed without an error.
func (f *PendingFile) Whole() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.whole && f.err == nil
}

// Size is the file's, once it is closed.
func (f *PendingFile) Size() int64 { return f.size }

// Abort gives the file up, unless it is closed. Blocks that are on their way are
// still read.
func (f *PendingFile) Abort() {
	f.mu.Lock()
	first := !f.closed
	f.closed = true
	if first && f.err == nil {
		f.err = ErrReplaced
	}
	f.mu.Unlock()
	if first {
		go func() {
			f.busy.Wait()
			close(f.jobs)
			<-f.over
			f.up.Abort()
		}()
	}
}

// Wait blocks until no block of a file that was closed or given up is read any
// more.
func (f *PendingFile) Wait() {
	f.busy.Wait()
	<-f.over
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
