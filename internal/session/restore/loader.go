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
// default of all, is resolved once, when each of them has asked for it; so no two
// can restore different checkpoints, whatever is committed in between. It is also
// read once: what several ranks want is copied to all of them out of one buffer.
// All methods but Prove may be called concurrently.
type Loader struct {
	cfg   Config
	proof *proof // set before the first load, or nil

	mu      sync.Mutex
	counts  map[loadRanks]int // loads a rank has asked for, with the same others
	loads   map[loadOf]*load
	made    int
	lent    map[loan]*answer // what workers copy from
	over    error            // why no load can be complete any more
	gone    map[int]error    // ranks that have ended, and how
	closed  bool
	running sync.WaitGroup // loads that are being read
}

// load is one collective load. It belongs to no rank: when one goes away, the
// others get their answers all the same.
type load struct {
	n        int // of the attempt, from 1
	of       loadOf
	ranks    []int         // that take part, ascending
	complete chan struct{} // closed when every rank has asked, or one will not
	done     chan struct{} // closed when answers are there

	// Under the lock of the loader.
	asked   map[int]client.LoadRequest // unchanged from complete on
	slots   map[int]bool               // ranks that can read staging slots; so too
	over    error                      // set before complete is closed
	waiting map[int]bool               // ranks that want an answer
	cancel  context.CancelFunc         // ends the reading; nil before it begins
	answers []answer                   // by rank
}

// loadRanks is a rank and those with which it loads; loadOf is the n-th load of such
// ranks.
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

// answer is what a rank gets. Its arena and slots are the loader's until the
// rank has been told of them.
type answer struct {
	reply   any
	arena   *staging.Arena // nil: nothing was read for it
	slots   []*staging.Arena
	verdict *verdict // of ranks that verify; nil: none does
	by      loan     // what gives them back
	err     error
}

// loan is how a rank names what it gives back: by the number of the load or, in
// versions 1 and 2 of the protocol, by the path of the arena.
type loan struct {
	rank, load int
	path       string
}

// New makes the loader of an attempt.
func New(cfg Config) *Loader {
	return &Loader{cfg: cfg, counts: map[loadRanks]int{}, loads: map[loadOf]*load{}, lent: map[loan]*answer{}, gone: map[int]error{}}
}

// join adds rank's request to the next load of the rank with the ranks that take
// part, and whether the rank can read staging slots. The last one starts the reading.
// One that cannot load ends the load for all, also for those that come later.
func (l *Loader) join(rank int, ranks []int, req client.LoadRequest, slots bool) (*load, error) {
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
			asked: map[int]client.LoadRequest{}, slots: map[int]bool{}, waiting: map[int]bool{},
		}
		l.loads[of] = ld
	}
	ld.asked[rank], ld.slots[rank], ld.waiting[rank] = req, slots, true
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

// finish has the answers ready. Arenas of ranks that have gone away meanwhile
// are dropped now that nobody writes to them.
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

// refuse drops what was read for a rank that does not take it. The caller
// holds the lock.
func (l *Loader) refuse(ld *load, rank int) {
	of := &ld.answers[rank]
	l.undo(of)
	if v := of.verdict; v != nil && v.missing[rank] {
		l.giveUp(v, fmt.Errorf("rank %d has gone", rank))
	}
}

// undo takes back what no worker is to read any more.
func (l *Loader) undo(of *answer) {
	if of.arena != nil {
		_ = l.cfg.Arenas.Drop(of.arena) // what cannot be removed stays until the job ends
	}
	if len(of.slots) > 0 {
		l.cfg.Arenas.Release(of.slots)
	}
	of.arena, of.slots = nil, nil
}

// forget drops a load of which every rank has had its answer. The caller holds
// the lock.
func (l *Loader) forget(ld *load) {
	if ld.answers != nil && len(ld.waiting) == 0 {
		delete(l.loads, ld.of)
	}
}

// take gives a rank its answer, and lends it the arena that is named in it.
func (l *Loader) take(ld *load, rank int) (any, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(ld.waiting, rank)
	defer l.forget(ld)
	got := &ld.answers[rank]
	if l.closed && got.err == nil {
		l.undo(got)
		return nil, &ConflictError{errors.New("the attempt is over")}
	}
	if got.err == nil {
		lent := *got
		l.lent[got.by] = &lent
		got.arena, got.slots = nil, nil
	}
	return got.reply, got.err
}

// leave says that a rank does not wait any more. The reading goes on for the
// others, and ends when there is nobody to read for.
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

// End releases the ranks that wait for one whose process has ended.
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

// verdicts are those that some rank may still wait for. The caller holds the lock.
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

// Close ends what is being read, and takes back what workers have not given
// back. When the reading does not end in time, they stay, since a reader that
// wakes up later writes to them: it returns false.
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
