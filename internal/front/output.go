package front

import (
	"bufio"
	"net"
	"sync"
	"time"
)

// output is one direction of a session. What is sent is never torn: the lock is
// held from the beginning of a frame to its end.
type output struct {
	mu sync.Mutex
	w  *bufio.Writer
}

func newOutput(conn net.Conn, limit time.Duration) *output {
	return &output{w: bufio.NewWriterSize(&patient{conn, limit}, 32<<10)}
}

// patient is a connection each of whose writes has a deadline.
type patient struct {
	conn  net.Conn
	limit time.Duration
}

// Write implements [io.Writer].
func (p *patient) Write(b []byte) (int, error) {
	if err := p.conn.SetWriteDeadline(time.Now().Add(p.limit)); err != nil {
		return 0, err
	}
	return p.conn.Write(b)
}

// add writes whole frames, which are sent with the next flush.
func (o *output) add(frames []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, err := o.w.Write(frames)
	return err
}

func (o *output) flush() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.w.Flush()
}

// send writes whole frames at once.
func (o *output) send(frames []byte) error {
	if err := o.add(frames); err != nil {
		return err
	}
	return o.flush()
}
