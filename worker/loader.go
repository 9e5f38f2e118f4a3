package worker

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/storage"
	"github.com/ckptstore/ckptstore/worker/client"
)

// loader serves collective loads. The n-th load of an attempt is resolved
// once, when every rank has asked for it; so no two ranks can restore
// different checkpoints, whatever is committed in between.
type loader struct {
	g      *group
	arenas *arenas

	mu     sync.Mutex
	counts map[int]int // loads a rank has asked for
	loads  map[int]*load
	lent   map[string]*arena // by path: what workers copy from
	over   error             // why no load can be complete any more
}

// load is one collective load.
type load struct {
	n        int
	asked    map[int]client.LoadRequest
	complete chan struct{} // closed when every rank has asked, or none will
	over     error         // set before complete is closed
	resolve  sync.Once
	err      error
	ckpt     projections.Checkpoint
	manifest plan.Manifest
	planner  *planner.Loader
	reader   storage.Reader
	unread   []string

	mu       sync.Mutex
	bytes    int64
	finished int
}

func newLoader(g *group, a *arenas) *loader {
	return &loader{g: g, arenas: a, counts: map[int]int{}, loads: map[int]*load{}, lent: map[string]*arena{}}
}

// join adds rank's request to the next load of the rank.
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
		ld = &load{n: n, asked: map[int]client.LoadRequest{}, complete: make(chan struct{})}
		l.loads[n] = ld
	}
	ld.asked[rank] = req
	if len(ld.asked) == l.g.cfg.NProc && ld.over == nil {
		close(ld.complete)
	}
	return ld, nil
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
		return client.LoadReply{}, &problem{http.StatusGatewayTimeout, fmt.Errorf(
			"load %d is a collective, and ranks %v have not called it: %w", ld.n, s.loader.absent(ld), wait.Err())}
	}
	if ld.over != nil {
		return client.LoadReply{}, &problem{http.StatusConflict, ld.over}
	}
	ld.resolve.Do(func() { ld.err = s.resolve(ctx, ld) })
	if ld.err != nil {
		return client.LoadReply{}, &problem{http.StatusConflict, ld.err}
	}
	reply, err := s.read(ctx, ld, req)
	if err != nil {
		sayErr := s.lane.say(ctx, &events.RestoreFailed{Attempt: s.attempt, Load: ld.n, Checkpoint: ld.ckpt.ID, Error: fmt.Sprintf("rank %d: %v", s.rank, err)})
		return client.LoadReply{}, errors.Join(err, sayErr)
	}
	return reply, nil
}

// lend remembers an arena that a worker copies from.
func (l *loader) lend(a *arena) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lent[a.path] = a
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

// close drops the arenas that workers have not given back.
func (l *loader) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for path, a := range l.lent {
		delete(l.lent, path)
		_ = l.arenas.drop(a) // what cannot be removed stays until the job ends
	}
}
