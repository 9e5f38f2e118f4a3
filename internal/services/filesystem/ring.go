package filesystem

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"
)

// ring is the memory of one stream: a file in shared memory of some blocks, which
// the client fills in turn, starting over after the last. Byte k of the stream is
// in block k / blockSize modulo their number. The client may fill a block once
// its previous content is digested and written.
type ring struct {
	file *os.File
	data []byte

	mu      sync.Mutex
	blocks  int // that this stream may use
	most    int // maximum that any stream has used
	under   [ringBlocks]int
	changed chan struct{} // closed when a run is done
}

// writeTimeout is how long a client waits for the disk to take one block.
const writeTimeout = 10 * time.Minute

// begin prepares the ring for a new stream.
func (r *ring) begin(blocks int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.blocks, r.under, r.changed = blocks, [ringBlocks]int{}, make(chan struct{})
}

// touched returns how many blocks have memory.
func (r *ring) touched() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.most
}

// at returns the block of a byte of the stream, and the offset in it.
func (r *ring) at(offset int64) (block, within int) {
	return int(offset / blockSize % int64(r.blocks)), int(offset % blockSize)
}

// run returns the memory of a range in one block, which stays in use until done
// is called.
func (r *ring) run(offset int64, size int) (data []byte, done func()) {
	block, within := r.at(offset)
	start := block*blockSize + within
	r.mu.Lock()
	defer r.mu.Unlock()
	r.under[block]++
	r.most = max(r.most, block+1)
	return r.data[start : start+size : start+size], func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.under[block]--
		close(r.changed)
		r.changed = make(chan struct{})
	}
}

// wait waits until the block of a byte is unused, so that the client may fill it.
func (r *ring) wait(ctx context.Context, offset int64) error {
	block, _ := r.at(offset)
	ctx, cancel := context.WithTimeoutCause(ctx, writeTimeout, errSlow)
	defer cancel()
	for {
		r.mu.Lock()
		under, changed := r.under[block], r.changed
		r.mu.Unlock()
		if under == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errors.Join(ctx.Err(), context.Cause(ctx))
		}
	}
}

var errSlow = errors.New("the disk has not taken a block of 8 MiB in ten minutes: look at the disk, then save again")
