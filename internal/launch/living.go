package launch

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// Resume is [Run] for a job whose coordinating node is gone, and had no ranks: it continues the
// living group of its nodes, which join cfg.Endpoint, and then the job. reason is why. If the group
// cannot continue, another one starts from the last committed checkpoint.
func Resume(ctx context.Context, cfg Config, store session.Store, reason string) error {
	return runJob(ctx, cfg, store, reason)
}

// living is a group that this process coordinates in place of another.
type living struct {
	trial   projections.Trial
	attempt projections.Attempt
	indexes []int         // of the nodes, by place
	nodes   session.Nodes // ranks of each
	resumed *session.Resumed
	members []nodes.Member // by place; a node that has not come is lost
	counted map[int]uint64 // joinings of the nodes that have given their inventory, by place
	present map[int]bool   // places of nodes that have come
	greeted int            // nodes whose ranks have all connected
	listens bool           // its ranks report, or poll for requests to stop
	told    string         // request to end that its ranks got, as [session.Orders] has it
	grew    *growth        // for what, if that was to have more nodes
	broken  string         // why the group cannot continue; empty: it does
}

// overtaken returns an error if another process coordinates a living group in place of this one.
func (j *job) overtaken(ctx context.Context) error {
	if !j.cfg.Standby || j.link != nil {
		return nil
	}
	return j.Overtaken(ctx)
}

// succeed takes over the coordination of the trial's group. It returns the sequence after which
// requests to end are obeyed.
func (j *job) succeed(ctx context.Context, host string) (uint64, error) {
	trial, attempt, so, err := j.Resume(ctx, j.orders.saw, &events.GroupCoordinator{
		Job: j.cfg.Job, Node: j.index(), Host: host, Reason: session.Beginning(j.succeeds, session.MaxMessage),
	})
	if err != nil {
		return 0, err
	}
	if j.cfg.Coordinates != nil {
		j.cfg.Coordinates()
	}
	if attempt.Attempt == 0 || !attempt.StoppedAt.IsZero() || attempt.Job != j.cfg.Job {
		j.log.Warn("no group lives; the next one starts from the last checkpoint", "attempt", attempt.Attempt)
		j.fleet.ready(ctx)
		return so.Known, nil
	}
	l := &living{trial: trial, attempt: attempt, resumed: so, present: map[int]bool{}, counted: map[int]uint64{}}
	if l.indexes, l.nodes, err = j.placed(ctx, attempt); err != nil {
		return 0, err
	}
	found := j.fleet.await(ctx, l.indexes)
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	l.take(found)
	j.fleet.activate(l)
	j.recall(l)
	if l.broken == "" {
		j.log.Info("living group continues", "attempt", attempt.Attempt, "nodes", len(l.indexes), "iterations", so.Last.Iteration)
	} else {
		j.log.Warn("living group cannot continue", "attempt", attempt.Attempt, "because", l.broken)
	}
	j.living = l
	return attempt.StartedSeq, nil
}

// placed returns the nodes of an attempt and their ranks, by place, as the log has them.
func (j *job) placed(ctx context.Context, a projections.Attempt) (indexes []int, of session.Nodes, err error) {
	lane := events.Aggregate{Run: j.cfg.Run, Trial: j.cfg.Trial}
	for r, err := range j.store.Log.ReadLane(ctx, lane, a.StartedSeq, a.StartedSeq) {
		if err != nil {
			return nil, nil, err
		}
		body, err := r.Body()
		if err != nil {
			return nil, nil, fmt.Errorf("group of attempt %d: %w", a.Attempt, err)
		}
		g, ok := body.(*events.GroupStarted)
		if !ok {
			return nil, nil, fmt.Errorf("group of attempt %d: event %d is a %s; run `ckptstore views rebuild`", a.Attempt, r.Sequence, r.Kind)
		}
		for _, run := range g.Nodes {
			for n := range run.Nodes {
				indexes = append(indexes, run.Node+n)
				var ranks []int
				for k := range run.Count {
					ranks = append(ranks, run.First+n*run.Count+k)
				}
				of = append(of, ranks)
			}
		}
		for _, p := range g.Ranks {
			at := slices.Index(indexes, p.Node)
			if at < 0 {
				at = len(indexes)
				indexes, of = append(indexes, p.Node), append(of, nil)
			}
			of[at] = append(of[at], p.Rank)
		}
	}
	if len(indexes) == 0 {
		return nil, nil, fmt.Errorf("the log has no placement of attempt %d; run `ckptstore verify`", a.Attempt)
	}
	return indexes, of, nil
}

// count takes the inventory of a joining of a node.
func (f *fleet) count(index int, joining uint64, i inventory) {
	i.joining = joining
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inventories[index] = i
	close(f.counted)
	f.counted = make(chan struct{})
}

// await waits until all nodes of a living group have given their inventory, for T at most.
func (f *fleet) await(ctx context.Context, indexes []int) map[int]inventory {
	late := time.NewTimer(max(f.endpoint.Timeout(), leastAwait))
	defer late.Stop()
	for {
		f.mu.Lock()
		found, counted := maps.Clone(f.inventories), f.counted
		f.mu.Unlock()
		if !slices.ContainsFunc(indexes, func(index int) bool { _, ok := found[index]; return !ok }) {
			return found
		}
		select {
		case <-counted:
		case <-late.C:
			return found
		case <-ctx.Done():
			return found
		}
	}
}

// leastAwait is how long the nodes of a living group have at least to find their new coordinator.
const leastAwait = 5 * time.Second

// take combines what the nodes of the group have.
func (l *living) take(found map[int]inventory) {
	breaks := func(format string, args ...any) {
		if l.broken == "" {
			l.broken = fmt.Sprintf(format, args...)
		}
	}
	world := l.nodes.World()
	var answer *collectiveAnswer
	sequences := map[int]uint64{}
	first := true
	for place, index := range l.indexes {
		i, ok := found[index]
		switch {
		case !ok:
			breaks("node %d is lost: it has not joined the new coordinator", index)
			continue
		case i.Attempt != l.attempt.Attempt:
			breaks("node %d has no part in the group any more", index)
			continue
		}
		l.present[place], l.counted[place] = true, i.joining
		if i.Broken != "" {
			breaks("the coordinating node is lost, and node %d cannot continue with another: %s", index, i.Broken)
		}
		if i.Hello {
			l.greeted++
		}
		if first || i.Heard < l.resumed.Heard {
			l.resumed.Heard, first = i.Heard, false
		}
		l.listens = l.listens || i.Listens || len(i.Reports) > 0
		l.heed(i.Told)
		for rank, of := range i.Reports {
			l.resumed.Reports[rank] = of
			l.heed(of.Stop)
		}
		for rank, seq := range i.Sequences {
			sequences[rank] = seq
		}
		if a := i.Answer; a != nil && (answer == nil || a.Sequence > answer.Sequence || a.Sequence == answer.Sequence && answer.Body == nil) {
			answer = a
		}
	}
	if err := l.resumed.Check(world); err != nil {
		breaks("reports of the group: %v", err)
	}
	if answer == nil {
		return
	}
	parts, err := answer.parts(world)
	for rank := range world {
		switch seq := sequences[rank]; {
		case seq == answer.Sequence:
		case err != nil:
			breaks("rank %d waits for collective %d: %v", rank, answer.Sequence, err)
		case seq != answer.Sequence-1:
			breaks("rank %d has made %d collectives, and others %d", rank, seq, answer.Sequence)
		}
	}
	l.resumed.Sequence, l.resumed.Parts = answer.Sequence, parts
}

// heed notes a request to end that a rank got. A stop overrides a preemption, and both override a
// growth, as they do for the ranks.
func (l *living) heed(told string) {
	weight := func(request string) int {
		return slices.Index([]string{"", session.Grow, client.Preempt, client.Stop}, request)
	}
	if weight(told) > weight(l.told) {
		l.told = told
	}
}

// recall makes the request to end that the ranks of a living group got a request to this job: that to
// the job before may not be in the log. If the coordinator before has asked the ranks to make room for
// nodes, no job was asked to end: the group grows, also if these nodes have not joined here yet.
func (j *job) recall(l *living) {
	switch l.told {
	case "":
	case session.Grow:
		if l.grew = growthBy(j.fleet.endpoint, len(l.nodes)); l.grew == nil {
			l.grew = &growth{from: len(l.nodes), to: len(l.nodes) + 1, joined: "nodes that the coordinating node before had"}
		}
	default:
		j.ask(StopRequest{Preempt: l.told == client.Preempt, Reason: "the coordinating node before had asked the workers to end"})
	}
}

// activate makes the nodes of a living group that are here one of the endpoint.
func (f *fleet) activate(l *living) {
	places := map[int]int{}
	for place, index := range l.indexes {
		if l.present[place] {
			places[index] = place
		}
	}
	members, gone := f.endpoint.Activate(places)
	for _, index := range gone {
		place := slices.Index(l.indexes, index)
		delete(l.present, place)
		if l.broken == "" {
			l.broken = fmt.Sprintf("node %d is lost: it has left the new coordinator", index)
		}
	}
	l.members = make([]nodes.Member, len(l.indexes))
	for place, index := range l.indexes {
		l.members[place] = nodes.Member{Node: nodes.Node{Index: index}, State: nodes.StateLost, Place: place}
	}
	for _, m := range members {
		place := slices.Index(l.indexes, m.Index)
		if m.Joining == l.counted[place] {
			l.members[place] = m
			continue
		}
		delete(l.present, place)
		if l.broken == "" {
			l.broken = fmt.Sprintf("node %d is lost: its trainer started again while the group got another coordinator", m.Index)
		}
	}
}

// join makes a living group the current one.
func (f *fleet) join(l *living) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.members = l.members
	f.job.cfg.Nodes, f.job.cfg.Node = l.nodes, -1
}

// resume has the others be those of a living group.
func (o *others) resume(l *living) {
	o.started = true
	for place, index := range l.indexes {
		if !l.present[place] {
			delete(o.alive, index)
			delete(o.open, index)
		}
	}
}

// bury records the end of the parts of a living group whose nodes have not come.
func (f *fleet) bury(ctx context.Context, o *others, l *living) {
	for place, index := range l.indexes {
		if l.present[place] {
			continue
		}
		f.mayLive(index)
		f.lost(ctx, index, o.joinings[index], true, "it has not joined the node that coordinates now")
	}
	for _, m := range l.members {
		now := f.endpoint.Members()
		here := func(n nodes.Member) bool {
			return n.Index == m.Index && n.Joining == m.Joining && n.State != nodes.StateLost
		}
		if l.present[m.Place] && !slices.ContainsFunc(now, here) { // since it has given its inventory
			f.mayLive(m.Index)
			f.lost(ctx, m.Index, m.Joining, true, "it was lost while the group got another coordinator")
		}
	}
	for place, index := range l.indexes {
		if l.present[place] {
			o.must(index, cmdMortal, attemptOnly{o.order.Attempt})
		}
	}
	f.ready(ctx)
}

// ready takes the messages and requests of nodes from now on: they came before the group of a process
// that takes over had begun.
func (f *fleet) ready(ctx context.Context) {
	f.mu.Lock()
	early := f.early
	f.early, f.resuming = nil, false
	f.mu.Unlock()
	for _, m := range early {
		f.message(ctx, m)
	}
	close(f.begun)
}
