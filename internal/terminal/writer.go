package terminal

import (
	"bytes"
	"io"
	"regexp"
	"sync"
	"unicode/utf8"
)

// Writer writes [Text] of its input. If a character is split between two calls,
// its first bytes are kept until the rest comes, or until [Writer.Flush]. It is
// safe for concurrent use.
type Writer struct {
	to io.Writer

	mu   sync.Mutex
	rest []byte // the beginning of a split character
}

var _ io.Writer = (*Writer)(nil)

// NewWriter returns a Writer to a terminal, or to a stream used as one.
func NewWriter(to io.Writer) *Writer { return &Writer{to: to} }

// Write implements io.Writer. It returns len(p) or an error of the underlying
// writer.
func (w *Writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := p
	if len(w.rest) > 0 {
		text = append(w.rest, p...)
	}
	end := complete(text)
	rest := bytes.Clone(text[end:])
	err := w.write(text[:end])
	w.rest = rest
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// Flush writes the beginning of an incomplete character, as escapes.
func (w *Writer) Flush() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	rest := w.rest
	w.rest = nil
	return w.write(rest)
}

// write writes all of text. The caller holds the lock.
func (w *Writer) write(text []byte) error {
	if len(text) == 0 {
		return nil
	}
	if dirty(text, forbidden) {
		text = appendClean(nil, text, forbidden)
	}
	_, err := w.to.Write(text)
	return err
}

// complete returns the length of text without an incomplete last character.
func complete(text []byte) int {
	for i := len(text) - 1; i >= max(0, len(text)-utf8.UTFMax+1); i-- {
		if utf8.RuneStart(text[i]) {
			if !utf8.FullRune(text[i:]) {
				return i
			}
			break
		}
	}
	return len(text)
}

// style is the escape sequence that sets colours and weights (SGR). It moves
// nothing, and a terminal does not answer it.
var style = regexp.MustCompile(`^\x1b\[[0-9;:]{0,64}m`)

// plainly resets all styles.
const plainly = "\x1b[0m"

// AppendOutput appends a line of a program's output, without its end, escaped as
// by [Text]. It keeps the program's colours, and the carriage returns by which
// the program redraws the line. It resets styles at the end of the line, so that
// they do not affect the next line, of another program.
func AppendOutput(to, line []byte) []byte {
	styled := false
	for i := 0; i < len(line); {
		_, n := utf8.DecodeRune(line[i:])
		switch line[i] {
		case '\r':
			to = append(to, '\r')
		case '\x1b':
			if set := style.Find(line[i:]); set != nil {
				n = len(set)
				styled = len(bytes.Trim(set[2:n-1], "0;:")) > 0
				to = append(to, set...)
				break
			}
			fallthrough
		default:
			to = appendClean(to, line[i:i+n], forbidden)
		}
		i += n
	}
	if styled {
		to = append(to, plainly...)
	}
	return to
}
