package restore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// Loader serves the loads of one attempt. The n-th load of the same ranks, by
// default all, is resolved once, when each of them has asked for it. So no two
// ranks can restore different checkpoints, even if one is committed in between.
// It is also read once: wants of several ranks are copied to all of them out of
// one buffer. All methods but Prove may be called concurrently.
type Loader struct {
	cfg   Config
	proof *proof // set before the first load, or nil

	mu      sync.Mutex
	counts  map[loadRanks]int // loads a rank has asked for, by its group of ranks
	loads   map[loadOf]*load
	made    int
	lent    map[loan]*answer // memory that workers copy from
	over    error            // why no further load can be complete
	gone    map[int]error    // ranks that have ended, and why
	closed  bool
	running sync.WaitGroup // loads being read
}

// load is one collective load. It belongs to no rank: if one rank leaves, the
// others still get their answers.
type load struct {
	n        int // of the attempt, from 1
	of       loadOf
	ranks    []int         // participants, ascending
	complete chan struct{} // closed when every rank has asked, or one refuses to
	done     chan struct{} // closed when answers is set

	// Guarded by the loader's lock.
	asked   map[int]client.LoadRequest // unchanged once complete is closed
	over    error                      // set before complete is closed
	waiting map[int]bool               // ranks that wait for an answer
	cancel  context.CancelFunc         // ends the reading; nil before it begins
	answers []answer                   // by rank
}

// loadRanks is a rank and the ranks with which it loads. loadOf is the n-th load
// of such ranks.
type (
	loadRanks struct {
		rank int
		with string
	}
	loadOf struct {
		with string
		n    int
	}
)

// answer is a rank's result. The loader owns its arena and slots until the rank
// has received them.
type answer struct {
	reply   client.LoadReply
	arena   *staging.Arena // nil: nothing was read for the rank
	slots   []*staging.Arena
	verdict *verdict // of ranks that verify; nil: no rank does
	by      loan     // identifies them when they are given back
	err     error
}

// loan identifies memory that a rank gives back.
type loan struct{ rank, load int }

// New returns the loader of an attempt.
func New(cfg Config) *Loader {
	return &Loader{cfg: cfg, counts: map[loadRanks]int{}, loads: map[loadOf]*load{}, lent: map[loan]*answer{}, gone: map[int]error{}}
}

// join adds rank's request to its next load with ranks. The last request starts
// the reading. A rank that cannot load ends the load for all ranks, including
// those that join later.
func (l *Loader) join(rank int, ranks []int, req client.LoadRequest) (*load, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	of := loadOf{with: fmt.Sprint(ranks)}
	l.counts[loadRanks{rank, of.with}]++
	of.n = l.counts[loadRanks{rank, of.with}]
	ld := l.loads[of]
	if ld == nil && l.over != nil {
		return nil, &ConflictError{l.over}
	}
	if ld == nil {
		l.made++
		ld = &load{
			n: l.made, of: of, ranks: ranks, complete: make(chan struct{}), done: make(chan struct{}),
			asked: map[int]client.LoadRequest{}, waiting: map[int]bool{},
		}
		l.loads[of] = ld
	}
	ld.asked[rank], ld.waiting[rank] = req, true
	if req.Refused != "" && ld.over == nil {
		ld.over = fmt.Errorf("load %d is a collective, and rank %d cannot take part in it: %s", ld.n, rank, req.Refused)
		close(ld.complete)
	}
	switch {
	case len(ld.asked) < len(ranks):
	case ld.over != nil:
		delete(l.loads, of)
	default:
		if l.closed {
			ld.over = errors.New("the attempt is over")
			close(ld.complete)
			return ld, nil
		}
		close(ld.complete)
		var ctx context.Context
		ctx, ld.cancel = context.WithCancel(l.cfg.Work)
		l.running.Go(func() { l.finish(ld, l.run(ctx, ld)) })
	}
	return ld, nil
}

// finish publishes the answers. Arenas of ranks that have left meanwhile are
// dropped, now that no process writes to them.
func (l *Loader) finish(ld *load, answers []answer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ld.cancel()
	ld.answers = answers
	for rank := range answers {
		if !ld.waiting[rank] {
			l.refuse(ld, rank)
		}
	}
	for v := range l.verdicts() {
		for rank, why := range l.gone {
			if rank == All || v.missing[rank] {
				l.giveUp(v, why)
			}
		}
	}
	close(ld.done)
	l.forget(ld)
}

// refuse drops the data of a rank that does not take it. The caller holds the
// lock.
func (l *Loader) refuse(ld *load, rank int) {
	of := &ld.answers[rank]
	l.undo(of)
	if v := of.verdict; v != nil && v.missing[rank] {
		l.giveUp(v, fmt.Errorf("rank %d has left", rank))
	}
}

// undo takes back memory that no worker may read any more.
func (l *Loader) undo(of *answer) {
	if of.arena != nil {
		_ = l.cfg.Arenas.Drop(of.arena) // a file that cannot be removed stays until the job ends
	}
	if len(of.slots) > 0 {
		l.cfg.Arenas.Release(of.slots)
	}
	of.arena, of.slots = nil, nil
}

// forget drops a load once every rank has had its answer. The caller holds the
// lock.
func (l *Loader) forget(ld *load) {
	if ld.answers != nil && len(ld.waiting) == 0 {
		delete(l.loads, ld.of)
	}
}

// take returns a rank's answer and marks the arena in it as lent.
func (l *Loader) take(ld *load, rank int) (client.LoadReply, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(ld.waiting, rank)
	defer l.forget(ld)
	got := &ld.answers[rank]
	if l.closed && got.err == nil {
		l.undo(got)
		return client.LoadReply{}, &ConflictError{errors.New("the attempt is over")}
	}
	if got.err == nil {
		lent := *got
		l.lent[got.by] = &lent
		got.arena, got.slots = nil, nil
	}
	return got.reply, got.err
}

// leave removes a rank from those that wait for a load. The reading continues for
// the others, and stops when no rank waits.
func (l *Loader) leave(ld *load, rank int) {
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

// All stands for all ranks.
const All = -1

// End releases the ranks that wait for a rank whose process has ended.
func (l *Loader) End(rank int, why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = why
	l.gone[rank] = why
	for v := range l.verdicts() {
		if rank == All || v.missing[rank] {
			l.giveUp(v, why)
		}
	}
	for _, ld := range l.loads {
		if len(ld.asked) < len(ld.ranks) && ld.over == nil {
			ld.over = why
			close(ld.complete)
		}
	}
}

// verdicts returns the verdicts that a rank may still wait for. The caller holds
// the lock.
func (l *Loader) verdicts() map[*verdict]bool {
	out := map[*verdict]bool{}
	for _, lent := range l.lent {
		out[lent.verdict] = true
	}
	for _, ld := range l.loads {
		for _, of := range ld.answers {
			out[of.verdict] = true
		}
	}
	delete(out, nil)
	return out
}

// absent lists the ranks that have not joined a load.
func (l *Loader) absent(ld *load) []int {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ranks []int
	for _, rank := range ld.ranks {
		if _, ok := ld.asked[rank]; !ok {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

// Close stops the reading and takes back memory that workers have not given back.
// If the reading does not end within limit, it returns false and leaves the
// memory in place, since a reader that wakes up later writes to it.
func (l *Loader) Close(limit time.Duration) bool {
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
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, ld := range l.loads {
		for rank := range ld.answers {
			l.refuse(ld, rank)
		}
	}
	for by, lent := range l.lent {
		delete(l.lent, by)
		l.undo(lent)
		if lent.verdict != nil {
			l.giveUp(lent.verdict, errors.New("the attempt is over"))
		}
	}
	return true
}
