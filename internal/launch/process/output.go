package process

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strings"
	"sync"
)

// maxLine is the longest piece of output that is kept together, in bytes.
const maxLine = 64 << 10

func (p *Process) forward(r io.Reader, to io.Writer) {
	in := bufio.NewReaderSize(r, maxLine)
	for {
		piece, err := next(in)
		if len(piece) > 0 {
			p.tail.add(string(piece))
			// A closed terminal must not stop the training.
			_, _ = to.Write(piece)
		}
		if err != nil {
			return
		}
	}
}

// next returns the next piece of output, valid until the following call. A state
// of a redrawn line does not wait for the line's end: a user may be watching it.
func next(in *bufio.Reader) ([]byte, error) {
	for more := 1; ; more = in.Buffered() + 1 {
		_, err := in.Peek(more)
		piece, _ := in.Peek(in.Buffered())
		n := ends(piece)
		if n == 0 && err == nil {
			continue
		}
		if n > 0 {
			piece, err = piece[:n], nil
		}
		_, _ = in.Discard(len(piece)) // all of it is buffered
		if errors.Is(err, bufio.ErrBufferFull) {
			err = nil
		}
		return piece, err
	}
}

// ends returns where the first piece of text ends; 0 if its end is not in text.
// Text that ends with "\r\n" is a line.
func ends(text []byte) int {
	end := bytes.IndexByte(text, '\n') + 1
	line := text
	if end > 0 {
		line = bytes.TrimSuffix(text[:end-1], []byte{'\r'})
	}
	if state := bytes.IndexByte(line, '\r') + 1; state > 0 {
		return state
	}
	return end
}

// Prefixed returns a writer that puts a prefix before each piece, and ends each
// with a newline, or with "\r" if the line will be redrawn, in one write.
func Prefixed(to io.Writer, prefix string) io.Writer { return &prefixed{to, prefix} }

type prefixed struct {
	to     io.Writer
	prefix string
}

// Write implements [io.Writer].
func (w *prefixed) Write(piece []byte) (int, error) {
	text := append([]byte(w.prefix), piece...)
	switch {
	case string(piece) == "\r": // begins a line that is redrawn
		text = piece
	case len(piece) == 0 || !bytes.ContainsAny(piece[len(piece)-1:], "\r\n"):
		text = append(text, '\n')
	}
	if _, err := w.to.Write(text); err != nil {
		return 0, err
	}
	return len(piece), nil
}

// tail keeps the last lines of a process's output, for the report of why it
// failed. It keeps the last state of a redrawn line.
type tail struct {
	mu    sync.Mutex
	lines []string
}

const tailLines = 20

func (t *tail) add(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if last := len(t.lines) - 1; last >= 0 && strings.HasSuffix(t.lines[last], "\r") {
		if line == "\n" {
			line = strings.TrimSuffix(t.lines[last], "\r") + line
		}
		t.lines = t.lines[:last]
	}
	if len(t.lines) == tailLines {
		t.lines = t.lines[1:]
	}
	t.lines = append(t.lines, line)
}

func (t *tail) get() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.lines...)
}
