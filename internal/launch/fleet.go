package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/preflight"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/restore"
	"github.com/ckptstore/ckptstore/projections"
)

// fleet is the coordinating process's view of the other nodes of its job.
type fleet struct {
	*job
	endpoint *nodes.Endpoint
	began    time.Time      // when the nodes could join
	members  []nodes.Member // of the next or current attempt, by place

	mu          sync.Mutex
	now         *others               // of the current attempt
	measures    map[int]chan measured // that are awaited, by their IDs
	checked     bool                  // the preflight is over
	serving     map[int]bool          // indexes of nodes that serve the requests of others
	served      chan struct{}         // closed at the next change of it
	nextMeasure int                   // ID of the last measurement
}

// newFleet follows the nodes of a job until the caller calls stop.
func newFleet(ctx context.Context, j *job) (f *fleet, stop func()) {
	f = &fleet{job: j, endpoint: j.cfg.Endpoint, began: time.Now(), serving: map[int]bool{}, served: make(chan struct{})}
	f.endpoint.Handle("/v1/attempts/{attempt}/ranks/{rank}/", http.HandlerFunc(f.relayed))
	f.endpoint.Handle("POST /v1/attempts/{attempt}/loads/resolve", loads(f, (*restore.Meeting).Resolve))
	f.endpoint.Handle("POST /v1/attempts/{attempt}/loads/done", loads(f, (*restore.Meeting).Done))
	return f, inBackground(ctx, func(ctx context.Context) {
		for {
			select {
			case e := <-f.endpoint.Events():
				f.handle(ctx, e)
			case <-ctx.Done():
				return
			}
		}
	})
}

// outlive waits until no process of the trial's last attempt can be alive on another
// node, if its coordinating process died before it had ended the attempt: then a node without
// contact kills its processes when half of the timeout has passed without an answer.
func (f *fleet) outlive(ctx context.Context, trial projections.Trial) error {
	if trial.Attempt == 0 {
		return nil
	}
	attempts, err := f.store.Views.Attempts(ctx, f.cfg.Run, f.cfg.Trial)
	if err != nil {
		return err
	}
	at := slices.IndexFunc(attempts, func(a projections.Attempt) bool { return a.Attempt == trial.Attempt })
	if at >= 0 && !attempts[at].StoppedAt.IsZero() {
		return nil
	}
	timeout := f.endpoint.Timeout()
	left := time.Until(f.began.Add(timeout/2 + timeout/5))
	if left <= 0 {
		return nil
	}
	f.log.Warn("last attempt was not ended by its trainer; waiting until its processes on other nodes are gone", "attempt", trial.Attempt, "for", left.Round(time.Millisecond))
	return f.rest(ctx, left)
}

// gather waits for the nodes of the next attempt, and places the ranks on them in the
// order of their indexes.
func (f *fleet) gather(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	_, came := f.orders.given()
	go func() {
		select {
		case <-came: // the job is asked to end
			cancel()
		case <-ctx.Done():
		}
	}()
	group, err := f.endpoint.Gather(ctx, f.cfg.GatherTimeout, f.cfg.LastCall)
	if err == nil && f.cfg.Preflight && !f.checked && f.job.members == nil {
		f.checked = true
		var again bool
		if again, err = f.preflight(ctx, group); again {
			group, err = f.endpoint.Gather(ctx, f.cfg.GatherTimeout, f.cfg.LastCall)
		}
	}
	if err != nil {
		return err
	}
	f.mu.Lock()
	f.members = group
	f.mu.Unlock()
	if f.job.members != nil {
		return nil // they chose their ranks, and this node is the first
	}
	for _, m := range f.endpoint.Members() {
		if m.State == nodes.StateSpare {
			if err := f.endpoint.Send(m.Index, cmdSpare, attemptOnly{}); err != nil {
				f.log.Debug("command not sent to a spare", "node", m.Index, "error", err)
			}
		}
	}
	var place session.Nodes
	rank := 0
	for at, m := range group {
		var ranks []int
		for range m.Procs {
			ranks = append(ranks, rank)
			rank++
		}
		place = append(place, ranks)
		if m.Index == f.index() {
			f.job.cfg.Node = at
		}
	}
	f.job.cfg.Nodes = place
	return nil
}

// indexAt returns the index of the node at a place in the group. The two differ once a
// spare has replaced a node.
func (f *fleet) indexAt(place int) int {
	if f == nil {
		return place
	}
	return f.members[place].Index
}

// place adds the placement of the group's nodes to its decision.
func (f *fleet) place(ctx context.Context, g *events.GroupStarted) error {
	var nodes events.NodeMap
	var counts []int
	for at, m := range f.members {
		nodes.Index, nodes.Key = append(nodes.Index, m.Index), append(nodes.Key, m.Key)
		nodes.Host, nodes.Address = append(nodes.Host, m.Host), append(nodes.Address, m.Address)
		counts = append(counts, len(f.job.cfg.Nodes[at]))
	}
	g.Nodes = events.NodeRuns(nodes.Index, counts)
	data, err := json.Marshal(nodes)
	if err != nil {
		return err
	}
	blob, err := f.Store().Blobs.Put(ctx, data)
	g.Map = &blob
	return err
}

// current returns the others of an attempt, or nil if it is not the current one.
func (f *fleet) current(attempt int) *others {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.now == nil || f.now.order.Attempt != attempt {
		return nil
	}
	return f.now
}

// handle obeys an event of the endpoint.
func (f *fleet) handle(ctx context.Context, e nodes.Event) {
	switch e := e.(type) {
	case nodes.Joined:
		f.setServing(e.Member.Index, false)
		f.joined(ctx, e.Member)
	case nodes.Rejoined: // the processes of its earlier trainer are gone
		f.setServing(e.Member.Index, false)
		f.lost(ctx, e.Member.Index, e.Member.Joining-1, true, "its trainer started again")
		f.joined(ctx, e.Member)
	case nodes.Lost:
		f.lost(ctx, e.Node, e.Joining, true, e.Why)
	case nodes.Excluded:
		f.leaves(ctx, &events.NodeLeft{Node: e.Node, Reason: e.Why, Excluded: true, Host: e.Host, Boot: e.Boot})
	case nodes.Left:
		f.lost(ctx, e.Node, e.Joining, false, "its trainer ended: "+e.Reason)
	case nodes.Message:
		f.message(ctx, e)
	}
}

// joined records a node that has joined.
func (f *fleet) joined(ctx context.Context, m nodes.Member) {
	if err := f.AppendOfRun(ctx, &events.NodeJoined{Job: f.cfg.Job, Node: m.Index, Host: m.Host}); err != nil {
		f.log.Warn("join of a node not recorded", "node", m.Index, "error", err)
	}
}

// leaves records a node that has left.
func (f *fleet) leaves(ctx context.Context, left *events.NodeLeft) {
	left.Job, left.Reason = f.cfg.Job, session.Beginning(left.Reason, session.MaxMessage)
	if err := f.AppendOfRun(ctx, left); err != nil {
		f.log.Warn("loss of a node not recorded", "node", left.Node, "error", err)
	}
}

// name names a node in messages. Members know machines, not nodes.
func (f *fleet) name(index int) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.job.members != nil {
		for _, m := range f.members {
			if m.Index == index {
				return "machine " + m.Host
			}
		}
	}
	return fmt.Sprint("node ", index)
}

// lost ends the part of a node that is silent, was replaced, or left in order, with what
// it had started up to a joining: the node may have joined again, and be in the next group.
func (f *fleet) lost(ctx context.Context, index int, joining uint64, disorderly bool, reason string) {
	why := fmt.Errorf("%s is lost: %s", f.name(index), reason)
	f.leaves(ctx, &events.NodeLeft{Node: index, Reason: reason, Lost: disorderly})
	f.mu.Lock()
	o := f.now
	f.mu.Unlock()
	if o == nil {
		return
	}
	o.mu.Lock()
	at, member := o.place[index]
	if member && o.joinings[index] > joining {
		o.mu.Unlock()
		return
	}
	alive := o.alive[index]
	delete(o.open, index)
	o.closed()
	var unsaid []events.Body
	if member {
		for _, rank := range o.order.Nodes[at] {
			if !o.gone[rank] {
				unsaid = append(unsaid, &events.WorkerExited{Attempt: o.order.Attempt, Rank: rank, Code: -1, Unseen: true, Message: why.Error()})
			}
		}
	}
	o.mu.Unlock()
	if !member {
		return
	}
	err := f.Append(ctx, unsaid...)
	if err = errors.Join(err, o.group.Lost(ctx, at, why)); err != nil {
		f.log.Warn("loss of a node not recorded", "node", index, "error", err)
	}
	o.leave(why, o.order.Nodes[at]...)
	if alive {
		o.give(nodeEvent{index: index, ended: true, end: &FailedError{Rank: -1, Kind: InfrastructureFailure, Cause: why.Error()}})
	}
}

// message obeys a message of another node.
func (f *fleet) message(ctx context.Context, e nodes.Message) {
	decode := func(into any) bool {
		err := json.Unmarshal(e.Body, into)
		if err != nil {
			f.log.Error("message of a node not understood", "node", e.Node, "message", e.Kind, "error", err)
		}
		return err == nil
	}
	if e.Kind == msgAsked {
		var r StopRequest
		if decode(&r) {
			r.Reason = fmt.Sprintf("node %d: %s", e.Node, r.Reason)
			f.ask(r)
		}
		return
	}
	if e.Kind == msgServes {
		f.setServing(e.Node, true)
		return
	}
	if e.Kind == msgMeasured {
		var m measured
		if decode(&m) {
			f.measured(m)
		}
		return
	}
	var of attemptOnly
	if !decode(&of) {
		return
	}
	o := f.current(of.Attempt)
	if o == nil {
		return // of an attempt that has ended
	}
	at, member := o.place[e.Node]
	if !member {
		f.log.Error("message of a node that has no part in the attempt", "node", e.Node, "message", e.Kind, "attempt", of.Attempt)
		return
	}
	switch e.Kind {
	case msgHello:
		o.give(nodeEvent{index: e.Node, hello: true})
	case msgExited:
		var b rankEnd
		if decode(&b) && slices.Contains(o.order.Nodes[at], b.Rank) {
			o.leave(errors.New(b.How), b.Rank)
			o.mu.Lock()
			if !slices.ContainsFunc(o.order.Nodes[at], func(rank int) bool { return !o.gone[rank] }) {
				o.hurry(e.Node)
			}
			o.mu.Unlock()
		}
	case msgFailed, msgStopped:
		var b partEnd
		if !decode(&b) {
			return
		}
		out := nodeEvent{index: e.Node, ended: e.Kind == msgStopped}
		if b.Failed {
			out.end = &FailedError{Rank: b.Rank, Kind: b.Kind, Cause: f.name(e.Node) + ": " + b.Cause, Tail: b.Tail, failed: map[int]bool{e.Node: b.Itself}}
		}
		if b.Unsaved {
			if err := o.group.Lost(ctx, at, fmt.Errorf("%s writes no more: %s", f.name(e.Node), b.Cause)); err != nil {
				f.log.Warn("end of a node's saves not recorded", "node", e.Node, "error", err)
			}
		}
		if out.ended {
			o.mu.Lock()
			o.obeyed[e.Node] = true
			o.mu.Unlock()
			o.leave(fmt.Errorf("the processes of %s have ended", f.name(e.Node)), o.order.Nodes[at]...)
		}
		o.give(out)
	case msgClosed:
		o.mu.Lock()
		delete(o.open, e.Node)
		o.closed()
		o.mu.Unlock()
	case msgSettled, msgAbort:
		var b saveRef
		if !decode(&b) {
			return
		}
		if e.Kind == msgSettled {
			o.group.Settled(at, b.Checkpoint)
			return
		}
		if err := o.group.Abort(ctx, b.Checkpoint, f.name(e.Node)+": "+b.Reason, b.Ranks); err != nil {
			f.log.Warn("save not aborted", "checkpoint", b.Checkpoint, "node", e.Node, "error", err)
		}
	}
}

// quarantine excludes the node whose ranks have caused the end of an attempt, if they fail again
// and again. progress means that a checkpoint was committed since the failure before. It returns for
// how many failures the workers' budget is not to be charged, this one included; 0 if no node was
// excluded.
func (f *fleet) quarantine(b *blame, cause *FailedError, progress bool) (free int) {
	if f == nil || f.job.members != nil {
		return 0
	}
	m, found := f.memberOf(cause.Rank)
	switch b.failed(blamed{m.Index, m.Host}, found && cause.blames(m.Index), progress) {
	case theProgram:
		f.log.Warn("node is not excluded: ranks fail on a second node alike; the program may be bad", "node", m.Index, "host", m.Host, "failures", b.count)
	case theNode:
		free = b.count
		why := fmt.Sprintf("its ranks failed %d times and those of other nodes did not; at last %s", free, strings.TrimPrefix(cause.Cause, fmt.Sprintf("node %d: ", m.Index)))
		if f.dismiss(m, why) {
			b.excluded()
			return free
		}
	}
	return 0
}

// memberOf returns the node of a rank in the last group.
func (f *fleet) memberOf(rank int) (m nodes.Member, found bool) {
	for place, ranks := range f.job.cfg.Nodes {
		if place < len(f.members) && slices.Contains(ranks, rank) {
			return f.members[place], true
		}
	}
	return nodes.Member{}, false
}

// preflight measures the nodes of a group and the spares, and excludes bad ones, of which the
// group's are released. It reports whether the caller must gather a group again.
func (f *fleet) preflight(ctx context.Context, group []nodes.Member) (again bool, err error) {
	var all []nodes.Member
	waiting, cancel := context.WithTimeout(ctx, serveWait)
	defer cancel()
	for _, m := range f.endpoint.Members() {
		switch {
		case m.State == nodes.StateSuspect || m.State == nodes.StateLost:
		case m.PeerURL() == "":
			f.log.Warn("network of a node is not measured; start its trainer with --preflight too", "node", m.Index, "host", m.Host)
		case m.Index != f.index() && !f.serves(waiting, m.Index):
			f.log.Warn("network of a node is not measured: it has not opened the store in time", "node", m.Index, "host", m.Host, "limit", serveWait)
		default:
			all = append(all, m)
		}
	}
	began := time.Now()
	verdicts := preflight.Run(ctx, len(all), func(ctx context.Context, a, b int) (float64, error) { return f.rate(ctx, all[a], all[b]) })
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	var facts []events.Body
	var bad []int
	median := 0.0
	for i, v := range verdicts {
		fact := &events.NodeMeasured{Job: f.cfg.Job, Node: all[i].Index, BytesPerSecond: int64(v.Rate), Partners: []int{}}
		for _, partner := range v.Partners {
			fact.Partners = append(fact.Partners, all[partner].Index)
		}
		facts, median = append(facts, fact), v.Median
		if v.Bad {
			bad = append(bad, i)
		}
	}
	f.log.Info("preflight", "nodes", len(all), "bad", len(bad), "median", mbps(median), "took", time.Since(began).Round(time.Millisecond))
	if len(all) < 3 && len(all) > 0 {
		f.log.Warn("preflight needs three nodes to tell a bad node from its partner; it only measures", "nodes", len(all))
	}
	if err := f.AppendOfRun(ctx, facts...); err != nil {
		f.log.Warn("preflight not recorded", "error", err)
	}
	if len(bad) == 0 {
		return false, nil
	}
	var members []int
	for _, m := range group {
		members = append(members, m.Index)
	}
	f.endpoint.Release(members)
	for _, i := range bad {
		v, m := verdicts[i], all[i]
		why := fmt.Sprintf("its network has at most %s with each of %d other nodes, and the median is %s", mbps(v.Rate), len(v.Partners), mbps(v.Median))
		if v.Err != nil {
			why += ": " + v.Err.Error()
		}
		f.dismiss(m, why)
	}
	return true, nil
}

// serveWait bounds the wait until the nodes that have joined have opened the store.
const serveWait = 30 * time.Second

// serves waits until a node serves the requests of others.
func (f *fleet) serves(ctx context.Context, index int) bool {
	for {
		f.mu.Lock()
		ready, changed := f.serving[index], f.served
		f.mu.Unlock()
		if ready {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// setServing notes whether a node serves the requests of others.
func (f *fleet) setServing(index int, does bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.serving[index] = does
	close(f.served)
	f.served = make(chan struct{})
}

func mbps(rate float64) string { return fmt.Sprintf("%.1f MB/s", rate/1e6) }

// dismiss excludes a node that has no part in a running group, if the job may go without it.
func (f *fleet) dismiss(m nodes.Member, why string) bool {
	kept := f.cfg.keeps(m.Index, m.Index == f.index(), func() bool { return f.endpoint.Dispensable(m.Index) })
	if kept == "" {
		err := f.endpoint.Exclude(m.Index, m.Joining, why)
		if err == nil {
			return true
		}
		kept = err.Error() // it is gone
	}
	f.log.Warn("bad node is not excluded", "node", m.Index, "host", m.Host, "bad", why, "because", kept)
	return false
}

// keeps returns why a bad node is not excluded, or "".
func (c *Config) keeps(index int, coordinates bool, dispensable func() bool) string {
	switch {
	case coordinates:
		return "it coordinates the job"
	case index < c.LogCopies:
		return fmt.Sprintf("the nodes 0 to %d hold the copies of the log; repair its machine between two jobs", c.LogCopies-1)
	case c.Exclude == ExcludeNever:
		return "--max-node-failures is 0; leave it out to exclude a node that has a spare, or give a number above 0"
	case c.Exclude == ExcludeSpared && !dispensable():
		return "no spare is there; start the trainer on another node, or give --max-node-failures to wait for one"
	}
	return ""
}

// rate measures the network between two nodes, from the first one.
func (f *fleet) rate(ctx context.Context, from, to nodes.Member) (float64, error) {
	if from.Index == f.index() {
		return preflight.Measure(ctx, f.endpoint.PeerClient(to.PeerPin), to.PeerURL())
	}
	answer := make(chan measured, 1)
	f.mu.Lock()
	f.nextMeasure++
	id := f.nextMeasure
	if f.measures == nil {
		f.measures = map[int]chan measured{}
	}
	f.measures[id] = answer
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.measures, id)
		f.mu.Unlock()
	}()
	if err := f.endpoint.Send(from.Index, cmdMeasure, measureOrder{id, to.PeerURL(), to.PeerPin}); err != nil {
		return 0, err
	}
	late := time.NewTimer(preflight.Limit + measureSlack)
	defer late.Stop()
	select {
	case m := <-answer:
		if m.Error != "" {
			return 0, errors.New(m.Error)
		}
		return m.Rate, nil
	case <-late.C:
		return 0, fmt.Errorf("node %d has not measured its network to node %d in time", from.Index, to.Index)
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
}

// measureSlack is for the order and its answer: five rounds take less than 10 s with it.
const measureSlack = 200 * time.Millisecond

// measured takes the result of a measurement by another node.
func (f *fleet) measured(m measured) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if answer := f.measures[m.ID]; answer != nil {
		delete(f.measures, m.ID)
		answer <- m
	}
}
