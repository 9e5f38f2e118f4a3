package front

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strconv"
	"strings"
)

// op is an operation of a client.
type op byte

const (
	opConnect op = iota + 1
	opPub
	opSub
	opUnsub
	opPing
	opPong
)

// frame is one operation. Its bytes are valid until the next read.
type frame struct {
	op      op
	subject string
	reply   string
	queue   string
	sid     string
	most    int    // messages until an UNSUB; 0: now
	header  []byte // block of headers; nil: none
	payload []byte // body of a message, or the JSON of a CONNECT
}

// protocolError ends the connection. Its text is one of the server's.
type protocolError string

// Error implements error.
func (e protocolError) Error() string { return string(e) }

const (
	errOperation = protocolError("Unknown Protocol Operation")
	errParse     = protocolError("Parser Error")
	errLine      = protocolError("maximum control line exceeded")
	errPayload   = protocolError("Maximum Payload Violation")
)

// reader reads the frames of a client:
//
//	CONNECT {…}
//	PUB subject [reply] size\r\n…
//	HPUB subject [reply] headers size\r\n…
//	SUB subject [queue] sid
//	UNSUB sid [max]
//	PING
//	PONG
//
// Every line ends with CR LF, and so does a payload.
type reader struct {
	in     *bufio.Reader
	limits Limits
	body   []byte // reused for small payloads
	// charge, when set, is called before a large payload is read.
	charge func(bytes int) error
}

func newReader(from io.Reader, limits Limits) *reader {
	return &reader{in: bufio.NewReaderSize(from, 64<<10), limits: limits}
}

// line reads one line without its end. It is valid until the next read.
func (r *reader) line() ([]byte, error) {
	line, err := r.in.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) || len(line) > r.limits.Line {
		return nil, errLine
	}
	if err != nil {
		return nil, err
	}
	line, ok := bytes.CutSuffix(line, []byte("\r\n"))
	if !ok {
		return nil, errParse
	}
	return line, nil
}

// next reads one frame.
func (r *reader) next() (frame, error) {
	line, err := r.line()
	if err != nil {
		return frame{}, err
	}
	word, rest := line, []byte(nil)
	if i := bytes.IndexAny(line, " \t"); i >= 0 {
		word, rest = line[:i], line[i+1:]
	}
	if len(word) > len("CONNECT") {
		return frame{}, errOperation
	}
	switch strings.ToUpper(string(word)) {
	case "PUB":
		return r.publication(strings.Fields(string(rest)), false)
	case "HPUB":
		return r.publication(strings.Fields(string(rest)), true)
	case "SUB":
		f := strings.Fields(string(rest))
		switch len(f) {
		case 2:
			return frame{op: opSub, subject: f[0], sid: f[1]}, r.names(f...)
		case 3:
			return frame{op: opSub, subject: f[0], queue: f[1], sid: f[2]}, r.names(f...)
		}
		return frame{}, errParse
	case "UNSUB":
		f := strings.Fields(string(rest))
		if len(f) == 0 || len(f) > 2 {
			return frame{}, errParse
		}
		u := frame{op: opUnsub, sid: f[0]}
		if len(f) == 2 {
			if u.most, err = size(f[1]); err != nil {
				return frame{}, err
			}
		}
		return u, r.names(f[0])
	case "PING":
		return frame{op: opPing}, nil
	case "PONG":
		return frame{op: opPong}, nil
	case "CONNECT":
		return frame{op: opConnect, payload: bytes.TrimSpace(rest)}, nil
	}
	return frame{}, errOperation
}

// connect reads the CONNECT by which a client begins. From an unauthenticated
// client it reads no more than a line.
func (r *reader) connect() (c connect, err error) {
	line, err := r.line()
	if err != nil {
		return c, err
	}
	word, rest, _ := bytes.Cut(line, []byte(" "))
	if !strings.EqualFold(string(word), "CONNECT") || json.Unmarshal(rest, &c) != nil {
		return c, errParse
	}
	return c, nil
}

// publication reads the rest of a PUB or HPUB after its line.
func (r *reader) publication(args []string, headers bool) (frame, error) {
	sizes := 1
	if headers {
		sizes = 2
	}
	n := len(args) - sizes
	if n != 1 && n != 2 {
		return frame{}, errParse
	}
	f := frame{op: opPub, subject: args[0]}
	if n == 2 {
		f.reply = args[1]
	}
	if err := r.names(args[:n]...); err != nil {
		return frame{}, err
	}
	total, err := size(args[len(args)-1])
	if err != nil {
		return frame{}, err
	}
	head := 0
	if headers {
		if head, err = size(args[n]); err != nil {
			return frame{}, err
		}
	}
	if total > r.limits.Payload || head > r.limits.Header {
		return frame{}, errPayload
	}
	if head > total {
		return frame{}, errParse
	}
	data, err := r.take(total + len("\r\n"))
	if err != nil {
		return frame{}, err
	}
	if data[total] != '\r' || data[total+1] != '\n' {
		return frame{}, errParse
	}
	if headers {
		f.header = data[:head:head]
	}
	f.payload = data[head:total:total]
	return f, nil
}

// take reads n bytes.
func (r *reader) take(n int) ([]byte, error) {
	var data []byte
	switch {
	case n <= cap(r.body):
		data = r.body[:n]
	case n <= largeFrame:
		r.body = make([]byte, n, largeFrame)
		data = r.body
	default:
		if r.charge != nil {
			if err := r.charge(n); err != nil {
				return nil, err
			}
		}
		data = make([]byte, n)
	}
	_, err := io.ReadFull(r.in, data)
	return data, err
}

// names checks that subjects and identifiers are visible ASCII, and not too long.
func (r *reader) names(all ...string) error {
	for _, name := range all {
		if len(name) > r.limits.Subject {
			return errLine
		}
		for i := range len(name) {
			if name[i] <= ' ' || name[i] > '~' || name[i] == '"' || name[i] == '\'' {
				return errParse
			}
		}
	}
	return nil
}

// size reads a number of bytes or messages.
func size(text string) (int, error) {
	if len(text) > 9 {
		return 0, errPayload
	}
	for _, c := range text {
		if c < '0' || c > '9' {
			return 0, errParse
		}
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, errParse
	}
	return n, nil
}

// appendPub encodes a publication for the server.
func appendPub(to []byte, subject, reply string, h header, payload []byte) []byte {
	if h != nil {
		to = append(to, 'H')
	}
	to = append(append(to, "PUB "...), subject...)
	if reply != "" {
		to = append(append(to, ' '), reply...)
	}
	n := len(payload)
	if h != nil {
		size := h.size()
		to = append(strconv.AppendInt(append(to, ' '), int64(size), 10), ' ')
		n += size
	} else {
		to = append(to, ' ')
	}
	to = append(strconv.AppendInt(to, int64(n), 10), "\r\n"...)
	if h != nil {
		to = h.append(to)
	}
	return append(append(to, payload...), "\r\n"...)
}
