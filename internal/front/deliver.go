package front

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"strconv"
	"sync"
	"time"
)

// serverFrame is the maximum size of a server's message: an event of the log, or
// the JSON of a stream with many subjects.
const serverFrame = 64 << 20

// deliver passes the server's frames to the client, until either ends. It passes
// on whole frames, so that the front's own frames fit between them.
func (s *session) deliver() error {
	for {
		line, err := s.from.in.ReadSlice('\n')
		if err != nil {
			return err
		}
		if err := s.deliverFrame(line); err != nil {
			return err
		}
	}
}

func (s *session) deliverFrame(line []byte) error {
	o := s.out
	o.mu.Lock()
	defer o.mu.Unlock()
	if bytes.HasPrefix(line, []byte("INFO ")) {
		return nil // it lists the server's own addresses
	}
	if bytes.Equal(line, []byte("PING\r\n")) {
		s.pinged.Add(1)
	}
	rest := 0
	if bytes.HasPrefix(line, []byte("MSG ")) || bytes.HasPrefix(line, []byte("HMSG ")) {
		trimmed := bytes.TrimRight(line, "\r\n")
		n, err := strconv.Atoi(string(trimmed[bytes.LastIndexByte(trimmed, ' ')+1:]))
		if err != nil || n < 0 || n > serverFrame {
			return errParse
		}
		s.delivered(trimmed)
		rest = n + len("\r\n")
	}
	if _, err := o.w.Write(line); err != nil {
		return err
	}
	if rest > 0 {
		if _, err := io.CopyN(o.w, s.from.in, int64(rest)); err != nil {
			return err
		}
	}
	if s.from.in.Buffered() == 0 {
		return o.w.Flush()
	}
	return nil
}

// delivered counts a message of a subscription with a limit.
func (s *session) delivered(line []byte) {
	f := bytes.SplitN(line, []byte(" "), 4)
	if len(f) < 4 {
		return
	}
	s.subsMu.Lock()
	defer s.subsMu.Unlock()
	s.answered(f[1])
	sub := s.subs[string(f[2])]
	if sub == nil || sub.most == 0 {
		return
	}
	if sub.had++; sub.had >= sub.most {
		s.drop(string(f[2]), sub)
	}
}

// answer sends a message of the front itself to the client, on the subject on
// which the client waits.
func (s *session) answer(reply string, payload []byte) error {
	sid := ""
	s.subsMu.Lock()
	for id, sub := range s.subs {
		if matches(sub.subject, reply) {
			sid = id
			break
		}
	}
	s.subsMu.Unlock()
	if sid == "" {
		return nil // the client waits for no answer
	}
	text := append([]byte("MSG "+reply+" "+sid+" "+strconv.Itoa(len(payload))+"\r\n"), payload...)
	return s.out.send(append(text, "\r\n"...))
}

// output is one direction of a session. Frames are never torn: the lock is held
// from the beginning of a frame to its end.
type output struct {
	mu sync.Mutex
	w  *bufio.Writer
}

func newOutput(conn net.Conn, limit time.Duration) *output {
	return &output{w: bufio.NewWriterSize(&patient{conn, limit}, 32<<10)}
}

// patient is a connection with a deadline for each write.
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
