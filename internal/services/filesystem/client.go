package filesystem

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/peer"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// client is a process that has files open.
type client struct {
	stop    func()
	streams map[uint64]*stream
	reads   map[uint64]*reading
}

// number is the next of streams and readings, under h.mu.
func (h *Handler) number() (uint64, error) {
	if h.closed {
		return 0, problem.Errorf(problem.Unavailable, "the trainer or agent is ending")
	}
	h.next++
	return h.next, nil
}

// clientOf notes who asks, so that what it has open is given up when it dies;
// under h.mu. Of a process that nobody can watch, it stays open until the end: nil.
// One that has died meanwhile is an error.
func (h *Handler) clientOf(ctx context.Context) (*client, error) {
	pid, err := peer.Of(ctx)
	if err != nil {
		return nil, nil
	}
	if c := h.clients[pid]; c != nil {
		return c, nil
	}
	c := &client{streams: map[uint64]*stream{}, reads: map[uint64]*reading{}}
	switch c.stop, err = peer.Watch(pid, func() { h.gone(pid, c) }); {
	case errors.Is(err, unix.ESRCH):
		return nil, conflict("process %d, which has connected to open a file, has ended", pid)
	case err != nil:
		return nil, nil
	}
	h.clients[pid] = c
	return c, nil
}

// gone gives up what a process had open. Files that it had closed stay pending,
// as long as there are other processes that may go on with them.
func (h *Handler) gone(pid int, c *client) {
	h.mu.Lock()
	if h.clients[pid] == c {
		delete(h.clients, pid)
	}
	streams, reads := c.streams, c.reads
	c.streams, c.reads = nil, nil
	for id := range streams {
		delete(h.streams, id)
	}
	for id := range reads {
		delete(h.reads, id)
	}
	left := map[target]*pending{}
	if len(h.clients) == 0 {
		left = maps.Clone(h.pending)
	}
	h.mu.Unlock()
	go c.stop() // it waits for this function
	for _, s := range streams {
		s.end(h)
	}
	for _, r := range reads {
		r.close()
	}
	for at, p := range left {
		if err := h.giveUp(context.Background(), at, p); err != nil {
			h.log.Warn("files of a save that was never committed stay on disk", "error", err)
		}
	}
}

// Busy is what clients are about to read or write; empty for nothing.
func (h *Handler) Busy() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.streams)+len(h.reads) > 0 {
		return fmt.Sprintf("%d files are written and %d read", len(h.streams), len(h.reads))
	}
	for at, p := range h.pending {
		if time.Since(p.used) < patience && len(h.clients) > 0 {
			return fmt.Sprintf("%s%s/%s is pending", scheme, at.run, dirOf(at.name))
		}
	}
	return ""
}

// release forgets the stream or reading of a number.
func (h *Handler) release(id uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.streams, id)
	delete(h.reads, id)
	for _, c := range h.clients {
		delete(c.streams, id)
		delete(c.reads, id)
	}
}
