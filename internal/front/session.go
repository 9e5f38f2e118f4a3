package front

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
)

// session is one client. Its inbound half runs in one goroutine, which is the
// only one to use the fields without a lock; the outbound half runs in another.
type session struct {
	f         *Front
	door      Door
	host      string // "" on a unix socket
	budget    *semaphore.Weighted
	principal Principal

	in   *reader // of the client's frames
	out  *output // to the client
	from *reader // of the server's
	to   *output // to the server

	judge     judge
	batch     *batch
	lapsed    string               // ID of the last batch that was dropped because it took too long
	consumers map[string]*consumer // made by this session, by name
	charged   int64                // bytes of the current frame, of the budget of all
	scratch   []byte
	header    header // of the current frame

	pinged atomic.Uint64 // PINGs sent to the client
	ponged atomic.Uint64 // PONGs received
	life   context.Context
	cancel context.CancelFunc
	done   chan struct{} // closed when the session has ended

	mu     sync.Mutex
	client net.Conn
	server net.Conn
	ended  bool

	asks *semaphore.Weighted // of this session

	subsMu sync.Mutex
	subs   map[string]*subscription // by the client's identifier
	asked  []waiting                // the oldest first
}

// run runs a session from its begin to its end.
func (s *session) run() {
	defer close(s.done)
	defer s.f.leave(s)
	defer s.forget()
	defer s.close()
	s.subs, s.consumers, s.judge = map[string]*subscription{}, map[string]*consumer{}, judge{s.f.limits.Payload, s.door.Grant}
	err := s.greet()
	if err == nil {
		var outbound sync.WaitGroup
		outbound.Go(func() {
			defer s.close()
			_ = s.deliver() // in any case, the client sees the end of its connection
		})
		err = s.receive()
		s.sayWhy(err)
		s.close()
		outbound.Wait()
	} else {
		s.sayWhy(err)
	}
	s.dropBatch()
	s.release()
	s.lapse(time.Now().Add(time.Hour))
	if unexpected(err) {
		s.f.o.Logger.Info("client ended", "address", s.host, "principal", s.principal.Name, "why", err)
	}
}

// unexpected reports whether the end of a session should be logged.
func unexpected(err error) bool {
	return err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.ErrClosedPipe)
}

// linger is how long a client has to read the reason of its end: unread data from
// the client would otherwise discard the reason.
const linger = time.Second

// sayWhy tells the client the reason of its end, if it is one of the protocol.
func (s *session) sayWhy(err error) {
	var why protocolError
	switch {
	case errors.As(err, &why):
	case errors.Is(err, os.ErrDeadlineExceeded) && s.to == nil:
		why = "Authentication Timeout"
	case errors.Is(err, os.ErrDeadlineExceeded):
		why = "Stale Connection"
	default:
		s.drain(err)
		return
	}
	defer s.drain(err)
	text := fmt.Sprintf("-ERR '%s'\r\n", string(why))
	if s.out != nil {
		_ = s.out.send([]byte(text)) // the connection ends in any case
		return
	}
	s.mu.Lock()
	client := s.client
	s.mu.Unlock()
	if s.door.TLS == nil {
		_ = client.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = io.WriteString(client, text)
	}
}

// drain reads the client's data until the client has seen the end.
func (s *session) drain(err error) {
	if !unexpected(err) {
		return
	}
	s.mu.Lock()
	client := s.client
	s.mu.Unlock()
	if secure, ok := client.(*tls.Conn); ok {
		client = secure.NetConn()
	}
	half, ok := client.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil || client.SetReadDeadline(time.Now().Add(linger)) != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, client, int64(s.f.limits.Payload))
}

// close ends both connections. It may be called more than once.
func (s *session) close() {
	s.cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	_ = s.client.Close()
	if s.server != nil {
		_ = s.server.Close()
	}
}

// receive passes the client's frames on, until the client ends or breaks a rule
// of the protocol.
func (s *session) receive() error {
	for {
		if s.in.in.Buffered() == 0 {
			if err := s.to.flush(); err != nil {
				return err
			}
		}
		if err := s.await(); err != nil {
			return err
		}
		f, err := s.in.next()
		if err != nil {
			return err
		}
		err = s.act(f)
		s.release()
		if err != nil {
			return err
		}
	}
}

// await returns when the client has begun a frame. It pings a silent client. A
// client that stays silent is an error. It drops a batch whose time has passed.
func (s *session) await() error {
	asked := false
	for s.in.in.Buffered() == 0 {
		limit := s.f.limits.Idle
		if s.batch != nil {
			limit = min(limit, time.Until(s.batch.until))
		}
		if err := s.client.SetReadDeadline(time.Now().Add(limit)); err != nil {
			return err
		}
		_, err := s.in.in.Peek(1)
		switch {
		case err == nil:
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return err
		case s.batch != nil && time.Until(s.batch.until) <= 0:
			s.lapsed = s.batch.id
			s.dropBatch()
		case asked:
			return err
		default:
			asked = true
			s.pinged.Add(1)
			if err := s.out.send([]byte("PING\r\n")); err != nil {
				return err
			}
		}
	}
	return s.client.SetReadDeadline(time.Now().Add(s.f.limits.Frame))
}

// act executes one frame. An error ends the session.
func (s *session) act(f frame) error {
	switch f.op {
	case opPub:
		return s.publish(f)
	case opSub:
		return s.subscribe(f)
	case opUnsub:
		return s.unsubscribe(f)
	case opPing:
		return s.to.add([]byte("PING\r\n"))
	case opPong:
		s.ponged.Add(1)
		return s.to.add([]byte("PONG\r\n"))
	}
	return errParse // a second CONNECT
}

// charge takes the bytes of a large frame from the budget of all clients.
func (s *session) charge(bytes int) error {
	if !s.reserve(int64(bytes)) {
		return protocolError("the owner has no room for a message of this size at the moment")
	}
	s.charged += int64(bytes)
	return nil
}

func (s *session) release() {
	if s.charged > 0 {
		s.budget.Release(s.charged)
		s.charged = 0
	}
}
