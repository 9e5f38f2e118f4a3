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

// number returns the next number of a stream or reading. The caller holds h.mu.
func (h *Handler) number() (uint64, error) {
	if h.closed {
		return 0, problem.Errorf(problem.Unavailable, "the trainer or agent is ending")
	}
	h.next++
	return h.next, nil
}

// clientOf registers the requesting process, so that its open files are closed
// when it dies. The caller holds h.mu. It returns nil for a process that cannot
// be watched, whose files stay open until the end, and an error for a process
// that has died meanwhile.
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

// gone abandons the open files of a process. Files that it had closed stay
// pending, as long as other processes may continue with them.
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
		for _, f := range h.placed { // another machine writes there
			delete(left, f.to)
		}
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
			h.log.Warn("files of an uncommitted save not removed", "error", err)
		}
	}
}

// Busy describes the files that clients read or write; "" if there are none.
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

// release drops the stream or reading with a number.
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
