package data

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/data/segments"
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

	contents segments.Contents // owned by the digester until ended is closed
}

// job is a run of bytes to be digested and written.
type job struct {
	offset int64
	data   []byte
	cuts   []segments.Cut
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
func (f *PendingFile) Write(ctx context.Context, data []byte, cuts []segments.Cut, done func()) error {
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
			if !object.Readable(func() { err = f.contents.See(j.data, j.cuts) }) {
				err = fmt.Errorf("read %d bytes in memory, which are at %d of the file: the memory was unmapped or truncated", len(j.data), j.offset)
			}
			f.fail(err)
		}
		f.end(j)
	}
	f.contents.End()
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
		err = f.up.Finish(f.contents.Size())
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
	return &PendingFile{p: p, name: lies, up: f.up, ended: f.ended, closed: true, whole: true, said: f.said, contents: f.contents}
}

// Size returns the file's size, once it is closed.
func (f *PendingFile) Size() int64 { return f.contents.Size() }

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

// Describe describes a whole file for [Pending.Give] on another machine.
func (f *PendingFile) Describe() segments.Description { return f.contents.Describe() }
