package rpc

import (
	"context"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/collective"
)

// join waits until no call is running among the ranks of the group. In each
// round, a rank waits until its own calls have ended and then announces how many
// calls it has ever made. If the sum equals that of the previous round, no rank
// has made a call between the two, and at the end of the first none was running.
func (e *engine) join(ctx context.Context, group *collective.Group) error {
	before := uint64(0)
	for round := 0; ; round++ {
		started, err := e.idle(ctx)
		if err != nil {
			return fmt.Errorf("shut rpc agent %s down: calls are still under way: %w", e.self, err)
		}
		if group == nil || group.Size() == 1 {
			return nil
		}
		all, err := collective.AllGatherObject(ctx, group, started)
		if err != nil {
			return fmt.Errorf("shut rpc agent %s down: meet the other ranks: %w", e.self, err)
		}
		sum := uint64(0)
		for _, n := range all {
			sum += n
		}
		if round > 0 && sum == before {
			return nil
		}
		before = sum
	}
}

// acceptPause is how long an agent pauses after a failed accept.
const acceptPause = 50 * time.Millisecond

// pause waits a moment; it returns false if the agent closes.
func (p *Pipe) pause() bool {
	timer := time.NewTimer(acceptPause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.life.Done():
		return false
	}
}

func byName(a, b Peer) int { return strings.Compare(a.Name, b.Name) }

// partial is a session of a caller that lacks connections.
type partial struct {
	conns []net.Conn // by channel
	here  int
	limit *time.Timer
}

// gather adds a connection to its session, and returns all connections when it
// was the last. A session that is not complete in time is dropped.
func (p *Pipe) gather(g greeting, c net.Conn) []net.Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.open[g.Session]
	if s == nil {
		s = &partial{conns: make([]net.Conn, g.Of)}
		s.limit = time.AfterFunc(handshakeTimeout, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.open[g.Session] == s {
				p.drop(g.Session)
			}
		})
		p.open[g.Session] = s
	}
	if g.Of != len(s.conns) || s.conns[g.Channel] != nil || p.life.Err() != nil {
		_ = c.Close()
		p.drop(g.Session)
		return nil
	}
	s.conns[g.Channel] = c
	if s.here++; s.here < len(s.conns) {
		return nil
	}
	s.limit.Stop()
	delete(p.open, g.Session)
	return s.conns
}

// drop drops a session. The caller holds the lock.
func (p *Pipe) drop(session string) {
	s := p.open[session]
	s.limit.Stop()
	delete(p.open, session)
	for _, c := range s.conns {
		if c != nil {
			_ = c.Close()
		}
	}
}
