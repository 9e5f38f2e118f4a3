package session

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/heirs"
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
	Order func(node int, o heirs.Order)
}

// from returns the ranks whose slots this node keeps.
func (r *Replicas) from() []int {
	if r == nil {
		return nil
	}
	return r.From
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
	s := g.saver
	s.replicas, s.held, s.place = of, replica.NewHeld(keeper), g.cfg.Node
	if of.At != nil {
		s.heirs = heirs.NewFinder(heirs.Config{Partners: of.At, Index: g.index, Limit: g.cfg.DrainTimeout, Saves: s.coord, Now: s.now})
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
func (g *Group) Adopt(o heirs.Order) { g.saver.feed.put(fed{adopt: &adoption{o, g.saver.now()}}) }

// Adopted takes the answer of the node at a place to an order to write a lost node's part of a save.
func (g *Group) Adopted(place int, r heirs.Reply) { g.saver.replies.put(placedReply{r, place}) }

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

// adoption is an order, and when it came.
type adoption struct {
	heirs.Order
	came time.Time
}

// placedReply is the reply of the node at a place.
type placedReply struct {
	heirs.Reply
	place int
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
	open := s.losing(l.ranks, l.why)
	if s.heirs == nil {
		return s.fail(ctx, open)
	}
	parts := make([]heirs.Part, len(open))
	for i, of := range open {
		parts[i] = heirs.Part{Checkpoint: of.checkpoint, Rank: of.rank}
	}
	step, without := s.heirs.Lose(l.node, l.why, parts, func(checkpoint string) bool { return s.whole(checkpoint) != nil })
	failed := make([]rankSave, len(without))
	for i, of := range without {
		failed[i] = rankSave{of.Checkpoint, of.Rank}
	}
	err := s.carryOut(ctx, step) // first: the nodes have a time
	return errors.Join(err, s.fail(ctx, failed))
}

// carryOut passes on the orders of a step, and aborts the saves of parts that no partner can write.
func (s *saver) carryOut(ctx context.Context, step heirs.Step) (err error) {
	for _, o := range step.Orders {
		s.log.Info("node asked for the sealed bytes of a lost node", "node", o.Node, "checkpoint", o.Checkpoint, "ranks", len(o.Parts))
		if o.To == s.place {
			s.adopt(adoption{o.Order, s.now()})
		} else {
			s.replicas.Order(o.To, o.Order)
		}
	}
	for _, of := range step.Without {
		err = errors.Join(err, s.abort(ctx, s.decisions.attempt, of.Checkpoint, of.Why, of.Ranks...))
	}
	return err
}

// askLate asks the next partner where a node has not answered in time. It returns when that is the case next; zero: never.
func (s *saver) askLate(ctx context.Context) (next time.Time, err error) {
	step, next := s.heirs.Late()
	return next, s.carryOut(ctx, step)
}

// heedReply takes the answer of a node that was asked.
func (s *saver) heedReply(ctx context.Context, r placedReply) error {
	if s.heirs == nil {
		return nil
	}
	return s.carryOut(ctx, s.heirs.Heed(r.place, r.Reply))
}

// reply answers an order of the coordinating process, which may be this one.
func (s *saver) reply(r heirs.Reply) {
	if s.peer != nil {
		s.peer.Adopted(r)
		return
	}
	s.replies.put(placedReply{r, s.place})
}

// errLate is the answer to an order that was not obeyed in its time.
var errLate = errors.New("the order was not obeyed in its time, and another node has it")

// adopt begins to write the parts of a save that a lost node had sealed, from the replicas of
// this node. Another node is asked for those without a replica.
func (s *saver) adopt(a adoption) {
	if order(s.state(a.Checkpoint, -1).State) >= order(client.Committed) {
		return
	}
	reply := heirs.Reply{Checkpoint: a.Checkpoint}
	var begun []int
	late := a.Within > 0 && s.now().Sub(a.came) >= a.Within
	for _, p := range a.Parts {
		begin, err := false, errLate
		if !late || s.held.Writes(a.Checkpoint, p.Rank) {
			begin, err = s.held.Hold(staging.Part{Attempt: s.decisions.attempt, Rank: p.Rank, Fingerprint: p.Fingerprint, Checkpoint: a.Checkpoint})
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
	r, release, err := s.held.Take(c.Checkpoint, c.Rank)
	if err != nil {
		return data.Written{}, err
	}
	defer release()
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
