package broadcast

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Share is what this node passes on in one load. A packet is kept until each of its receivers has
// taken it, or is dropped. All methods may be called concurrently; those of a nil Share do
// nothing.
type Share struct {
	limits Limits

	mu      sync.Mutex
	to      map[int]*receiver  // by node
	filling map[string]*packet // by their receivers
	packets int                // that are kept
	room    chan struct{}      // closed when a packet is freed, or a receiver dropped
	ended   bool
	whole   bool          // all blocks were passed on
	full    time.Duration // for which nothing could be passed on, since a receiver was dropped for it
}

// packet is some frames for the same nodes.
type packet struct {
	data []byte
	to   []int
	left int // receivers that have not taken it
}

// receiver is a node that takes blocks of a share. The goroutine that serves it has one more
// packet.
type receiver struct {
	queue []*packet
	came  chan struct{} // has an element when there is something new
	here  bool          // it has sent its request
	gone  bool          // it has got everything, or is dropped
	since time.Time     // of its last packet, or of the first packet in the queue
}

// packets that were used, for the next load.
var packets = sync.Pool{New: func() any { return &packet{data: make([]byte, 0, packetSize)} }}

func newShare(to []int, limits Limits) *Share {
	s := &Share{limits: limits, to: map[int]*receiver{}, filling: map[string]*packet{}, room: make(chan struct{})}
	for _, node := range to {
		s.to[node] = &receiver{came: make(chan struct{}, 1)}
	}
	return s
}

// Pass passes a frame on to nodes. It copies the data. It waits while too many packets are kept:
// until ctx ends, or a receiver that takes nothing is dropped.
func (s *Share) Pass(ctx context.Context, to []int, f Frame) error {
	if s == nil {
		return nil
	}
	if len(f.Data) > MaxFrame {
		return fmt.Errorf("a frame of %d bytes", len(f.Data))
	}
	key := fmt.Sprint(to)
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		if s.ended {
			return nil
		}
		p := s.filling[key]
		if p != nil && len(p.data)+headerSize+len(f.Data) <= packetSize {
			break
		}
		if p != nil {
			s.send(key, p)
		}
		if !slices.ContainsFunc(to, func(node int) bool { return !s.to[node].gone }) {
			return nil // they read the files
		}
		if s.packets < window {
			p = packets.Get().(*packet)
			p.data, p.to, p.left = p.data[:0], to, 0
			s.filling[key] = p
			s.packets++
			break
		}
		if err := s.wait(ctx); err != nil {
			return err
		}
	}
	p := s.filling[key]
	p.data = append(appendHeader(p.data, f.Rank, len(f.Data), f.Block), f.Data...)
	return nil
}

// send gives a packet to its receivers. The caller holds the lock.
func (s *Share) send(key string, p *packet) {
	delete(s.filling, key)
	for _, node := range p.to {
		r := s.to[node]
		if r.gone {
			continue
		}
		if len(r.queue) == 0 {
			r.since = time.Now()
		}
		r.queue = append(r.queue, p)
		p.left++
		r.tell()
	}
	if p.left == 0 {
		s.free(p)
	}
}

// tell wakes the goroutine that serves a receiver.
func (r *receiver) tell() {
	select {
	case r.came <- struct{}{}:
	default:
	}
}

// free takes a packet back. The caller holds the lock.
func (s *Share) free(p *packet) {
	packets.Put(p)
	s.packets--
	close(s.room)
	s.room = make(chan struct{})
}

// wait waits until a packet is freed. It drops receivers that take nothing, and a receiver
// for which alone the others wait. The caller holds the lock.
func (s *Share) wait(ctx context.Context) error {
	for key, p := range s.filling {
		s.send(key, p) // they may be all that is kept
	}
	if s.packets < window {
		return nil
	}
	room, began := s.room, time.Now()
	s.mu.Unlock()
	timer := time.NewTimer(s.limits.Beat / 4)
	var err error
	select {
	case <-room:
	case <-timer.C:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	timer.Stop()
	s.mu.Lock()
	s.full += time.Since(began)
	s.dropLate()
	return err
}

// dropLate drops receivers that take nothing, or too little. The caller holds the lock.
func (s *Share) dropLate() {
	most, least := (*receiver)(nil), window
	for _, r := range s.to {
		if r.gone {
			continue
		}
		limit := s.limits.Silent
		if !r.here {
			limit = s.limits.Absent
		}
		if len(r.queue) > 0 && time.Since(r.since) > limit {
			s.drop(r)
			continue
		}
		if r.here && (most == nil || len(r.queue) > len(most.queue)) {
			most = r
		}
		least = min(least, len(r.queue))
	}
	if s.full > s.limits.Silent {
		if s.full = 0; most != nil && least < len(most.queue)/2 {
			s.drop(most) // the others wait for it alone
		}
	}
}

// drop ends what is passed on to a receiver, which reads files instead. The caller holds the
// lock.
func (s *Share) drop(r *receiver) {
	if r.gone {
		return
	}
	r.gone = true
	for _, p := range r.queue {
		s.taken(p)
	}
	r.queue = nil
	r.tell()
}

// taken counts a receiver of a packet. The caller holds the lock.
func (s *Share) taken(p *packet) {
	if p.left--; p.left == 0 {
		s.free(p)
	}
}

// End ends the share: nothing is passed on any more. If all blocks were, receivers that are here
// get those that are kept, and others have a while to come.
func (s *Share) End(whole bool) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return
	}
	for key, p := range s.filling {
		s.send(key, p)
	}
	s.ended, s.whole = true, whole
	for _, r := range s.to {
		if !whole {
			s.drop(r)
			continue
		}
		r.tell()
	}
	if whole {
		time.AfterFunc(s.limits.Absent, s.dropAbsent)
	}
}

// dropAbsent drops the receivers that have not come.
func (s *Share) dropAbsent() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.to {
		if !r.here {
			s.drop(r)
		}
	}
}

// close drops all receivers.
func (s *Share) close() {
	s.End(false)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.to {
		s.drop(r)
	}
}

// done reports whether nothing is left to do.
func (s *Share) done() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.to {
		if !r.gone {
			return false
		}
	}
	return s.ended
}

// attach is called with the request of a receiver. It returns nil for a node that gets nothing,
// or has sent a request before.
func (s *Share) attach(node int) *receiver {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.to[node]
	if r == nil || r.here || r.gone {
		return nil
	}
	r.here, r.since = true, time.Now()
	return r
}

// next takes the next packet of a receiver out of its queue. Without one, over reports that none
// will come, and whole that all blocks were passed on.
func (s *Share) next(r *receiver) (p *packet, over, whole bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(r.queue) > 0 {
		p, r.queue = r.queue[0], r.queue[1:]
		r.since = time.Now()
		return p, false, false
	}
	if over = r.gone || s.ended; over {
		whole = s.whole && !r.gone
		r.gone = true
	}
	return nil, over, whole
}

// sent counts a packet that a receiver has taken.
func (s *Share) sent(r *receiver, p *packet) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.since = time.Now()
	s.taken(p)
}

// fail drops a receiver whose connection has failed.
func (s *Share) fail(r *receiver) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(r)
}
