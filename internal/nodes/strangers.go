package nodes

import (
	"net"
	"sync"
	"sync/atomic"
)

// maxStrangers bounds the connections to a port by which no request with the job's token has come: the nodes of a
// large job may all come at the same time.
const maxStrangers = 4096

// strangers accepts connections. It closes those beyond maxStrangers that are not trusted: any process that reaches
// the port can open many, and each takes memory and a file descriptor.
//
//	accept ── stranger ──┬── a request with the token ──▶ trusted: not counted any more
//	                     └── closed ───────────────────▶ not counted any more
//
// So an attack can keep new connections of other nodes out for a while. It can end none that they have, and what
// they would have sent is best effort, or is sent again.
type strangers struct {
	net.Listener
	count atomic.Int64
}

// Accept implements [net.Listener].
func (s *strangers) Accept() (net.Conn, error) {
	for {
		c, err := s.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if s.count.Add(1) > maxStrangers {
			s.count.Add(-1)
			_ = c.Close() // nothing was sent
			continue
		}
		return &stranger{c, sync.OnceFunc(func() { s.count.Add(-1) })}, nil
	}
}

// stranger is a connection that counts until it is trusted or closed. All of its methods but Close are those of the
// connection.
type stranger struct {
	net.Conn
	known func()
}

var _ net.Conn = (*stranger)(nil)

// Close implements [net.Conn].
func (s *stranger) Close() error {
	s.known()
	return s.Conn.Close()
}

// trust notes that a request with the job's token has come by a connection.
func trust(c net.Conn) {
	if s, ok := c.(*stranger); ok {
		s.known()
	}
}
