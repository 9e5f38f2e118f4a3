package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/nodes"
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
	before   []nodes.Member // of the last group before it grew, until the larger one has failed; nil otherwise
	fresh    []nodes.Member // nodes for which it has grown, once that has failed, maybe of an old node; nil otherwise

	mu          sync.Mutex
	now         *others             // of the current attempt
	measures    map[int]measurement // that are awaited, by their IDs
	checked     map[uint64]bool     // joinings that the preflight has measured or passed over
	nextMeasure int                 // ID of the last measurement
	inventories map[int]inventory   // by index: of nodes that continue a living group
	counted     chan struct{}       // closed at the next change of it
	silenced    map[nodePart]bool   // parts whose node was lost: their processes may live
	resuming    bool                // the group of another coordinator has not begun here
	early       []nodes.Message     // that came meanwhile
	begun       chan struct{}       // closed when it has
	recorded    <-chan struct{}     // closed when the log has all nodes that have joined: see inTurn; nil: none has
}

// newFleet follows the nodes of a job until the caller calls stop.
func newFleet(ctx context.Context, j *job) (f *fleet, stop func()) {
	f = &fleet{job: j, endpoint: j.cfg.Endpoint, began: time.Now(), inventories: map[int]inventory{}, counted: make(chan struct{}), silenced: map[nodePart]bool{}, resuming: j.succeeds != "", begun: make(chan struct{})}
	if !f.resuming {
		close(f.begun)
	}
	if j.members == nil {
		f.endpoint.AwaitAdmission()
	}
	f.endpoint.Handle("/v1/attempts/{attempt}/ranks/{rank}/", http.HandlerFunc(f.relayed))
	f.endpoint.Handle("POST /v1/attempts/{attempt}/loads/resolve", loads(f, (*restore.Meeting).Resolve))
	f.endpoint.Handle("POST /v1/attempts/{attempt}/loads/share", loads(f, (*restore.Meeting).Share))
	f.endpoint.Handle("POST /v1/attempts/{attempt}/loads/done", loads(f, (*restore.Meeting).Done))
	return f, inBackground(ctx, func(ctx context.Context) {
		for {
			select {
			case e := <-f.endpoint.Events():
				f.handle(ctx, e)
			case <-ctx.Done():
				<-f.joinsRecorded()
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
	if err := f.silenceAll(ctx, trial.Attempt); err != nil {
		return err
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
	if err := f.silence(ctx); err != nil {
		return err
	}
	o, came := f.orders.given()
	if o != nil {
		return errAsked // meanwhile
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-came: // the job is asked to end
			cancel()
		case <-ctx.Done():
		}
	}()
	group, err := f.endpoint.Gather(ctx, f.cfg.GatherTimeout, f.cfg.LastCall, f.enough())
	// A node that replaces a bad one is examined, too.
	for err == nil && f.cfg.Preflight && f.job.members == nil && f.unchecked(group) {
		var again bool
		if again, err = f.preflight(ctx, group); !again {
			break
		}
		group, err = f.endpoint.Gather(ctx, f.cfg.GatherTimeout, f.cfg.LastCall, 0)
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
	if f.cfg.Standby {
		f.job.cfg.Node = -1
	}
	for at, m := range group {
		var ranks []int
		for range m.Procs {
			ranks = append(ranks, rank)
			rank++
		}
		place = append(place, ranks)
		if m.Index == f.own() {
			f.job.cfg.Node = at
		}
	}
	f.job.cfg.Nodes = place
	return nil
}

// own returns the index of this node among the nodes of groups; -1 if it takes no ranks.
func (f *fleet) own() int {
	if f.cfg.Standby {
		return -1
	}
	return f.index()
}

// unchecked reports whether a node of a group has joined since the last preflight, and notes all
// that are here and can be measured: one preflight measures them.
func (f *fleet) unchecked(group []nodes.Member) bool {
	if !slices.ContainsFunc(group, func(m nodes.Member) bool { return !f.checked[m.Joining] }) {
		return false
	}
	f.checked = map[uint64]bool{}
	for _, m := range slices.Concat(group, f.endpoint.Members()) {
		if measurable(m) {
			f.checked[m.Joining] = true
		}
	}
	return true
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
		f.joined(ctx, e.Member)
	case nodes.Rejoined: // the processes of its earlier trainer are gone
		f.lost(ctx, e.Member.Index, e.Member.Joining-1, true, "its trainer started again")
		f.joined(ctx, e.Member)
	case nodes.Lost:
		f.mayLive(e.Node)
		f.lost(ctx, e.Node, e.Joining, true, e.Why)
	case nodes.Excluded:
		f.leaves(ctx, &events.NodeLeft{Node: e.Node, Reason: e.Why, Excluded: true, Host: e.Host, Boot: e.Boot})
	case nodes.Left:
		f.lost(ctx, e.Node, e.Joining, false, "its trainer ended: "+e.Reason)
	case nodes.Message:
		f.message(ctx, e)
	}
}

// joined records a node that has joined, in turn: while the log is away, the loss of another node must not wait for
// that.
func (f *fleet) joined(ctx context.Context, m nodes.Member) {
	f.inTurn(func() {
		if err := f.AppendOfRun(ctx, &events.NodeJoined{Job: f.cfg.Job, Node: m.Index, Host: m.Host}); err != nil {
			f.log.Warn("join of a node not recorded", "node", m.Index, "error", err)
		}
	})
}

// inTurn calls do in the background, after the earlier calls have ended.
func (f *fleet) inTurn(do func()) {
	f.mu.Lock()
	before, done := f.recorded, make(chan struct{})
	f.recorded = done
	f.mu.Unlock()
	go func() {
		defer close(done)
		if before != nil {
			<-before
		}
		do()
	}()
}

// joinsRecorded returns a channel that is closed when all calls of inTurn so far have ended.
func (f *fleet) joinsRecorded() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.recorded != nil {
		return f.recorded
	}
	none := make(chan struct{})
	close(none)
	return none
}

// leaves records a node that has left, after all that had joined before.
func (f *fleet) leaves(ctx context.Context, left *events.NodeLeft) {
	select {
	case <-f.joinsRecorded():
	case <-ctx.Done(): // the log does not take this either
	}
	left.Job, left.Reason = f.cfg.Job, session.Beginning(left.Reason, session.MaxMessage)
	if f.cfg.Standby {
		left.Term = f.JobTerm()
	}
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
	f.mu.Lock()
	o := f.now
	f.mu.Unlock()
	// The others must end at once, and not when the log has this: it may be away.
	o.mourn(index, joining, why, disorderly, reason)
	f.leaves(ctx, &events.NodeLeft{Node: index, Reason: reason, Lost: disorderly})
	if o == nil {
		return
	}
	o.mu.Lock()
	at, member := o.place[index]
	if member && o.joinings[index] > joining {
		o.mu.Unlock()
		return
	}
	alive := o.trains(index)
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
	// The log may have been away for so long that another process coordinates: the node has a part of its group.
	err := f.AppendCoordinating(ctx, unsaid...)
	if !errors.Is(err, session.ErrFenced) {
		err = errors.Join(err, o.group.Lost(ctx, at, why))
	}
	if err != nil {
		f.log.Warn("loss of a node not recorded", "node", index, "error", err)
	}
	o.leave(why, o.order.Nodes[at]...)
	if alive {
		o.give(nodeEvent{index: index, ended: true, end: &FailedError{Rank: -1, Kind: blame.Infrastructure, Cause: why.Error()}})
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
	if e.Kind == msgInventory || e.Kind == msgServes {
		f.inTurn(func() { f.endpoint.Admit(e.Node, e.Joining) }) // the log has the node before its group
	}
	if e.Kind == msgInventory {
		var i inventory
		if decode(&i) {
			f.count(e.Node, e.Joining, i)
		}
		return
	}
	if e.Kind == msgServes {
		return
	}
	if e.Kind == msgMeasured {
		var m measured
		if decode(&m) {
			f.measured(e.Node, m)
		}
		return
	}
	var of attemptOnly
	if !decode(&of) {
		return
	}
	f.mu.Lock()
	if f.resuming {
		f.early = append(f.early, e)
		f.mu.Unlock()
		return
	}
	f.mu.Unlock()
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
		if b.Rank != -1 && !slices.Contains(o.order.Nodes[at], b.Rank) {
			f.log.Error("node names a rank that is not its own as the cause of its failure; the rank is ignored", "node", e.Node, "rank", b.Rank, "attempt", of.Attempt)
			b.Rank = -1
		}
		out := nodeEvent{index: e.Node, ended: e.Kind == msgStopped}
		if b.Failed {
			out.end = &FailedError{Rank: b.Rank, Kind: b.Kind, Cause: f.name(e.Node) + ": " + b.Cause, Tail: b.Tail, failed: map[int]bool{e.Node: b.Itself}}
			if b.Device != "" {
				out.end.sick = map[int]string{e.Node: b.Device}
			}
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
	case msgAdopted:
		var b adoptReply
		if decode(&b) {
			o.group.Adopted(at, b.Reply)
		}
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
