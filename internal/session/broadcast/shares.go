package broadcast

import (
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Shares are the loads in which this node passes blocks on. All methods may be called
// concurrently.
type Shares struct {
	limits Limits
	log    *slog.Logger
	mux    *http.ServeMux

	mu     sync.Mutex
	shares map[shareID]*Share
	opened chan struct{} // closed at the next Open or Close
	closed bool
}

// shareID identifies a load.
type shareID struct{ attempt, load int }

// NewShares returns shares without a load.
func NewShares(limits Limits, log *slog.Logger) *Shares {
	s := &Shares{limits: limits, log: log, mux: http.NewServeMux(), shares: map[shareID]*Share{}, opened: make(chan struct{})}
	s.mux.HandleFunc("GET "+Path+"{attempt}/{load}/{node}", s.serve)
	return s
}

// ServeHTTP implements [http.Handler]. The caller has authenticated the request.
func (s *Shares) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.mux.ServeHTTP(w, r) }

// Limits returns the limits of the waiting.
func (s *Shares) Limits() Limits { return s.limits }

// Open begins to pass blocks of a load on to nodes. The caller ends the share.
func (s *Shares) Open(attempt, load int, to []int) *Share {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(to) == 0 {
		return nil
	}
	for id, old := range s.shares {
		if old.done() {
			delete(s.shares, id)
		}
	}
	id := shareID{attempt, load}
	if s.shares[id] != nil {
		return nil
	}
	share := newShare(to, s.limits)
	s.shares[id] = share
	close(s.opened)
	s.opened = make(chan struct{})
	return share
}

// Close ends all shares with their streams.
func (s *Shares) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	close(s.opened)
	for _, share := range s.shares {
		share.close()
	}
}

// find returns the share of a load, or nil. again is closed when there may be another answer.
func (s *Shares) find(id shareID) (share *Share, again <-chan struct{}, closed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.shares[id], s.opened, s.closed
}

func (s *Shares) serve(w http.ResponseWriter, r *http.Request) {
	attempt, err1 := strconv.Atoi(r.PathValue("attempt"))
	load, err2 := strconv.Atoi(r.PathValue("load"))
	node, err3 := strconv.Atoi(r.PathValue("node"))
	if err := errors.Join(err1, err2, err3); err != nil {
		httpkit.Refuse(w, problem.Wrap(problem.Invalid, err))
		return
	}
	out := &stream{w: w, control: http.NewResponseController(w), limits: s.limits}
	if err := s.stream(r, shareID{attempt, load}, node, out); err != nil {
		s.log.Debug("blocks of a load not passed on", "attempt", attempt, "load", load, "node", node, "error", err)
		if !out.begun {
			httpkit.Refuse(w, err)
			return
		}
		panic(http.ErrAbortHandler) // without the last signal
	}
}

// stream sends what a share has for a node.
func (s *Shares) stream(r *http.Request, id shareID, node int, out *stream) error {
	share, err := s.await(r, id, out)
	if err != nil {
		return err
	}
	to := share.attach(node)
	if to == nil {
		return problem.Errorf(problem.Conflict, "load %d of attempt %d has nothing more for node %d here", id.load, id.attempt, node)
	}
	beat := time.NewTicker(s.limits.Beat)
	defer beat.Stop()
	for {
		p, over, whole := share.next(to)
		switch {
		case p != nil:
			err = out.write(p.data)
			share.sent(to, p)
			if err != nil {
				share.fail(to)
				return err
			}
			continue
		case over && whole:
			return out.signal(signalEnd)
		case over:
			return problem.Errorf(problem.Gone, "the load ended before all blocks were passed on, or the node took them too slowly")
		}
		select {
		case <-to.came:
		case <-beat.C:
			if err := out.signal(signalAlive); err != nil {
				share.fail(to)
				return err
			}
		case <-r.Context().Done():
			share.fail(to)
			return r.Context().Err()
		}
	}
}

// await waits until a share is open: its node may learn of it later than the receiver.
func (s *Shares) await(r *http.Request, id shareID, out *stream) (*Share, error) {
	limit := time.NewTimer(s.limits.Absent)
	defer limit.Stop()
	beat := time.NewTicker(s.limits.Beat)
	defer beat.Stop()
	for {
		share, again, closed := s.find(id)
		if share != nil {
			return share, nil
		}
		if closed {
			return nil, problem.Errorf(problem.Gone, "the job has ended")
		}
		select {
		case <-again:
		case <-beat.C:
			if err := out.signal(signalAlive); err != nil {
				return nil, err
			}
		case <-limit.C:
			return nil, problem.Errorf(problem.NotFound, "this node passes on nothing of load %d of attempt %d", id.load, id.attempt)
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
}

// stream is the body of an answer.
type stream struct {
	w       http.ResponseWriter
	control *http.ResponseController
	limits  Limits
	begun   bool
}

// write sends bytes, within the limit for a receiver that takes nothing.
func (s *stream) write(data []byte) error {
	s.begun = true
	if err := s.control.SetWriteDeadline(time.Now().Add(s.limits.Silent)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	if _, err := s.w.Write(data); err != nil {
		return err
	}
	return s.control.Flush()
}

// signal sends a frame without data.
func (s *stream) signal(number int64) error {
	return s.write(appendHeader(make([]byte, 0, headerSize), 0, 0, number))
}
