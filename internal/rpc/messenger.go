package rpc

import (
	"bytes"
	"context"
	"fmt"
	"sync"
)

// Message is a message from another rank, From, 0 to size-1. Gone reports that it
// is the rank's last.
type Message struct {
	From int
	Data []byte
	Gone bool
}

// Messenger moves messages between the ranks of a group, for one of them. Each
// message arrives once, and messages of one rank to another in order. Send may be
// called concurrently and waits while the other rank has much to read; it does
// not retain data. Recv is for one goroutine.
type Messenger interface {
	Rank() int
	Size() int
	Send(ctx context.Context, to int, data []byte) error
	// Recv returns the next message of any rank. After Close it returns an error.
	Recv(ctx context.Context) (Message, error)
	// Close reports to the other ranks that this one is gone.
	Close() error
}

// Switch connects the messengers of ranks in one process.
type Switch struct {
	boxes []*box
}

// box holds the messages to one rank.
type box struct {
	in   chan Message // with data; bounded
	gone chan Message // has room for one of each rank
	over chan struct{}
	once sync.Once
}

// inbox is how many messages a rank may have to read before senders wait.
const inbox = 64

// NewSwitch returns a switch for world ranks. It panics if world < 1.
func NewSwitch(world int) *Switch {
	if world < 1 {
		panic(fmt.Sprintf("rpc: switch for %d ranks", world))
	}
	s := &Switch{}
	for range world {
		s.boxes = append(s.boxes, &box{in: make(chan Message, inbox), gone: make(chan Message, world), over: make(chan struct{})})
	}
	return s
}

// Messenger returns the messenger of a rank, 0 to world-1.
func (s *Switch) Messenger(rank int) Messenger { return switched{s, rank} }

type switched struct {
	s    *Switch
	rank int
}

func (m switched) Rank() int { return m.rank }
func (m switched) Size() int { return len(m.s.boxes) }

func (m switched) Send(ctx context.Context, to int, data []byte) error {
	if to < 0 || to >= len(m.s.boxes) {
		return fmt.Errorf("send to rank %d of %d: %w", to, len(m.s.boxes), ErrUnknownPeer)
	}
	own, there := m.s.boxes[m.rank], m.s.boxes[to]
	for _, over := range []chan struct{}{own.over, there.over} {
		select {
		case <-over:
			return ErrGone
		default:
		}
	}
	select {
	case there.in <- Message{From: m.rank, Data: bytes.Clone(data)}:
		return nil
	case <-there.over:
		return ErrGone
	case <-own.over:
		return ErrClosed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (m switched) Recv(ctx context.Context) (Message, error) {
	b := m.s.boxes[m.rank]
	select { // messages come before the end of their sender
	case got := <-b.in:
		return got, nil
	default:
	}
	select {
	case got := <-b.in:
		return got, nil
	case got := <-b.gone:
		return got, nil
	case <-b.over:
		return Message{}, ErrClosed
	case <-ctx.Done():
		return Message{}, context.Cause(ctx)
	}
}

func (m switched) Close() error {
	m.s.boxes[m.rank].once.Do(func() {
		close(m.s.boxes[m.rank].over)
		for rank, b := range m.s.boxes {
			if rank != m.rank {
				b.gone <- Message{From: m.rank, Gone: true}
			}
		}
	})
	return nil
}
