package launch

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/dedup"
	"github.com/ckptstore/ckptstore/internal/session/restore"
)

// repeating relays the requests of one rank, and repeats those whose answer is lost. A
// connection can break in a silence that is too short to end the group; the rank must not
// notice.
type repeating struct {
	by   http.RoundTripper
	over <-chan struct{} // closed when no request is repeated any more
	rank int
	held *holdings // notes the answers; nil: nothing does

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
		since := t.held.begins(r)
		again := r.Clone(r.Context())
		again.Body, again.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		again.Header.Set(dedup.Header, number)
		response, err := t.answer(again)
		if err == nil && !t.held.accept(since, t.rank, r, response) {
			continue // another process coordinates by now
		}
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

// begin numbers a request until end is called: see [dedup.Header].
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

// loadLimit bounds a request about a load in bytes: it names each tensor that a node
// loads.
const loadLimit = 256 << 20

// loads serves one kind of requests of other nodes about the loads of an attempt.
func loads[In, Out any](f *fleet, do func(*restore.Meeting, context.Context, int, In) (Out, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		o, at, err := f.sender(r)
		var reply Out
		if err == nil {
			var in In
			if in, err = httpkit.Request[In](w, r, loadLimit); err == nil {
				reply, err = do(o.group.Meeting(), r.Context(), at, in)
			}
		}
		if err != nil {
			httpkit.Refuse(w, err)
			return
		}
		if err := httpkit.Reply(w, reply); err != nil {
			f.log.Error("answer about a load not sent", "error", err)
		}
	})
}

// sender returns the attempt that a request of another node concerns, and the node's
// place in its group.
func (f *fleet) sender(r *http.Request) (o *others, at int, err error) {
	select {
	case <-f.begun:
	case <-r.Context().Done():
		return nil, 0, context.Cause(r.Context())
	}
	attempt, err := strconv.Atoi(r.PathValue("attempt"))
	if err == nil {
		o = f.current(attempt)
	}
	if o == nil {
		return nil, 0, problem.Errorf(problem.Gone, "attempt %s is over", r.PathValue("attempt"))
	}
	at, member := o.place[nodes.From(r.Context())]
	if !member {
		return nil, 0, problem.Errorf(problem.Unauthorized, "node %d has no part in attempt %d", nodes.From(r.Context()), attempt)
	}
	return o, at, nil
}

// relayed serves the requests of ranks of other nodes that concern all ranks.
func (f *fleet) relayed(w http.ResponseWriter, r *http.Request) {
	o, at, err := f.sender(r)
	if err != nil {
		httpkit.Refuse(w, err)
		return
	}
	rank, err := strconv.Atoi(r.PathValue("rank"))
	if err != nil || !slices.Contains(o.order.Nodes[at], rank) {
		httpkit.Refuse(w, problem.Errorf(problem.Unauthorized, "rank %s of attempt %d is not on node %d", r.PathValue("rank"), o.order.Attempt, nodes.From(r.Context())))
		return
	}
	prefix := fmt.Sprintf("/v1/attempts/%s/ranks/%s", r.PathValue("attempt"), r.PathValue("rank"))
	if !strings.HasPrefix(r.URL.Path, prefix) {
		httpkit.Refuse(w, problem.Errorf(problem.NotFound, "no request %s", r.URL.Path))
		return
	}
	http.StripPrefix(prefix, o.group.Relayed(rank)).ServeHTTP(w, r)
}
