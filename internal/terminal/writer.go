package terminal

import (
	"bytes"
	"io"
	"regexp"
	"sync"
	"unicode/utf8"
)

// Writer writes [Text] of what is written to it. A character may be split
// between two calls: its first bytes are kept until the rest comes, or until
// [Writer.Flush]. It may be used by several goroutines at once.
type Writer struct {
	to io.Writer

	mu   sync.Mutex
	rest []byte // the beginning of a character
}

var _ io.Writer = (*Writer)(nil)

// NewWriter returns a Writer to a terminal, or to what stands in its place.
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

// Flush writes the beginning of a character whose rest never came, as escapes.
func (w *Writer) Flush() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	rest := w.rest
	w.rest = nil
	return w.write(rest)
}

// write writes text to the end. The caller holds the lock.
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

// complete is the length of text without a character that has only begun.
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
// nothing and a terminal answers nothing to it.
var style = regexp.MustCompile(`^\x1b\[[0-9;:]{0,64}m`)

// plainly ends all styles.
const plainly = "\x1b[0m"

// AppendOutput appends a line that a program printed, without its end, as
// [Text] but with the program's colours and with the carriage returns by which
// it redraws the line. Styles that the line leaves on end with it, so that the
// next line, of another program, does not have them.
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
