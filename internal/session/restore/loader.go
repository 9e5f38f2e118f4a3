package restore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// Loader serves the loads of one attempt to the ranks on this node. The n-th load of
// the same ranks, by default all, is resolved once, when each of them has asked for
// it. So no two ranks can restore different checkpoints, even if one is committed in
// between. It is also read once: wants of several ranks are copied to all of them out
// of one buffer. All methods but Prove and FetchAhead may be called concurrently.
type Loader struct {
	cfg   Config
	proof *proof // set before the first load, or nil
	ahead *ahead // likewise

	mu      sync.Mutex
	counts  map[loadRanks]int // loads a rank has asked for, by its group of ranks
	loads   map[loadOf]*load
	made    int
	lent    map[loan]*answer // memory that workers copy from
	over    error            // why no further load can be complete
	alone   atomic.Bool      // another node did not pass blocks on: this one reads alone
	gone    map[int]error    // ranks that have ended, and why
	closed  bool
	running sync.WaitGroup // loads being resolved or read

	life context.Context // of calls to the coordinator: ends with Close
	end  context.CancelFunc
}

// load is one collective load. It belongs to no rank: if one rank leaves, the
// others still get their answers.
type load struct {
	n        int // of the attempt, from 1; a coordinator's is known once complete is closed
	of       loadOf
	ranks    []int         // participants, ascending
	local    []int         // those on this node
	complete chan struct{} // closed when every rank has asked, or one refuses to
	done     chan struct{} // closed when answers is set

	// Guarded by the loader's lock.
	asked   map[int]client.LoadRequest // of local ranks; unchanged once complete is closed
	over    error                      // set before complete is closed
	waiting map[int]bool               // ranks that wait for an answer
	more    context.CancelFunc         // makes the coordinator's caller look again; nil: none is running
	reply   ResolveReply               // of the coordinator, set before complete is closed
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
	l := &Loader{cfg: cfg, counts: map[loadRanks]int{}, loads: map[loadOf]*load{}, lent: map[loan]*answer{}, gone: map[int]error{}}
	if cfg.Coordinator != nil {
		l.life, l.end = context.WithCancel(cfg.Work)
	}
	return l
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
		ld = &load{
			of: of, ranks: ranks, local: l.local(ranks), complete: make(chan struct{}), done: make(chan struct{}),
			asked: map[int]client.LoadRequest{}, waiting: map[int]bool{},
		}
		if l.cfg.Coordinator == nil {
			l.made++
			ld.n = l.made
		}
		l.loads[of] = ld
	}
	ld.asked[rank], ld.waiting[rank] = req, true
	if l.cfg.Coordinator != nil {
		l.forward(ld)
		return ld, nil
	}
	if req.Refused != "" && ld.over == nil {
		ld.over = refusal(ld.n, rank, req.Refused)
		close(ld.complete)
	}
	switch {
	case len(ld.asked) < len(ranks):
	case ld.over != nil:
		delete(l.loads, of)
	default:
		if l.closed {
			ld.over = &ConflictError{errOver}
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

var errOver = errors.New("the attempt is over")

// refusal ends a load in which a rank cannot take part.
func refusal(n, rank int, why string) error {
	return &ConflictError{fmt.Errorf("load %d is a collective, and rank %d cannot take part in it: %s", n, rank, why)}
}

// local returns the ranks of this node among participants.
func (l *Loader) local(participants []int) []int {
	if l.cfg.Coordinator == nil {
		return participants
	}
	return slices.DeleteFunc(slices.Clone(participants), func(rank int) bool { return !slices.Contains(l.cfg.Local, rank) })
}

// asks returns the requests for a load in the order of their ranks.
func (ld *load) asks() []Ask {
	asks := make([]Ask, 0, len(ld.asked))
	for _, rank := range ld.local {
		if req, ok := ld.asked[rank]; ok {
			asks = append(asks, askOf(rank, req))
		}
	}
	return asks
}

// fqns returns the keys that ranks ask for.
func (ld *load) fqns() map[string]bool {
	keys := map[string]bool{}
	for _, req := range ld.asked {
		for _, it := range req.Items {
			keys[it.FQN] = true
		}
	}
	return keys
}

// Load joins the rank's next load with ranks, which are distinct and ascending,
// and returns the reply. It waits up to limit for the other ranks; a coordinator
// has a limit of its own.
func (l *Loader) Load(ctx context.Context, rank int, ranks []int, req client.LoadRequest, limit time.Duration) (client.LoadReply, error) {
	for _, it := range req.Items {
		if it.FQN == "" {
			return client.LoadReply{}, &MisuseError{errors.New("an item has no name")}
		}
	}
	ld, err := l.join(rank, ranks, req)
	if err != nil {
		return client.LoadReply{}, err
	}
	if err := l.gather(ctx, ld, rank, limit); err != nil {
		return client.LoadReply{}, err
	}
	select {
	case <-ld.done:
		return l.take(ld, rank)
	case <-ctx.Done():
		l.leave(ld, rank)
		return client.LoadReply{}, ctx.Err()
	}
}

// gather waits until every rank has asked for a load.
func (l *Loader) gather(ctx context.Context, ld *load, rank int, limit time.Duration) error {
	wait, cancel := ctx, func() {}
	if l.cfg.Coordinator == nil {
		wait, cancel = l.cfg.bounded(ctx, limit)
	}
	defer cancel()
	select {
	case <-ld.complete:
		return ld.over
	case <-wait.Done():
	}
	err := ctx.Err()
	if l.cfg.Coordinator == nil {
		err = uncalled(ld.n, l.absent(ld), wait.Err())
	}
	l.leave(ld, rank)
	return err
}

// uncalled ends the wait for ranks that have not asked for a load.
func uncalled(n int, absent []int, why error) error {
	return fmt.Errorf("load %d is a collective, and ranks %v have not called it: %w", n, absent, why)
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
		return client.LoadReply{}, &ConflictError{errOver}
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
	// The ranks of other nodes cannot have the load without this node.
	if len(ld.waiting) == 0 && ld.cancel != nil && len(ld.local) == len(ld.ranks) {
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
		if len(ld.asked) < len(ld.local) && ld.over == nil {
			ld.over = &ConflictError{why}
			close(ld.complete)
			if ld.more != nil {
				ld.more()
			}
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
	if l.end != nil {
		l.end()
	}
	if l.ahead != nil {
		l.ahead.end()
	}
	for _, ld := range l.loads {
		if ld.cancel != nil {
			ld.cancel()
		}
	}
	l.mu.Unlock()
	if !ended(&l.running, limit) {
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
			l.giveUp(lent.verdict, errOver)
		}
	}
	return true
}

// ended waits up to limit for running work, and reports whether it has ended.
func ended(running *sync.WaitGroup, limit time.Duration) bool {
	done := make(chan struct{})
	go func() {
		running.Wait()
		close(done)
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}
