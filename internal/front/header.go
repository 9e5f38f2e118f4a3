package front

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// header holds the headers of a message in order, each name once. They are
// encoded again for the server, so that the server and the front read them alike.
type header []field

type field struct{ name, value string }

const (
	headerVersion = "NATS/1.0\r\n"
	headerMost    = 32 // of one message
)

// parseHeader parses a block of headers into the memory of an earlier header. It
// accepts only what a client writes: no status, no folded line, no repeated name,
// no control character.
func parseHeader(block []byte, into header) (header, error) {
	rest, ok := strings.CutPrefix(string(block), headerVersion)
	if !ok {
		return nil, fmt.Errorf("headers begin with %q, want %q", beginning(block), headerVersion)
	}
	h := into[:0]
	if h == nil {
		h = make(header, 0, headerMost)
	}
	for {
		line, more, found := strings.Cut(rest, "\r\n")
		if !found {
			return nil, errors.New("headers do not end with an empty line")
		}
		if line == "" {
			if more != "" {
				return nil, fmt.Errorf("headers end %d bytes before their size", len(more))
			}
			return h, nil
		}
		rest = more
		name, value, ok := strings.Cut(line, ":")
		if !ok || !headerName(name) {
			return nil, fmt.Errorf("header line %q", beginning([]byte(line)))
		}
		value = strings.Trim(value, " ")
		if !headerValue(value) {
			return nil, fmt.Errorf("header %s has a value that a header cannot hold", name)
		}
		for _, f := range h {
			if len(f.name) == len(name) && strings.EqualFold(f.name, name) {
				return nil, fmt.Errorf("header %s is repeated", name)
			}
		}
		if len(h) == headerMost {
			return nil, fmt.Errorf("more than %d headers", headerMost)
		}
		h = append(h, field{name, value})
	}
}

func headerName(name string) bool {
	for i := range len(name) {
		if c := name[i]; (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return name != ""
}

func headerValue(value string) bool {
	ascii := true
	for i := range len(value) {
		c := value[i]
		if c < ' ' || c == 0x7f {
			return false
		}
		ascii = ascii && c < utf8.RuneSelf
	}
	return ascii || utf8.ValidString(value)
}

// beginning returns the part of a client's input that an error quotes.
func beginning(text []byte) []byte { return text[:min(len(text), 64)] }

// get returns the value of a header, or "" without it.
func (h header) get(name string) string {
	for _, f := range h {
		if f.name == name {
			return f.value
		}
	}
	return ""
}

// only returns the first header that is not allowed.
func (h header) only(allowed map[string]bool) (other string, ok bool) {
	for _, f := range h {
		if !allowed[f.name] {
			return f.name, false
		}
	}
	return "", true
}

// set replaces the header of that name, or appends it.
func (h header) set(name, value string) header {
	for i := range h {
		if h[i].name == name {
			h[i].value = value
			return h
		}
	}
	return append(h, field{name, value})
}

func contains(names []string, name string) bool {
	for _, n := range names {
		if n == name {
			return true
		}
	}
	return false
}

func (h header) size() int {
	n := len(headerVersion) + len("\r\n")
	for _, f := range h {
		n += len(f.name) + len(": ") + len(f.value) + len("\r\n")
	}
	return n
}

func (h header) append(to []byte) []byte {
	to = append(to, headerVersion...)
	for _, f := range h {
		to = append(append(append(append(to, f.name...), ": "...), f.value...), "\r\n"...)
	}
	return append(to, "\r\n"...)
}
