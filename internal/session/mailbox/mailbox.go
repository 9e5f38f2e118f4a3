// Package mailbox holds what the ranks of an attempt send each other, in memory.
//
//	Boxes  the messages of all ranks, Box those of one
//	Store  the ranks' key-value store
package mailbox

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/rpc"
)

// Boxes holds the messages among the ranks of an attempt. Nothing is allocated until a rank
// sends or receives one. The zero value is ready. The methods may be called concurrently.
type Boxes struct {
	mu    sync.Mutex
	ended []int  // ranks that were gone before there were boxes
	boxes []*Box // by rank
}

// Box is one rank's part of the messages.
type Box struct {
	by   rpc.Messenger
	room *semaphore.Weighted // for the bytes of messages not yet received
	life context.Context     // ends when it is gone
	end  context.CancelCauseFunc
	turn chan struct{} // full while a request receives
	seq  uint64        // of the last message that was received
	last rpc.Message   // resent to a receiver that has not got it
}

// Open returns the mailbox of each rank.
func (m *Boxes) Open(world int) []*Box {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.boxes != nil {
		return m.boxes
	}
	meet := rpc.NewSwitch(world)
	for rank := range world {
		b := &Box{by: meet.Messenger(rank), room: semaphore.NewWeighted(client.MaxMessage), turn: make(chan struct{}, 1)}
		b.life, b.end = context.WithCancelCause(context.Background())
		m.boxes = append(m.boxes, b)
	}
	for _, rank := range m.ended {
		m.boxes[rank].Close()
	}
	return m.boxes
}

// Gone records that a rank's process has ended and sends nothing more.
func (m *Boxes) Gone(rank int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.boxes == nil {
		m.ended = append(m.ended, rank)
		return
	}
	m.boxes[rank].Close()
}

// Close ends the messages of the rank: it sends none any more, and gets none.
func (b *Box) Close() {
	b.end(rpc.ErrGone)
	_ = b.by.Close() // closing a switch's messenger never fails
}

// Closed reports whether the messages of the rank have ended.
func (b *Box) Closed() bool { return b.life.Err() != nil }

// Put sends a message of another rank to this one. It waits for room.
func (b *Box) Put(ctx context.Context, from *Box, body []byte) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(b.life, func() { cancel(rpc.ErrGone) })()
	if err := b.room.Acquire(ctx, int64(len(body))); err != nil {
		return context.Cause(ctx)
	}
	err := from.by.Send(ctx, b.by.Rank(), body)
	if err != nil {
		b.room.Release(int64(len(body)))
	}
	return err
}

// ErrOutOfTurn reports a request for a message that is neither the next nor the
// last one.
var ErrOutOfTurn = errors.New("is not the next one")

// Get returns message seq of a rank, counted from 1: the next one, or the last
// one again.
func (b *Box) Get(ctx context.Context, seq uint64) (rpc.Message, error) {
	select {
	case b.turn <- struct{}{}:
		defer func() { <-b.turn }()
	case <-ctx.Done():
		return rpc.Message{}, context.Cause(ctx)
	}
	if seq == b.seq && seq > 0 {
		return b.last, nil
	}
	if seq != b.seq+1 {
		return rpc.Message{}, fmt.Errorf("message %d %w: %d were received; one client of a rank receives", seq, ErrOutOfTurn, b.seq)
	}
	got, err := b.by.Recv(ctx)
	if err != nil {
		return rpc.Message{}, err
	}
	b.seq, b.last = seq, got
	b.room.Release(int64(len(got.Data)))
	return got, nil
}
