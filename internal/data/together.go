package data

import (
	"context"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
	"golang.org/x/sync/errgroup"
)

// Together is what verifications that run beside each other have in common: how
// much is read at a time, and what was read already. A file that several
// checkpoints have a link to is so read once, and what is wrong with it is a
// finding of each. It is for one round: what was read is not looked at again.
type Together struct {
	reading chan struct{} // as many as chunks that are read at a time

	mu   sync.Mutex
	seen map[chunkPlace]*seenChunk
}

// NewTogether begins a round.
func NewTogether() *Together {
	return &Together{reading: make(chan struct{}, readers()), seen: map[chunkPlace]*seenChunk{}}
}

// Each calls do for 0 to n-1, a few at a time, until one of them fails.
func (t *Together) Each(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(readers())
	for i := range n {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error { return do(ctx, i) })
	}
	return g.Wait()
}

// acquire waits until one more chunk may be read.
func (t *Together) acquire(ctx context.Context) error {
	select {
	case t.reading <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t *Together) release() { <-t.reading }

// chunkPlace is bytes in a file and what they must be.
type chunkPlace struct {
	file         object.FileID
	offset, size int64
	digest       checkpoint.Digest
}

// seenChunk is what the first verification that came to a place has found.
type seenChunk struct {
	done     chan struct{} // closed when the rest is set
	read     bool          // to the end: otherwise nothing is known
	findings []Finding
}

// claim is a place that somebody may have seen. mine says that nobody has: then
// the caller reads it, and closes done.
func (t *Together) claim(at chunkPlace) (c *seenChunk, mine bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c = t.seen[at]; c != nil {
		return c, false
	}
	c = &seenChunk{done: make(chan struct{})}
	t.seen[at] = c
	return c, true
}
