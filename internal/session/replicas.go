package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/replica"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
)

// Replicas describes the copies of sealed slots in the memory of other nodes, in one attempt. A
// save that all ranks have sealed is committed although a node is lost: a node that keeps its
// slots writes them.
type Replicas struct {
	To   []replica.Partner // get the slots of this node
	From []int             // ranks of other nodes, whose slots this node keeps
	// Ahead is whether slots that this node lacks are fetched before its ranks ask: each rank needs its
	// own part of the checkpoint to resume from.
	Ahead bool
	// At has for each node the nodes that keep its slots. Order passes an order to the
	// process of another node, and must not block: that process calls [Group.Adopt]. Only the
	// coordinating process has them.
	At    [][]int
	Order func(node int, a Adoption)
}

// from returns the ranks whose slots this node keeps.
func (r *Replicas) from() []int {
	if r == nil {
		return nil
	}
	return r.From
}

// Adoption is the order to write the parts of a save that a lost node had sealed.
type Adoption struct {
	Checkpoint string        `json:"checkpoint"`
	Parts      []AdoptedPart `json:"parts"`
	Why        string        `json:"why"` // the node is lost
	// Within is the time in which the order is valid: another node is asked after it, and two writers of
	// the same files would hinder each other. 0: as long as the save is open.
	Within time.Duration `json:"within,omitempty"`

	came time.Time
}

// AdoptedPart is one rank's part of a save.
type AdoptedPart struct {
	Rank        int               `json:"rank"`
	Fingerprint checkpoint.Digest `json:"fingerprint"` // of the rank's plan, as the log has it
}

// AdoptionReply is the answer of a node to an [Adoption]. A node whose write fails later answers again.
type AdoptionReply struct {
	Checkpoint string `json:"checkpoint"`
	Writes     []int  `json:"writes,omitempty"`  // ranks whose parts it writes
	Without    []int  `json:"without,omitempty"` // ranks whose parts it does not write
	Why        string `json:"why,omitempty"`     // it does not write those
}

// replicate starts to copy the sealed slots of this node's ranks, and to keep those of another
// node's.
func (g *Group) replicate(work context.Context, keeper *replica.Keeper) {
	of := g.Replicas
	if of == nil || keeper == nil && !g.cfg.Aside {
		return
	}
	if keeper != nil {
		keeper.Keep(g.Number, of.From)
	}
	g.saver.replicas = &replicas{
		Replicas: of, node: g.cfg.Node, index: g.index, keeper: keeper, adopted: map[rankSave]bool{}, held: map[rankSave]heldReplica{},
		searches: map[rankSave]*search{}, lost: map[int]bool{}, whole: map[rankSave]map[int]bool{}, limit: g.cfg.DrainTimeout,
	}
	rate := g.cfg.ReplicaRate
	if rate > 0 && len(of.To) > 1 {
		rate = max(1, rate/int64(len(of.To))) // the bound is that of the node
	}
	for _, to := range of.To {
		g.senders = append(g.senders, replica.NewSender(work, g.Number, to, rate, func(ctx context.Context, w replica.Whole) { g.replicated(ctx, to.Index, w) }, g.log))
	}
}

// stopSending stops the copies of this node's slots.
func (g *Group) stopSending() {
	for _, s := range g.senders {
		s.Stop()
	}
}

// replicated records that another node has all slots that this node's ranks have sealed for a
// save.
func (g *Group) replicated(ctx context.Context, node int, w replica.Whole) {
	err := g.decisions.record(ctx, &events.ReplicaNode{
		Attempt: g.Number, Checkpoint: w.Checkpoint, Ranks: events.RankRuns(w.Ranks), Node: node, Bytes: w.Bytes, Seconds: w.Took.Seconds(),
	})
	if err != nil && ctx.Err() == nil {
		g.log.Warn("replica not recorded", "checkpoint", w.Checkpoint, "error", err)
	}
}

// Adopt takes the order of the coordinating process to write a lost node's part of a save.
func (g *Group) Adopt(a Adoption) {
	a.came = g.saver.now()
	g.saver.feed.put(fed{adopt: &a})
}

// Adopted takes the answer of the node at a place to an order to write a lost node's part of a save.
func (g *Group) Adopted(place int, a AdoptionReply) { g.saver.replies.put(adoptionReply{a, place}) }

// Fence ends the writes of this process, if another node may write in its place: the
// coordinating process counts this node as lost soon. It reports whether it did.
func (g *Group) Fence() bool {
	s := g.saver
	if s.replicas == nil || len(s.replicas.To) == 0 {
		return false
	}
	g.stopSending() // first: the partners get no slot of a save whose writes end here
	s.fenced.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, w := range s.underWay {
		w.stop()
		delete(s.underWay, id)
	}
	return true
}

// replicas is a saver's view of the replicas of an attempt. A nil one has none.
type replicas struct {
	*Replicas
	node   int                 // this node
	index  func(place int) int // of the node at a place
	keeper *replica.Keeper

	mu      sync.Mutex
	adopted map[rankSave]bool         // that this process writes
	held    map[rankSave]heldReplica  // until they are written
	whole   map[rankSave]map[int]bool // indexes of the nodes that have a part of an open save, as the log has them
	// Of the coordinating process, only the goroutine of run uses these: who writes the parts of lost
	// nodes, and the places of the lost nodes.
	searches map[rankSave]*search
	lost     map[int]bool
	limit    time.Duration // for all partners of a node together to answer
}

// search finds a node that writes a part of a lost node. The partners of the lost node are asked one after
// the other. A node that has not answered in time may still write, and is not asked again.
type search struct {
	from  int            // place of the lost node
	why   string         // it is lost
	by    int            // place of the node that was asked last
	until time.Time      // when the next one is asked although by has not answered; zero: never
	asked map[int]string // by place: why a node that was asked does not write; empty: it may
}

// adoptionReply is the reply of the node at a place.
type adoptionReply struct {
	AdoptionReply
	place int
}

// copied notes a copy of a node's slots.
func (r *replicas) copied(b *events.ReplicaNode) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rank := range events.RanksIn(b.Ranks) {
		of := rankSave{b.Checkpoint, rank}
		if r.whole[of] == nil {
			r.whole[of] = map[int]bool{}
		}
		r.whole[of][b.Node] = true
	}
}

// heirs returns the places of the nodes that can write a part of a lost node, in the order in which they are
// asked: those that live and were not asked. Those whose copies are in the log come first, then the other partners:
// the fact of a copy may be lost with the node. A coordinator that took over may pair the nodes in another way than
// the one before, and then the log alone has the partners.
func (r *replicas) heirs(of rankSave, l *search) (heirs []int) {
	if l.from >= len(r.At) {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for at := range r.At {
		_, again := l.asked[at]
		if at != l.from && !again && !r.lost[at] && (r.whole[of][r.index(at)] || slices.Contains(r.At[l.from], at)) {
			heirs = append(heirs, at)
		}
	}
	slices.SortStableFunc(heirs, func(a, b int) int { // as they are paired
		return cmp.Compare(uint(slices.Index(r.At[l.from], a)), uint(slices.Index(r.At[l.from], b)))
	})
	slices.SortStableFunc(heirs, func(a, b int) int {
		whole := func(at int) int {
			if r.whole[of][r.index(at)] {
				return 0
			}
			return 1
		}
		return cmp.Compare(whole(a), whole(b))
	})
	return heirs
}

// pending reports whether a node that was asked may write a part.
func (r *replicas) pending(l *search) bool {
	for at, why := range l.asked {
		if why == "" && !r.lost[at] {
			return true
		}
	}
	return false
}

// writes reports whether this process writes a part of a save from a replica.
func (r *replicas) writes(checkpoint string, rank int) bool {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.adopted[rankSave{checkpoint, rank}]
}

// heldReplica is a replica that stays until release.
type heldReplica struct {
	*staging.Replica
	release func()
}

// hold keeps the replica of a lost rank's part of a save until it is written or the save ends. It reports
// false for a part that this process writes already: a coordinator that took over gives the order again.
func (r *replicas) hold(attempt int, checkpoint string, of AdoptedPart) (begin bool, err error) {
	if r == nil {
		return false, errors.New("this node keeps no replicas")
	}
	part := rankSave{checkpoint, of.Rank}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.adopted[part] {
		return false, nil
	}
	found, release, err := r.keeper.Hold(checkpoint, of.Rank)
	if err != nil {
		return false, err
	}
	if found.Attempt != attempt || found.Fingerprint != of.Fingerprint {
		release()
		return false, fmt.Errorf("the replica of rank %d for %s has another plan", of.Rank, checkpoint)
	}
	r.adopted[part], r.held[part] = true, heldReplica{found, release}
	return true, nil
}

// forgo ends the write of a part that failed.
func (r *replicas) forgo(of rankSave) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if held, ok := r.held[of]; ok {
		held.release()
	}
	delete(r.held, of)
	delete(r.adopted, of)
}

// take returns a replica that was held, once. The caller releases it.
func (r *replicas) take(of rankSave) (held heldReplica, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	held, ok = r.held[of]
	delete(r.held, of)
	return held, ok
}

// letGo releases the replicas that were held for a save, or for all of them.
func (r *replicas) letGo(checkpoint string) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for of, held := range r.held {
		if checkpoint == "" || of.checkpoint == checkpoint {
			held.release()
			delete(r.held, of)
			delete(r.adopted, of)
		}
	}
	maps.DeleteFunc(r.whole, func(of rankSave, _ map[int]bool) bool { return checkpoint == "" || of.checkpoint == checkpoint })
}

// loss is the end of a node whose slots were copied.
type loss struct {
	node  int
	ranks []int
	why   error
	upTo  uint64 // the trial's last event by then
}

// inbox has what the saver has not seen, such as losses of nodes.
type inbox[T any] struct {
	mu    sync.Mutex
	queue []T
	came  chan struct{} // has a value if the queue has
}

func newInbox[T any]() *inbox[T] { return &inbox[T]{came: make(chan struct{}, 1)} }

func (i *inbox[T]) put(of T) {
	i.mu.Lock()
	i.queue = append(i.queue, of)
	i.mu.Unlock()
	select {
	case i.came <- struct{}{}:
	default:
	}
}

func (i *inbox[T]) take() []T {
	i.mu.Lock()
	defer i.mu.Unlock()
	of := i.queue
	i.queue = nil
	return of
}

// loseNode is [saver.lose] for a node whose slots were copied. It does not wait for the saver,
// which decides when it has read all events of the node: a seal among them makes a difference.
func (s *saver) loseNode(ctx context.Context, node int, ranks []int, why error) error {
	end, err := s.store.Log.LastOf(ctx, s.decisions.agg)
	if err != nil {
		return err
	}
	s.losses.put(loss{node, ranks, why, end}) // without effect once no save is open
	return nil
}

// adoptFrom orders the writes of what a lost node has sealed and not written, also what it was to write
// for another lost node, and fails its other parts of open saves.
func (s *saver) adoptFrom(ctx context.Context, l loss) error {
	r := s.replicas
	r.lost[l.node] = true
	var failed, ask []rankSave
	for of, search := range r.searches {
		if _, asked := search.asked[l.node]; asked && (search.by == l.node || !r.pending(search)) {
			ask = append(ask, of)
		}
	}
	for _, of := range s.losing(l.ranks, l.why) {
		if r.searches[of] != nil {
			continue
		}
		search := &search{from: l.node, by: -1, why: l.why.Error(), asked: map[int]string{}}
		if _, sealed := s.coord.Sealed(of.checkpoint, of.rank); !sealed || s.whole(of.checkpoint) != nil || len(r.heirs(of, search)) == 0 {
			failed = append(failed, of)
			continue
		}
		r.searches[of] = search
		ask = append(ask, of)
	}
	err := s.fail(ctx, failed)
	return errors.Join(err, s.askHeirs(ctx, ask))
}

// askHeirs orders the next partner to write each part of a lost node. It aborts the save of a part that no
// partner can write.
func (s *saver) askHeirs(ctx context.Context, parts []rankSave) error {
	type orders struct {
		checkpoint string
		by         int
	}
	r := s.replicas
	given, without := map[orders]*Adoption{}, map[string][]int{}
	for _, of := range parts {
		search := r.searches[of]
		fingerprint, sealed := s.coord.Sealed(of.checkpoint, of.rank)
		if !sealed { // it is written, or its save is over
			delete(r.searches, of)
			continue
		}
		search.until = time.Time{}
		heirs := r.heirs(of, search)
		if len(heirs) == 0 {
			if !r.pending(search) {
				without[of.checkpoint] = append(without[of.checkpoint], of.rank)
			}
			continue
		}
		by := heirs[0]
		if search.by, search.asked[by] = by, ""; len(heirs) > 1 {
			left := r.limit
			if end := s.coord.Deadline(of.checkpoint); !end.IsZero() {
				left = min(left, end.Sub(s.now()))
			}
			search.until = s.now().Add(left / time.Duration(len(heirs)))
		}
		a := given[orders{of.checkpoint, by}]
		if a == nil {
			a = &Adoption{Checkpoint: of.checkpoint, Why: search.why}
			given[orders{of.checkpoint, by}] = a
		}
		if within := search.until.Sub(s.now()); !search.until.IsZero() && (a.Within == 0 || within < a.Within) {
			a.Within = within
		}
		a.Parts = append(a.Parts, AdoptedPart{of.rank, fingerprint})
	}
	first := func(a, b orders) int {
		return cmp.Or(cmp.Compare(a.checkpoint, b.checkpoint), cmp.Compare(a.by, b.by))
	}
	for _, to := range slices.SortedFunc(maps.Keys(given), first) {
		a := *given[to]
		slices.SortFunc(a.Parts, func(a, b AdoptedPart) int { return cmp.Compare(a.Rank, b.Rank) })
		s.log.Info("node asked for the sealed bytes of a lost node", "node", r.index(to.by), "checkpoint", a.Checkpoint, "ranks", len(a.Parts))
		if to.by == r.node {
			s.adopt(a)
		} else {
			r.Order(to.by, a)
		}
	}
	var err error
	for _, id := range slices.Sorted(maps.Keys(without)) {
		ranks := slices.Sorted(slices.Values(without[id]))
		err = errors.Join(err, s.abort(ctx, s.decisions.attempt, id, r.unwritten(r.searches[rankSave{id, ranks[0]}]), ranks...))
	}
	return err
}

// unwritten returns why no partner of a lost node writes a part of it.
func (r *replicas) unwritten(l *search) string {
	var each []string
	for _, at := range slices.Sorted(maps.Keys(l.asked)) {
		if why := l.asked[at]; why != "" {
			each = append(each, fmt.Sprintf("node %d: %s", r.index(at), why))
		}
	}
	reason := l.why + "; no other node has a whole replica of its slots"
	if len(each) > 0 {
		reason += ": " + strings.Join(each, "; ")
	}
	return reason
}

// askLate asks the next partner where a node has not answered in time. It returns when that is the case next; zero: never.
func (s *saver) askLate(ctx context.Context) (next time.Time, err error) {
	if s.replicas == nil {
		return next, nil
	}
	var late []rankSave
	now := s.now()
	for of, search := range s.replicas.searches {
		if !search.until.IsZero() && !now.Before(search.until) {
			late = append(late, of)
		}
	}
	err = s.askHeirs(ctx, late)
	for _, search := range s.replicas.searches {
		if at := search.until; !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next, err
}

// heedReply takes the answer of a node that was asked: the next partner is asked for what it does not write.
func (s *saver) heedReply(ctx context.Context, a adoptionReply) error {
	if s.replicas == nil {
		return nil
	}
	var ask []rankSave
	of := func(rank int) (rankSave, *search) {
		part := rankSave{a.Checkpoint, rank}
		search := s.replicas.searches[part]
		if search != nil {
			if _, asked := search.asked[a.place]; asked {
				return part, search
			}
		}
		return part, nil
	}
	for _, rank := range a.Writes {
		if _, search := of(rank); search != nil {
			search.by, search.until = a.place, time.Time{} // also if the next one was asked
		}
	}
	for _, rank := range a.Without {
		part, search := of(rank)
		if search == nil {
			continue
		}
		if search.asked[a.place] = cmp.Or(a.Why, "it does not write"); search.by == a.place || !s.replicas.pending(search) {
			ask = append(ask, part)
		}
	}
	return s.askHeirs(ctx, ask)
}

// reply answers an order of the coordinating process, which may be this one.
func (s *saver) reply(a AdoptionReply) {
	if s.peer != nil {
		s.peer.Adopted(a)
		return
	}
	s.replies.put(adoptionReply{a, s.replicas.node})
}

// errLate is the answer to an order that was not obeyed in its time.
var errLate = errors.New("the order was not obeyed in its time, and another node has it")

// adopt begins to write the parts of a save that a lost node had sealed, from the replicas of
// this node. Another node is asked for those without a replica.
func (s *saver) adopt(a Adoption) {
	if order(s.state(a.Checkpoint, -1).State) >= order(client.Committed) {
		return
	}
	reply := AdoptionReply{Checkpoint: a.Checkpoint}
	var begun []int
	late := a.Within > 0 && !a.came.IsZero() && s.now().Sub(a.came) >= a.Within
	for _, p := range a.Parts {
		begin, err := false, errLate
		if !late || s.replicas.writes(a.Checkpoint, p.Rank) {
			begin, err = s.replicas.hold(s.decisions.attempt, a.Checkpoint, p)
		}
		if err != nil {
			s.log.Debug("no replica to write", "checkpoint", a.Checkpoint, "rank", p.Rank, "error", err)
			reply.Without, reply.Why = append(reply.Without, p.Rank), err.Error()
			continue
		}
		if reply.Writes = append(reply.Writes, p.Rank); begin {
			begun = append(begun, p.Rank)
		}
	}
	s.reply(reply)
	if len(begun) == 0 {
		return
	}
	s.log.Warn("writing the sealed bytes of a lost node from their replicas", "checkpoint", a.Checkpoint, "ranks", begun, "because", a.Why)
	for _, rank := range begun {
		s.coord.Adopt(a.Checkpoint, rank)
	}
}

// writeReplica makes the bytes of one rank of a lost node durable.
func (s *saver) writeReplica(ctx context.Context, c planner.Write) (data.Written, error) {
	r, ok := s.replicas.take(rankSave{c.Checkpoint, c.Rank})
	if !ok {
		return data.Written{}, fmt.Errorf("the replica of rank %d for %s is gone", c.Rank, c.Checkpoint)
	}
	defer r.release()
	if err := r.Verify(); err != nil {
		return data.Written{}, fmt.Errorf("the replica of rank %d for %s has changed in memory: %w", c.Rank, c.Checkpoint, err)
	}
	src, err := r.Source(c.Items)
	if err != nil {
		return data.Written{}, err
	}
	// It reuses no file: the lost node may have decided otherwise with its other ranks.
	w := s.writer(s.store.Data.Writer(s.ref(c.Checkpoint)).Resuming(uploadsOf{s, c.Checkpoint}))
	if err := w.SetUp(ctx, c.Rank == 0); err != nil {
		return data.Written{}, err
	}
	return w.WriteData(ctx, c.Rank, c.Items, src)
}
