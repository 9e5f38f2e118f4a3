package rpc

import (
	"net"
	"time"
)

// partial is a session of a caller whose connections are not all here.
type partial struct {
	conns []net.Conn // by channel
	here  int
	limit *time.Timer
}

// gather puts a connection with the others of its session, and gives all when
// it was the last. A session that is not complete in time is dropped.
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

// drop gives up a session. The caller holds the lock.
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
