// Package dedup serves requests once that are repeated because their answers were lost.
//
//	Header   numbers a request, and tells which answers have arrived
//	Answers  the answers that are kept for repetitions
package dedup

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Header numbers a request that the process of another node relays: "N LOW". That
// process repeats a request under its number when the connection broke before the answer
// came, and has the answers of all lower numbers than LOW of that rank.
const Header = "Ckptstore-Relay"

// Answers keeps the answers to relayed requests that must not be served twice: a message
// arrives once, and a report counts once. The zero value has none.
type Answers struct {
	mu  sync.Mutex
	all map[int]map[uint64]*answer // by rank and number
	low map[int]uint64             // by rank: all lower numbers have their answers
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
func (r *Answers) take(rank int, n, low uint64) (a *answer, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all, r.low = map[int]map[uint64]*answer{}, map[int]uint64{}
	}
	if n < r.low[rank] {
		return nil, false // a late copy: the rank has the answer
	}
	r.low[rank] = max(r.low[rank], low)
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

// Once returns a handler that serves each relayed request of a rank once, however often it is
// repeated. A request does not end with the connection that brought it, but with work. Its body
// has limit bytes at most.
func (r *Answers) Once(work context.Context, rank int, limit int64, do http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		var n, low uint64
		if _, err := fmt.Sscan(req.Header.Get(Header), &n, &low); err != nil {
			httpkit.Refuse(w, problem.Errorf(problem.Invalid, "header %s: %w", Header, err))
			return
		}
		body, err := httpkit.Read(w, req, limit)
		if err != nil {
			httpkit.Refuse(w, err)
			return
		}
		a, first := r.take(rank, n, low)
		if a == nil {
			httpkit.Refuse(w, problem.Errorf(problem.Gone, "request %d was answered", n))
			return
		}
		if first {
			ctx, cancel := context.WithCancel(context.WithoutCancel(req.Context()))
			stop := context.AfterFunc(work, cancel)
			again := req.Clone(ctx)
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
		case <-req.Context().Done():
			return
		}
		for name, values := range a.header {
			w.Header()[name] = values
		}
		w.WriteHeader(a.status)
		_, _ = w.Write(a.body.Bytes()) // without an answer, the request is repeated
	})
}
