package collective

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
)

// OpAllGather is the op of a gather: all ranks' bytes are equally long.
const OpAllGather = "all_gather"

const broadcastPrefix = "broadcast "

// OpBroadcast returns the op of a broadcast of size bytes from root. Only the
// root's bytes matter; the other ranks pass nil.
func OpBroadcast(root, size int) string {
	return fmt.Sprintf("%sroot=%d size=%d", broadcastPrefix, root, size)
}

// ErrClosed ends calls after [Hub.Close] without a reason.
var ErrClosed = errors.New("the group was closed")

// MissingError reports a collective that some ranks did not join in time.
type MissingError struct {
	Rank  int // the rank that waited
	Seq   uint64
	Op    string
	Ranks []int // missing ranks, ascending
	Err   error // why the wait ended: the cause of the context's end
}

// Error names the missing ranks.
func (e *MissingError) Error() string {
	return fmt.Sprintf("collective %d (%s): rank %d waited for %s, which did not join: look at the last output of %s: %v",
		e.Seq, e.Op, e.Rank, nameRanks(e.Ranks), nameRanks(e.Ranks), e.Err)
}

// Unwrap returns the cause of the context's end.
func (e *MissingError) Unwrap() error { return e.Err }

// Hub joins the calls of a group's ranks. It holds the open collective and the
// last ended one, with their bytes.
type Hub struct {
	world int

	mu     sync.Mutex
	open   *round // nil between collectives
	last   *round // the round that ended last; nil before
	closed error
	quit   chan struct{} // closed by Close
}

// round is one collective.
type round struct {
	seq   uint64
	ops   []string
	parts [][]byte
	here  []bool
	count int
	err   error
	done  chan struct{}
}

// NewHub returns a hub for world ranks. It panics if world < 1.
func NewHub(world int) *Hub {
	if world < 1 {
		panic(fmt.Sprintf("collective: hub for %d ranks", world))
	}
	return &Hub{world: world, quit: make(chan struct{})}
}

// Resume has the hub continue after collective seq, which ended in an earlier hub with these parts:
// a rank that has not got them gets them here. It is called before the first Exchange.
func (h *Hub) Resume(seq uint64, parts [][]byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last = &round{seq: seq, ops: make([]string, h.world), parts: parts, here: make([]bool, h.world), done: make(chan struct{})}
	close(h.last.done)
}

// Exchange joins rank to collective seq and waits until every rank has joined. It
// returns every rank's bytes in rank order; the slices are shared among the
// callers and must not be modified. own is copied.
//
// Each rank counts its collectives: seq grows from call to call, equally on all
// ranks. If ranks join one collective with different ops, gather different
// lengths, or join different collectives at once, all ranks get an error that
// names them, and that collective is over.
//
// A call that ends with ctx returns a [MissingError]; the rank stays joined. A
// rank may repeat its last call, with the same seq, op and bytes, as often as it
// likes, even while the first call still waits, and gets the same answer: so a
// broken connection loses nothing. Exchange is safe for concurrent use.
func (h *Hub) Exchange(ctx context.Context, rank int, seq uint64, op string, own []byte) ([][]byte, error) {
	if rank < 0 || rank >= h.world {
		return nil, fmt.Errorf("collective %d (%s): rank %d is not in 0..%d", seq, op, rank, h.world-1)
	}
	r, err := h.join(rank, seq, op, own)
	if err != nil {
		return nil, err
	}
	select {
	case <-r.done:
	case <-h.quit:
	case <-ctx.Done():
	}
	return h.answer(ctx, r, rank)
}

// Close ends all calls, waiting and later ones, with err, or [ErrClosed] if err
// is nil. Only the first call has an effect.
func (h *Hub) Close(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed != nil {
		return
	}
	if err == nil {
		err = ErrClosed
	}
	h.closed = err
	close(h.quit)
}

// join adds rank to its round, and ends the round when it is complete or wrong.
func (h *Hub) join(rank int, seq uint64, op string, own []byte) (*round, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed != nil {
		return nil, fmt.Errorf("collective %d (%s) of rank %d: %w", seq, op, rank, h.closed)
	}
	if h.last != nil && seq < h.last.seq {
		return nil, fmt.Errorf("collective %d (%s) of rank %d is over: the group is past %d", seq, op, rank, h.last.seq)
	}
	if h.last != nil && seq == h.last.seq {
		if !h.last.here[rank] {
			return h.last, nil // it ended with an error before this rank came
		}
		return h.last, h.last.repeat(rank, op, own)
	}
	if h.open == nil {
		h.open = &round{
			seq: seq, ops: make([]string, h.world), parts: make([][]byte, h.world),
			here: make([]bool, h.world), done: make(chan struct{}),
		}
	}
	r := h.open
	if r.seq != seq {
		err := fmt.Errorf("rank %d joins collective %d (%s), but collective %d is open with %s: the ranks are out of step and their group must start again", rank, seq, op, r.seq, nameRanks(r.joined(true)))
		h.end(err)
		return nil, err
	}
	if r.here[rank] {
		return r, r.repeat(rank, op, own)
	}
	r.here[rank], r.ops[rank], r.parts[rank] = true, op, bytes.Clone(own)
	if r.count++; r.count == h.world {
		h.end(r.disagreement())
	}
	return r, nil
}

// end closes the open round. The caller holds the lock.
func (h *Hub) end(err error) {
	r := h.open
	r.err = err
	if err != nil {
		r.parts = nil
	}
	h.last, h.open = r, nil
	close(r.done)
}

// answer returns rank's result when its wait for r is over. An existing answer
// takes precedence over a closed hub, and both over a context that has ended.
func (h *Hub) answer(ctx context.Context, r *round, rank int) ([][]byte, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r != h.open {
		return r.parts, r.err
	}
	if h.closed != nil {
		return nil, fmt.Errorf("collective %d (%s) of rank %d: %w", r.seq, r.ops[rank], rank, h.closed)
	}
	return nil, &MissingError{Rank: rank, Seq: r.seq, Op: r.ops[rank], Ranks: r.joined(false), Err: context.Cause(ctx)}
}

// repeat checks that a repeated call equals the rank's earlier call.
func (r *round) repeat(rank int, op string, own []byte) error {
	if r.ops[rank] != op || r.err == nil && !bytes.Equal(r.parts[rank], own) {
		return fmt.Errorf("collective %d (%s): rank %d repeats it with another op or other bytes than before (%s)", r.seq, op, rank, r.ops[rank])
	}
	return nil
}

// disagreement returns the error of a complete round whose ranks do not fit.
func (r *round) disagreement() error {
	same := func(describe func(rank int) string) error {
		var kinds []string
		ranks := map[string][]int{}
		for rank := range r.ops {
			kind := describe(rank)
			if ranks[kind] == nil {
				kinds = append(kinds, kind)
			}
			ranks[kind] = append(ranks[kind], rank)
		}
		if len(kinds) == 1 {
			return nil
		}
		for i, kind := range kinds {
			kinds[i] = kind + " by " + nameRanks(ranks[kind])
		}
		return fmt.Errorf("collective %d: the ranks do not call the same: %s", r.seq, strings.Join(kinds, ", "))
	}
	if err := same(func(rank int) string { return r.ops[rank] }); err != nil {
		return err
	}
	if strings.HasPrefix(r.ops[0], broadcastPrefix) {
		return nil
	}
	return same(func(rank int) string { return fmt.Sprintf("%s of %d bytes", r.ops[rank], len(r.parts[rank])) })
}

// joined returns the ranks that have joined, or those that have not.
func (r *round) joined(here bool) []int {
	var ranks []int
	for rank, is := range r.here {
		if is == here {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

// nameRanks returns "rank 3" or "ranks 0-2, 5"; ranks are ascending.
func nameRanks(ranks []int) string {
	if len(ranks) == 1 {
		return "rank " + strconv.Itoa(ranks[0])
	}
	var b strings.Builder
	b.WriteString("ranks ")
	for i := 0; i < len(ranks); {
		last := i
		for last+1 < len(ranks) && ranks[last+1] == ranks[last]+1 {
			last++
		}
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(strconv.Itoa(ranks[i]))
		if last > i {
			b.WriteString("-" + strconv.Itoa(ranks[last]))
		}
		i = last + 1
	}
	return b.String()
}
