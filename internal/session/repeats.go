package session

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"

	"github.com/ckptstore/ckptstore/internal/httpkit"
)

// RelayHeader numbers a request that the process of another node relays: "N LOW". That
// process repeats a request under its number when the connection broke before the answer
// came, and has the answers of all lower numbers than LOW of that rank.
const RelayHeader = "Ckptstore-Relay"

// repeats keeps the answers to relayed requests that must not be served twice: a message
// arrives once, and a report counts once.
type repeats struct {
	mu  sync.Mutex
	all map[int]map[uint64]*answer // by rank and number
}

// answer is the answer to one request. It can be read once done is closed.
type answer struct {
	done   chan struct{}
	status int
	header http.Header
	body   bytes.Buffer
}

var _ http.ResponseWriter = (*answer)(nil)

// Header implements [http.ResponseWriter].
func (a *answer) Header() http.Header { return a.header }

// WriteHeader implements [http.ResponseWriter].
func (a *answer) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
}

// Write implements [http.ResponseWriter].
func (a *answer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return a.body.Write(p)
}

// take returns the answer of a number, and whether this call is the first to ask for it.
func (r *repeats) take(rank int, n, low uint64) (a *answer, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all = map[int]map[uint64]*answer{}
	}
	of := r.all[rank]
	if of == nil {
		of = map[uint64]*answer{}
		r.all[rank] = of
	}
	for old := range of {
		if old < low {
			delete(of, old)
		}
	}
	if of[n] == nil {
		of[n], first = &answer{done: make(chan struct{}), header: http.Header{}}, true
	}
	return of[n], first
}

// exactlyOnce serves a relayed request once, however often it is repeated. The request does not
// end with the connection that brought it, but with the attempt.
func (s *rankServer) exactlyOnce(do http.Handler) http.Handler {
	if !s.relayed {
		return do
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var n, low uint64
		if _, err := fmt.Sscan(r.Header.Get(RelayHeader), &n, &low); err != nil {
			httpkit.Refuse(w, badRequest("header %s: %w", RelayHeader, err))
			return
		}
		body, err := httpkit.Read(w, r, maxBody)
		if err != nil {
			httpkit.Refuse(w, err)
			return
		}
		a, first := s.repeats.take(s.rank, n, low)
		if first {
			ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
			stop := context.AfterFunc(s.work, cancel)
			again := r.Clone(ctx)
			again.Body = io.NopCloser(bytes.NewReader(body))
			go func() {
				defer close(a.done)
				defer cancel()
				defer stop()
				do.ServeHTTP(a, again)
				a.WriteHeader(http.StatusOK)
			}()
		}
		select {
		case <-a.done:
		case <-r.Context().Done():
			return
		}
		for name, values := range a.header {
			w.Header()[name] = values
		}
		w.WriteHeader(a.status)
		_, _ = w.Write(a.body.Bytes()) // without an answer, the request is repeated
	})
}
