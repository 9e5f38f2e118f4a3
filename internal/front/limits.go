package front

import (
	"context"
	"errors"
	"net"
	"time"

	"golang.org/x/sync/semaphore"
)

// Limits bound what clients cost the owner of a log. Limits that a client can
// reach without ill will are far above the needs of a client of this module.
type Limits struct {
	Connections   int // of all clients
	PerAddress    int // of one address
	Waiting       int // unauthenticated clients: the oldest makes room
	Subscriptions int // of one connection
	Consumers     int // of one connection

	Line    int   // bytes of one line of the protocol
	Subject int   // bytes of a subject
	Header  int   // bytes of all headers of a message
	Payload int   // bytes of a message with its headers
	Batch   int   // bytes of all messages of a batch
	Bytes   int64 // of all clients, waiting for their batch or frame

	Greeting time.Duration // until a client is authenticated
	Frame    time.Duration // for the rest of a frame that has begun
	Write    time.Duration // for a client or the server to take what is sent
	Idle     time.Duration // of silence until a client is pinged, and again until it is closed
	Check    time.Duration // for one query to the log
	// Comeback is how long after its start a front assumes that every session
	// lives: the clients of the previous owner are reconnecting.
	Comeback time.Duration
}

// batchMessages is the server's maximum number of messages in a batch.
const batchMessages = 1000

// largeFrame is the size from which a frame counts against [Limits].Bytes.
const largeFrame = 64 << 10

func (l Limits) withDefaults() (Limits, error) {
	number := func(n *int, of int) {
		if *n == 0 {
			*n = of
		}
	}
	number(&l.Connections, 4096) // a job may have thousands of nodes, each with one
	number(&l.PerAddress, 512)
	number(&l.Waiting, 64)
	number(&l.Subscriptions, 1024)
	number(&l.Consumers, 256)
	number(&l.Line, 4<<10)
	number(&l.Subject, 2<<10)
	number(&l.Header, 16<<10)
	number(&l.Payload, 1<<20)
	number(&l.Batch, 12<<20)
	if l.Bytes == 0 {
		l.Bytes = 256 << 20
	}
	span := func(d *time.Duration, of time.Duration) {
		if *d == 0 {
			*d = of
		}
	}
	span(&l.Greeting, 30*time.Second) // a busy machine takes seconds
	span(&l.Frame, 30*time.Second)
	span(&l.Write, 30*time.Second)
	span(&l.Idle, time.Minute)
	span(&l.Check, 5*time.Second)
	span(&l.Comeback, 5*time.Second)
	if l.Bytes < 4*int64(l.Batch) || l.Batch < l.Payload || l.Payload < l.Header {
		return l, errors.New("limits: all bytes must have room for a large batch and its copies, a batch for a message, a message for its headers")
	}
	return l, nil
}

// receive begins a session, or rejects the client.
func (f *Front) receive(conn net.Conn, door Door) {
	s := &session{f: f, door: door, client: conn, host: host(conn), budget: f.local, asks: semaphore.NewWeighted(asksOfOne), done: make(chan struct{})}
	s.life, s.cancel = context.WithCancel(f.life)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.life.Err() != nil {
		s.cancel()
		_ = conn.Close()
		return
	}
	if f.full(s.host) {
		s.cancel()
		const why = "maximum connections exceeded"
		f.o.Logger.Warn("client turned away", "address", conn.RemoteAddr().String(), "why", why)
		f.all.Go(func() {
			_ = conn.SetDeadline(time.Now().Add(time.Second))
			_, _ = conn.Write([]byte("-ERR '" + why + "'\r\n"))
			_ = conn.Close()
		})
		return
	}
	if s.host != "" {
		s.budget = f.budget
		if len(f.waiting) >= f.limits.Waiting {
			oldest := f.waiting[0]
			f.waiting = f.waiting[1:]
			f.o.Logger.Warn("unauthenticated client closed to make room", "address", oldest.host)
			oldest.close()
		}
		f.waiting = append(f.waiting, s)
	}
	f.sessions[s] = true
	f.hosts[s.host]++
	f.all.Go(s.run)
}

// full reports whether there is no room for another client of an address. Clients
// over TCP do not take the room of clients on this machine's unix sockets, which
// have the address "".
func (f *Front) full(host string) bool {
	local := f.hosts[""]
	if host == "" {
		return local >= f.limits.Connections
	}
	return len(f.sessions)-local >= f.limits.Connections || f.hosts[host] >= f.limits.PerAddress
}

// host returns the address of a client without its port; "" on a unix socket.
func host(conn net.Conn) string {
	tcp, ok := conn.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return ""
	}
	return tcp.IP.String()
}

// known removes a session from the list of unauthenticated ones.
func (f *Front) known(s *session) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, w := range f.waiting {
		if w == s {
			f.waiting = append(f.waiting[:i:i], f.waiting[i+1:]...)
			return
		}
	}
}

// leave releases everything that a session has.
func (f *Front) leave(s *session) {
	f.known(s)
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.sessions, s)
	delete(f.users, s)
	if f.hosts[s.host]--; f.hosts[s.host] == 0 {
		delete(f.hosts, s.host)
	}
	for id, of := range f.claims {
		if of == s {
			delete(f.claims, id)
		}
	}
	for name, of := range f.consumers {
		if of == s {
			delete(f.consumers, name)
		}
	}
}
