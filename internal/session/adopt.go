package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/replica"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
)

// adopted holds the open saves of a dead trainer that this trainer finishes:
// every participant had sealed its slot. Slots are matched with the log by
// checkpoint, rank and the fingerprint of the rank's plan; the slot holds the
// plan in full.
type adopted struct {
	saves []string // IDs
	slots map[rankSave]*staging.Left
	plans []*events.LocalPlan // in full
	log   *slog.Logger
}

// adopt finds the saves of an attempt with a dead trainer that can be finished.
// It appends the plans and seals that the dead trainer had accepted but not yet
// appended.
func (j *Job) adopt(ctx context.Context, attempt, world int, from uint64) (*adopted, error) {
	a := &adopted{slots: map[rankSave]*staging.Left{}, log: j.log}
	if j.arenas == nil {
		return a, nil
	}
	for _, s := range j.arenas.Sealed(attempt, j.log) {
		a.slots[rankSave{s.Checkpoint, s.Rank}] = s
	}
	if len(a.slots) == 0 {
		return a, nil
	}
	found, err := j.leftOpen(ctx, attempt, from)
	if err != nil {
		a.close()
		return nil, err
	}
	for _, open := range found {
		if !open.matches(a, world) {
			continue
		}
		if err := j.recordLeft(ctx, a, open); err != nil {
			a.close()
			return nil, err
		}
		a.saves = append(a.saves, open.begun.Checkpoint)
		j.log.Warn("adopted staged save of a dead trainer", "checkpoint", open.begun.Checkpoint)
	}
	return a, nil
}

// openSave is the log's record of a save that has not ended.
type openSave struct {
	begun   *events.CheckpointBegun
	planned map[int]string // fingerprints of the ranks
	sealed  map[int]int64  // bytes
	written map[int]bool
}

// leftOpen reads the open saves of an attempt that have begun, in order.
func (j *Job) leftOpen(ctx context.Context, attempt int, from uint64) (open []*openSave, err error) {
	end, err := j.store.Log.Last(ctx)
	if err != nil {
		return nil, err
	}
	saves, sets := map[string]*openSave{}, map[string][]byte{} // the sets are fingerprints, by digest
	of := func(id string) *openSave {
		if saves[id] == nil {
			saves[id] = &openSave{planned: map[int]string{}, sealed: map[int]int64{}, written: map[int]bool{}}
		}
		return saves[id]
	}
	for r, err := range j.store.Log.ReadTrial(ctx, events.Aggregate{Run: j.cfg.Run, Trial: j.cfg.Trial}, from, end) {
		if err != nil {
			return nil, err
		}
		body, err := r.Body()
		if err != nil {
			return nil, err
		}
		switch b := body.(type) {
		case *events.LocalPlan:
			of(b.Checkpoint).planned[b.Rank] = b.Fingerprint
		case *events.NodePlan:
			all := b.Fingerprints
			if b.Digest == "" {
				sets[checkpoint.Sum(all).String()] = all
			} else if all = sets[b.Digest]; len(all) != len(events.RanksIn(b.Ranks))*len(checkpoint.Digest{}) {
				continue // as if these had no plan
			}
			for p := range b.Each(all) {
				of(p.Checkpoint).planned[p.Rank] = p.Fingerprint
			}
		case *events.CheckpointBegun:
			if b.Attempt == attempt {
				of(b.Checkpoint).begun = b
				open = append(open, of(b.Checkpoint))
			}
		case *events.WriteSealed:
			of(b.Checkpoint).sealed[b.Rank] = b.Bytes
		case *events.NodeSeal:
			for sealed := range b.Each() {
				of(b.Checkpoint).sealed[sealed.Rank] = sealed.Bytes
			}
		case *events.WriteCompleted:
			of(b.Checkpoint).written[b.Rank] = true
		case *events.NodeWrite:
			for _, rank := range events.RanksIn(b.Ranks) {
				of(b.Checkpoint).written[rank] = true
			}
		}
		if id := ends(body); id != "" {
			open = slices.DeleteFunc(open, func(o *openSave) bool { return o == saves[id] })
		}
	}
	return open, nil
}

// matches reports whether the bytes of all participants are available: in files,
// or in a slot that agrees with the plan and the seal in the log, if the log has
// them.
func (o *openSave) matches(a *adopted, world int) bool {
	participants := o.begun.All()
	prints := planner.Fingerprints(world, participants)
	for _, rank := range participants {
		if _, sealed := o.sealed[rank]; sealed && o.written[rank] {
			continue
		}
		s, ok := a.slots[rankSave{o.begun.Checkpoint, rank}]
		if !ok || s.Local.Rank != rank {
			return false
		}
		own := prints(s.Local)
		said, planned := o.planned[rank]
		bytes, sealed := o.sealed[rank]
		if own != s.Fingerprint || planned && said != own.String() || sealed && bytes != s.Bytes() {
			a.log.Warn("staging slot of a dead trainer does not match the log; freed", "checkpoint", o.begun.Checkpoint, "rank", rank)
			return false
		}
	}
	return true
}

// recordLeft appends the plans and seals that did not reach the log.
func (j *Job) recordLeft(ctx context.Context, a *adopted, o *openSave) error {
	for _, rank := range o.begun.All() {
		s, ok := a.slots[rankSave{o.begun.Checkpoint, rank}]
		if !ok {
			continue
		}
		full := &events.LocalPlan{
			Attempt: s.Attempt, Checkpoint: s.Checkpoint, Name: o.begun.Name, Step: o.begun.Step, Rank: rank,
			Participants: o.begun.Participants, Fingerprint: s.Fingerprint.String(), Plan: events.InlineBlob(s.Plan),
		}
		a.plans = append(a.plans, full)
		var facts []events.Body
		if _, planned := o.planned[rank]; !planned {
			said := *full
			var err error
			if said.Plan, err = j.store.Blobs.Put(ctx, s.Plan); err != nil {
				return err
			}
			facts = append(facts, &said)
		}
		if _, sealed := o.sealed[rank]; !sealed {
			facts = append(facts, &events.WriteSealed{Attempt: s.Attempt, Checkpoint: s.Checkpoint, Rank: rank, Bytes: s.Bytes()})
		}
		if len(facts) == 0 {
			continue
		}
		if err := j.writer.recordAs(ctx, j.cfg.Trial, events.Rank(rank), facts...); err != nil {
			return fmt.Errorf("record the seal of rank %d for %s: %w", rank, s.Checkpoint, err)
		}
	}
	return nil
}

// serve lets a saver write from the slots and look up their plans.
func (a *adopted) serve(s *saver) {
	for _, p := range a.plans {
		s.keep(p)
	}
	s.put = func(ctx context.Context, c planner.Write) (data.Written, error) {
		slot, ok := a.slots[rankSave{c.Checkpoint, c.Rank}]
		if !ok {
			return data.Written{}, fmt.Errorf("the staged bytes of rank %d for %s are gone", c.Rank, c.Checkpoint)
		}
		src, err := slot.Source(c.Items)
		if err != nil {
			return data.Written{}, err
		}
		return s.writeFrom(ctx, c, src)
	}
}

// close unmaps the slots.
func (a *adopted) close() {
	for _, s := range a.slots {
		s.Close()
	}
	a.slots = nil
}

// Replicas describes the copies of sealed slots in the memory of other nodes, in one attempt. A
// save that all ranks have sealed is committed although a node is lost: the node that keeps its
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
}

// AdoptedPart is one rank's part of a save.
type AdoptedPart struct {
	Rank        int               `json:"rank"`
	Fingerprint checkpoint.Digest `json:"fingerprint"` // of the rank's plan, as the log has it
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
		ordered: map[rankSave]adopter{}, lost: map[int]bool{}, whole: map[rankSave]map[int]bool{},
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
func (g *Group) Adopt(a Adoption) { g.saver.feed.put(fed{adopt: &a}) }

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
	// Of the coordinating process, only the goroutine of run uses them: who writes the parts of lost
	// nodes, and the lost nodes.
	ordered map[rankSave]adopter
	lost    map[int]bool
}

// adopter is a node that has the order to write a part of a lost node.
type adopter struct{ by, from int }

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

// heir returns the node that can write a part of a lost node, or -1. It is a partner that lives; a partner
// whose copy is in the log comes first. The fact of a copy may be lost with the node.
func (r *replicas) heir(of rankSave, from int) int {
	heir := -1
	if from >= len(r.At) {
		return heir
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, at := range r.At[from] {
		switch {
		case r.lost[at]:
		case r.whole[of][r.index(at)]:
			return at
		case heir < 0:
			heir = at
		}
	}
	return heir
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

// hold keeps the replica of a lost rank's part of a save until it is written or the save ends.
func (r *replicas) hold(attempt int, checkpoint string, of AdoptedPart) error {
	if r == nil {
		return errors.New("this node keeps no replicas")
	}
	part := rankSave{checkpoint, of.Rank}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.adopted[part] {
		return nil
	}
	found, release, err := r.keeper.Hold(checkpoint, of.Rank)
	if err != nil {
		return err
	}
	if found.Attempt != attempt || found.Fingerprint != of.Fingerprint {
		release()
		return fmt.Errorf("the replica of rank %d for %s has another plan", of.Rank, checkpoint)
	}
	r.adopted[part], r.held[part] = true, heldReplica{found, release}
	return nil
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

// losses are the lost nodes that the saver has not seen.
type losses struct {
	mu    sync.Mutex
	queue []loss
	came  chan struct{} // has a value if the queue has
}

func (l *losses) put(of loss) {
	l.mu.Lock()
	l.queue = append(l.queue, of)
	l.mu.Unlock()
	select {
	case l.came <- struct{}{}:
	default:
	}
}

func (l *losses) take() []loss {
	l.mu.Lock()
	defer l.mu.Unlock()
	of := l.queue
	l.queue = nil
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
	var failed []rankSave
	type ordered struct {
		checkpoint string
		by         int
	}
	orders := map[ordered]*Adoption{}
	inherit := func(of rankSave, from int, fingerprint checkpoint.Digest) {
		by := r.heir(of, from)
		if by < 0 {
			failed = append(failed, of)
			return
		}
		r.ordered[of] = adopter{by, from}
		a := orders[ordered{of.checkpoint, by}]
		if a == nil {
			a = &Adoption{Checkpoint: of.checkpoint, Why: l.why.Error()}
			orders[ordered{of.checkpoint, by}] = a
		}
		a.Parts = append(a.Parts, AdoptedPart{of.rank, fingerprint})
	}
	for of, was := range r.ordered { // that the lost node was to write
		if fingerprint, sealed := s.coord.Sealed(of.checkpoint, of.rank); was.by == l.node && sealed {
			inherit(of, was.from, fingerprint)
		}
	}
	for _, of := range s.losing(l.ranks, l.why) {
		fingerprint, sealed := s.coord.Sealed(of.checkpoint, of.rank)
		if _, again := r.ordered[of]; again {
			continue
		}
		if !sealed || s.whole(of.checkpoint) != nil {
			failed = append(failed, of)
			continue
		}
		inherit(of, l.node, fingerprint)
	}
	err := s.fail(ctx, failed)
	first := func(a, b ordered) int {
		return cmp.Or(cmp.Compare(a.checkpoint, b.checkpoint), cmp.Compare(a.by, b.by))
	}
	for _, to := range slices.SortedFunc(maps.Keys(orders), first) {
		a := *orders[to]
		slices.SortFunc(a.Parts, func(a, b AdoptedPart) int { return cmp.Compare(a.Rank, b.Rank) })
		if to.by == r.node {
			err = errors.Join(err, s.adopt(ctx, a))
		} else {
			r.Order(to.by, a)
		}
	}
	return err
}

// adopt begins to write the parts of a save that a lost node had sealed, from the replicas of
// this node. Without all of them it aborts the save.
func (s *saver) adopt(ctx context.Context, a Adoption) error {
	if order(s.state(a.Checkpoint, -1).State) >= order(client.Committed) {
		return nil
	}
	var ranks, missing []int
	for _, p := range a.Parts {
		ranks = append(ranks, p.Rank)
		if err := s.replicas.hold(s.decisions.attempt, a.Checkpoint, p); err != nil {
			s.log.Debug("no replica to write", "checkpoint", a.Checkpoint, "rank", p.Rank, "error", err)
			missing = append(missing, p.Rank)
		}
	}
	if len(missing) > 0 {
		s.replicas.letGo(a.Checkpoint)
		return s.abort(ctx, s.decisions.attempt, a.Checkpoint, a.Why+"; no other node has a whole replica of its slots", missing...)
	}
	s.log.Warn("writing the sealed bytes of a lost node from their replicas", "checkpoint", a.Checkpoint, "ranks", ranks, "because", a.Why)
	for _, rank := range ranks {
		s.coord.Adopt(a.Checkpoint, rank)
	}
	return nil
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
