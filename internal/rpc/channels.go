package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
)

// channels are the connections between a caller and a listener. The first carries
// small bodies, the others large ones. They end together.
type channels struct {
	link  *link
	conns []net.Conn
	out   []chan []byte // of each connection, to its writer
	once  sync.Once
	done  chan struct{} // closed when they have ended
}

// connect creates the link of conns and moves frames over them until one fails or
// the agent closes.
func (e *engine) connect(peer Peer, conns []net.Conn) *channels {
	c := &channels{conns: conns, done: make(chan struct{})}
	c.link = e.newLink(peer, c.send)
	for range conns {
		c.out = append(c.out, make(chan []byte))
	}
	stop := context.AfterFunc(e.life, func() { c.end(context.Cause(e.life)) })
	started := e.spawn(func() {
		defer stop()
		var all sync.WaitGroup
		for i, conn := range conns {
			all.Go(func() { c.end(c.read(conn)) })
			all.Go(func() {
				if err := c.write(conn, c.out[i]); err != nil {
					c.end(err)
				}
			})
		}
		all.Wait()
	})
	if !started {
		stop()
		c.end(ErrClosed)
	}
	return c
}

// end closes the connections and fails the calls that wait for them.
func (c *channels) end(err error) {
	c.once.Do(func() {
		if !errors.Is(err, ErrClosed) {
			err = gone(err)
		}
		c.link.end(err)
		close(c.done)
		for _, conn := range c.conns {
			_ = conn.Close()
		}
	})
}

// gone marks the end of the other process among the errors of a connection.
func gone(err error) error {
	if closed(err) {
		return fmt.Errorf("%w: it closed the connection (%w)", ErrGone, err)
	}
	return fmt.Errorf("%w: %w", ErrGone, err)
}

func closed(err error) bool {
	for _, end := range []error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, end) {
			return true
		}
	}
	return false
}

func (c *channels) read(conn net.Conn) error {
	for {
		f, err := readFrame(conn, c.link.limit)
		if err != nil {
			return err
		}
		c.link.take(f)
	}
}

// write sends frames until the channels end.
func (c *channels) write(conn net.Conn, out <-chan []byte) error {
	for {
		select {
		case data := <-out:
			if _, err := conn.Write(data); err != nil {
				return err
			}
		case <-c.done:
			return nil
		}
	}
}

// send passes a frame to the writer of its channel.
func (c *channels) send(ctx context.Context, f frame) error {
	at := 0
	if f.bulk && len(c.out) > 1 {
		at = 1 + int(f.id%uint64(len(c.out)-1))
	}
	select {
	case c.out[at] <- f.encode():
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.done:
		return ErrGone
	}
}
