package launch_test

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

// transcript collects output and notifies of writes.
type transcript struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{} // closed at the next write
}

func newTranscript() *transcript { return &transcript{more: make(chan struct{})} }

// Write implements io.Writer.
func (s *transcript) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.more)
	s.more = make(chan struct{})
	return s.text.Write(p)
}

// String is everything so far.
func (s *transcript) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// next is closed at the next write.
func (s *transcript) next() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.more
}

// lines are those that begin with a prefix, without it.
func (s *transcript) lines(prefix string) []string {
	var out []string
	for line := range strings.Lines(s.String()) {
		if rest, ok := strings.CutPrefix(line, prefix); ok {
			out = append(out, strings.TrimSuffix(rest, "\n"))
		}
	}
	return out
}

// await blocks until n lines with a prefix are there, and returns them.
func (s *transcript) await(t *testing.T, n int, prefix string) []string {
	t.Helper()
	limit := time.After(patience)
	for {
		s.mu.Lock()
		more := s.more
		s.mu.Unlock()
		if got := s.lines(prefix); len(got) >= n {
			return got
		}
		select {
		case <-more:
		case <-limit:
			t.Fatalf("%d lines %q did not come; there is:\n%s", n, prefix, s)
		}
	}
}

// awaitText blocks until a text is there.
func awaitText(t *testing.T, s *transcript, text string) {
	t.Helper()
	limit := time.After(patience)
	for {
		s.mu.Lock()
		more := s.more
		s.mu.Unlock()
		if strings.Contains(s.String(), text) {
			return
		}
		select {
		case <-more:
		case <-limit:
			t.Fatalf("%q did not come; there is:\n%s", text, s)
		}
	}
}

func wantText(t *testing.T, text fmt.Stringer, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text.String(), part) {
			t.Errorf("%q is not in:\n%s", part, text)
		}
	}
}
