package worker

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/worker/client"
)

// loader serves collective loads. The n-th load of an attempt is resolved
// once, when every rank has asked for it; so no two ranks can restore
// different checkpoints, whatever is committed in between. It is also read
// once: what several ranks want is copied to all of them out of one buffer.
type loader struct {
	g      *group
	arenas *arenas

	mu      sync.Mutex
	counts  map[int]int // loads a rank has asked for
	loads   map[int]*load
	lent    map[string]*arena // by path: what workers copy from
	over    error             // why no load can be complete any more
	closed  bool
	running sync.WaitGroup // loads that are being read
}

// load is one collective load. It belongs to no rank: when one goes away, the
// others get their answers all the same.
type load struct {
	n        int
	complete chan struct{} // closed when every rank has asked, or none will
	done     chan struct{} // closed when answers are there

	// Under the lock of the loader.
	asked   map[int]client.LoadRequest // unchanged from complete on
	over    error                      // set before complete is closed
	waiting map[int]bool               // ranks that want an answer
	cancel  context.CancelFunc         // ends the reading; nil before it begins
	answers []answer                   // by rank
}

// answer is what a rank gets. Its arena is the loader's until the rank has
// been told of it.
type answer struct {
	reply client.LoadReply
	arena *arena
	err   error
}

func newLoader(g *group, a *arenas) *loader {
	return &loader{g: g, arenas: a, counts: map[int]int{}, loads: map[int]*load{}, lent: map[string]*arena{}}
}

// join adds rank's request to the next load of the rank. The last rank starts
// the reading.
func (l *loader) join(rank int, req client.LoadRequest) (*load, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts[rank]++
	n := l.counts[rank]
	ld := l.loads[n]
	if ld == nil && l.over != nil {
		return nil, &problem{http.StatusConflict, l.over}
	}
	if ld == nil {
		ld = &load{
			n: n, complete: make(chan struct{}), done: make(chan struct{}),
			asked: map[int]client.LoadRequest{}, waiting: map[int]bool{},
		}
		l.loads[n] = ld
	}
	ld.asked[rank], ld.waiting[rank] = req, true
	if len(ld.asked) == l.g.cfg.NProc && ld.over == nil {
		if l.closed {
			ld.over = errors.New("the attempt is over")
			close(ld.complete)
			return ld, nil
		}
		close(ld.complete)
		var ctx context.Context
		ctx, ld.cancel = context.WithCancel(l.g.work)
		l.running.Go(func() { l.finish(ld, l.run(ctx, ld)) })
	}
	return ld, nil
}

// finish has the answers ready. Arenas of ranks that have gone away meanwhile
// are dropped now that nobody writes to them.
func (l *loader) finish(ld *load, answers []answer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ld.cancel()
	ld.answers = answers
	for rank := range answers {
		if !ld.waiting[rank] {
			l.refuse(ld, rank)
		}
	}
	close(ld.done)
	l.forget(ld)
}

// refuse drops what was read for a rank that does not take it. The caller
// holds the lock.
func (l *loader) refuse(ld *load, rank int) {
	if a := ld.answers[rank].arena; a != nil {
		ld.answers[rank].arena = nil
		_ = l.arenas.drop(a) // what cannot be removed stays until the job ends
	}
}

// forget drops a load of which every rank has had its answer. The caller holds
// the lock.
func (l *loader) forget(ld *load) {
	if ld.answers != nil && len(ld.waiting) == 0 {
		delete(l.loads, ld.n)
	}
}

// take gives a rank its answer, and lends it the arena that is named in it.
func (l *loader) take(ld *load, rank int) (client.LoadReply, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(ld.waiting, rank)
	defer l.forget(ld)
	got := &ld.answers[rank]
	if l.closed && got.err == nil {
		return client.LoadReply{}, &problem{http.StatusConflict, errors.New("the attempt is over")}
	}
	if got.arena != nil {
		l.lent[got.arena.path] = got.arena
		got.arena = nil
	}
	return got.reply, got.err
}

// leave says that a rank does not wait any more. The reading goes on for the
// others, and ends when there is nobody to read for.
func (l *loader) leave(ld *load, rank int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(ld.waiting, rank)
	if ld.answers != nil {
		l.refuse(ld, rank)
		l.forget(ld)
	}
	if len(ld.waiting) == 0 && ld.cancel != nil {
		ld.cancel()
	}
}

// end releases the ranks that wait for one whose process has ended.
func (l *loader) end(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = why
	for _, ld := range l.loads {
		if len(ld.asked) < l.g.cfg.NProc && ld.over == nil {
			ld.over = why
			close(ld.complete)
		}
	}
}

// absent lists the ranks that have not joined a load.
func (l *loader) absent(ld *load) []int {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ranks []int
	for rank := range l.g.cfg.NProc {
		if _, ok := ld.asked[rank]; !ok {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

func (s *rankServer) onLoad(ctx context.Context, req client.LoadRequest) (client.LoadReply, error) {
	for _, it := range req.Items {
		if it.FQN == "" {
			return client.LoadReply{}, badRequest("an item has no name")
		}
	}
	ld, err := s.loader.join(s.rank, req)
	if err != nil {
		return client.LoadReply{}, err
	}
	wait, cancel := context.WithTimeout(ctx, s.cfg.Collective)
	defer cancel()
	select {
	case <-ld.complete:
	case <-wait.Done():
		absent := s.loader.absent(ld)
		s.loader.leave(ld, s.rank)
		return client.LoadReply{}, &problem{http.StatusGatewayTimeout, fmt.Errorf(
			"load %d is a collective, and ranks %v have not called it: %w", ld.n, absent, wait.Err())}
	}
	if ld.over != nil {
		return client.LoadReply{}, &problem{http.StatusConflict, ld.over}
	}
	select {
	case <-ld.done:
		return s.loader.take(ld, s.rank)
	case <-ctx.Done():
		s.loader.leave(ld, s.rank)
		return client.LoadReply{}, ctx.Err()
	}
}

// onLoaded takes an arena back from the worker.
func (s *rankServer) onLoaded(_ context.Context, req client.LoadedRequest) (struct{}, error) {
	l := s.loader
	l.mu.Lock()
	defer l.mu.Unlock()
	a, ok := l.lent[req.Arena]
	if !ok || a.rank != s.rank {
		return struct{}{}, badRequest("rank %d has no load in %q", s.rank, req.Arena)
	}
	delete(l.lent, req.Arena)
	l.arenas.give(a)
	return struct{}{}, nil
}

// close ends what is being read, and drops the arenas that workers have not
// given back. When the reading does not end in time, they stay: a reader that
// wakes up later writes to them.
func (l *loader) close(limit time.Duration) error {
	l.mu.Lock()
	l.closed = true
	for _, ld := range l.loads {
		if ld.cancel != nil {
			ld.cancel()
		}
	}
	l.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		l.running.Wait()
		close(ended)
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
		return fmt.Errorf("%w: a load was stopped %v ago and has not ended; look at the disk of the store, then start the run again", errStuck, limit)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, ld := range l.loads {
		for rank := range ld.answers {
			l.refuse(ld, rank)
		}
	}
	for path, a := range l.lent {
		delete(l.lent, path)
		_ = l.arenas.drop(a) // what cannot be removed stays until the job ends
	}
	return nil
}
