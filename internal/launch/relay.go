package launch

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/session"
)

// repeating relays the requests of one rank, and repeats those whose answer is lost. A
// connection can break in a silence that is too short to end the group; the rank must not
// notice.
type repeating struct {
	by   http.RoundTripper
	over <-chan struct{} // closed when no request is repeated any more

	mu   sync.Mutex
	last uint64          // number of the newest request
	open map[uint64]bool // numbers of requests without an answer
}

var _ http.RoundTripper = (*repeating)(nil)

// RoundTrip implements [http.RoundTripper].
func (t *repeating) RoundTrip(r *http.Request) (*http.Response, error) {
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
	}
	number, end := t.begin()
	defer end()
	for {
		again := r.Clone(r.Context())
		again.Body, again.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		again.Header.Set(session.RelayHeader, number)
		response, err := t.answer(again)
		if err == nil || r.Context().Err() != nil {
			return response, err
		}
		select {
		case <-time.After(requestAgain):
		case <-t.over:
			return nil, err
		case <-r.Context().Done():
			return nil, err
		}
	}
}

// answer sends a request and reads the whole answer: a part of one is none.
func (t *repeating) answer(r *http.Request) (*http.Response, error) {
	response, err := t.by.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	response.Body = io.NopCloser(bytes.NewReader(body))
	return response, nil
}

// begin numbers a request until end is called: see [session.RelayHeader].
func (t *repeating) begin() (number string, end func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last++
	n, low := t.last, t.last
	if t.open == nil {
		t.open = map[uint64]bool{}
	}
	t.open[n] = true
	for other := range t.open {
		low = min(low, other)
	}
	return fmt.Sprint(n, " ", low), func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.open, n)
	}
}
