package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/restore"
	"github.com/ckptstore/ckptstore/projections"
)

// Commands to the process of another node, and its messages. Each names an attempt.
const (
	cmdStart = "start" // to start its part of the group: a startOrder
	cmdStop  = "stop"  // to end its processes: a stopCommand
	cmdClose = "close" // to end its part: the saves of the attempt have ended
	cmdSpare = "spare" // to wait: the next group has no place for it

	msgHello   = "hello"   // all its ranks have connected
	msgExited  = "exited"  // a rank has ended: a rankEnd
	msgFailed  = "failed"  // its part fails, and its processes are being ended: a partEnd
	msgStopped = "stopped" // none of its processes is left, and the log has all their facts: a partEnd
	msgClosed  = "closed"  // its part has ended
	msgSettled = "settled" // it writes no more files of an aborted save: a saveRef
	msgAbort   = "abort"   // it cannot finish a save: a saveRef
	msgAsked   = "asked"   // the job was asked to end there: a StopRequest
)

// startOrder places a node's part of a group.
type startOrder struct {
	Attempt    int           `json:"attempt"`
	Restart    int           `json:"restart"`
	Resume     string        `json:"resume,omitempty"`
	Started    uint64        `json:"started"` // sequence of group.started
	Nodes      session.Nodes `json:"nodes"`
	Node       int           `json:"node"` // the receiver's place in the group
	MasterAddr string        `json:"master_addr"`
	MasterPort int           `json:"master_port"`
}

type stopCommand struct {
	Attempt int    `json:"attempt"`
	Why     string `json:"why"`
}

type rankEnd struct {
	Attempt int    `json:"attempt"`
	Rank    int    `json:"rank"`
	How     string `json:"how"`
}

// partEnd is the end of a node's part of a group; without a cause, all its ranks ended
// well.
type partEnd struct {
	Attempt int         `json:"attempt"`
	Failed  bool        `json:"failed"`
	Rank    int         `json:"rank"`
	Kind    FailureKind `json:"kind,omitempty"`
	Cause   string      `json:"cause,omitempty"`
	Tail    []string    `json:"tail,omitempty"`
}

type saveRef struct {
	Attempt    int    `json:"attempt"`
	Checkpoint string `json:"checkpoint"`
	Reason     string `json:"reason,omitempty"`
	Ranks      []int  `json:"ranks,omitempty"`
}

// attemptOnly is the part that all commands and messages have.
type attemptOnly struct {
	Attempt int `json:"attempt"`
}

// fleet is the coordinating process's view of the other nodes of its job.
type fleet struct {
	*job
	endpoint *nodes.Endpoint
	began    time.Time      // when the nodes could join
	members  []nodes.Member // of the next or current attempt, by place

	mu  sync.Mutex
	now *others // of the current attempt
}

// newFleet follows the nodes of a job until the caller calls stop.
func newFleet(ctx context.Context, j *job) (f *fleet, stop func()) {
	f = &fleet{job: j, endpoint: j.cfg.Endpoint, began: time.Now()}
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

// others are the other nodes of an attempt's group.
type others struct {
	*fleet
	group   *session.Group
	order   startOrder
	in      chan nodeEvent // for the attempt's loop
	over    chan struct{}  // closed when the loop has ended
	closing chan struct{}  // closed when all parts have ended

	mu       sync.Mutex
	place    map[int]int    // in the group, by the node's index
	joinings map[int]uint64 // of these nodes, by index
	alive    map[int]bool   // indexes of nodes with processes
	open     map[int]bool   // indexes of nodes whose part has not ended
	gone     map[int]bool   // ranks
	stopped  bool           // the nodes have the command to stop
}

// nodeEvent is what the attempt's loop learns of another node.
type nodeEvent struct {
	index int
	hello bool
	ended bool // none of its processes is left
	end   *FailedError
}

// begin makes the others of an attempt; nil if the job has one node.
func (f *fleet) begin(g *session.Group, order startOrder) *others {
	if f == nil {
		return nil
	}
	o := &others{
		fleet: f, group: g, order: order, in: make(chan nodeEvent), over: make(chan struct{}), closing: make(chan struct{}),
		place: map[int]int{}, joinings: map[int]uint64{}, alive: map[int]bool{}, open: map[int]bool{}, gone: map[int]bool{},
	}
	for at, m := range f.members {
		if m.Index != f.index() {
			o.place[m.Index], o.alive[m.Index], o.open[m.Index] = at, true, true
			o.joinings[m.Index] = m.Joining
		}
	}
	f.mu.Lock()
	f.now = o
	f.mu.Unlock()
	return o
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

// start starts the parts of the other nodes. A node that was lost since it was gathered
// ends the attempt as if it were lost now.
func (o *others) start(ctx context.Context, port int) {
	if o == nil {
		return
	}
	o.order.MasterAddr, o.order.MasterPort = o.members[0].Address, port
	for index, at := range o.place {
		order := o.order
		order.Node = at
		if err := o.endpoint.Send(index, cmdStart, order); err != nil {
			go o.lost(ctx, index, o.joinings[index], true, err.Error()) // waits for the attempt's loop
		}
	}
}

// stop ends the processes of the other nodes. It may be called again.
func (o *others) stop(why string) {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.stopped {
		return
	}
	o.stopped = true
	for index := range o.alive {
		o.tell(index, cmdStop, stopCommand{o.order.Attempt, why})
	}
}

// tell sends a command to a node. A node that left gets none.
func (o *others) tell(index int, kind string, body any) {
	if err := o.endpoint.Send(index, kind, body); err != nil {
		o.log.Warn("command not sent to a node", "node", index, "command", kind, "error", err)
	}
}

// running counts the other nodes that have processes.
func (o *others) running() int {
	if o == nil {
		return 0
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.alive)
}

// events delivers what the attempt's loop must learn; nil without other nodes.
func (o *others) events() <-chan nodeEvent {
	if o == nil {
		return nil
	}
	return o.in
}

// abandon ends the processes of the other nodes when this node has started none, and
// waits until they are gone, lost, or limit has passed.
func (o *others) abandon(why string, limit time.Duration) {
	o.stop(why)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for o.running() > 0 {
		select {
		case e := <-o.events():
			o.ended(e)
		case <-timer.C:
			o.log.Warn("nodes have not ended their processes", "attempt", o.order.Attempt, "after", limit)
			return
		}
	}
}

// loopOver records that the attempt's loop takes no more events.
func (o *others) loopOver() {
	if o != nil {
		close(o.over)
	}
}

// close ends the parts of the other nodes, after the saves of the attempt have ended,
// and waits until each has ended, is lost, or limit has passed.
func (o *others) close(limit time.Duration) {
	if o == nil {
		return
	}
	o.mu.Lock()
	for index := range o.open {
		o.tell(index, cmdClose, attemptOnly{o.order.Attempt})
	}
	o.closed()
	o.mu.Unlock()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-o.closing:
	case <-timer.C:
		o.log.Warn("nodes have not ended their part of the attempt", "attempt", o.order.Attempt, "after", limit)
	}
	o.fleet.mu.Lock()
	o.fleet.now = nil
	o.fleet.mu.Unlock()
	all := []int{o.index()}
	for index := range o.place {
		all = append(all, index)
	}
	o.endpoint.Release(all)
}

// closed notes the end of the last part. The caller holds the lock.
func (o *others) closed() {
	if len(o.open) > 0 {
		return
	}
	select {
	case <-o.closing:
	default:
		close(o.closing)
	}
}

// give passes an event to the attempt's loop, unless that has ended.
func (o *others) give(e nodeEvent) {
	select {
	case o.in <- e:
	case <-o.over:
		o.ended(e)
	}
}

// ended notes that a node has no processes any more, if e reports that. The loop calls it
// for what it takes: it must not end before it has taken the cause.
func (o *others) ended(e nodeEvent) {
	if e.ended {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.alive, e.index)
	}
}

// leave frees the ranks that wait for ranks of another node.
func (o *others) leave(why error, ranks ...int) {
	o.mu.Lock()
	var fresh []int
	for _, rank := range ranks {
		if !o.gone[rank] {
			o.gone[rank] = true
			fresh = append(fresh, rank)
		}
	}
	o.mu.Unlock()
	for _, rank := range fresh {
		o.group.EndMessages(rank)
		o.group.Gone(rank, why)
		o.job.members.parted(rank)
	}
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
		f.lost(ctx, e.Node, e.Joining, true, e.Why)
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
	left := &events.NodeLeft{Job: f.cfg.Job, Node: index, Reason: session.Beginning(reason, session.MaxMessage), Lost: disorderly}
	if err := f.AppendOfRun(ctx, left); err != nil {
		f.log.Warn("loss of a node not recorded", "node", index, "error", err)
	}
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
		}
	case msgFailed, msgStopped:
		var b partEnd
		if !decode(&b) {
			return
		}
		out := nodeEvent{index: e.Node, ended: e.Kind == msgStopped}
		if b.Failed {
			out.end = &FailedError{Rank: b.Rank, Kind: b.Kind, Cause: f.name(e.Node) + ": " + b.Cause, Tail: b.Tail}
		}
		if out.ended {
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
		if err := o.group.Abort(ctx, b.Checkpoint, b.Reason, b.Ranks); err != nil {
			f.log.Warn("save not aborted", "checkpoint", b.Checkpoint, "node", e.Node, "error", err)
		}
	}
}

// loadLimit bounds a request about a load in bytes: it names each tensor that a node
// loads.
const loadLimit = 256 << 20

// loads serves one kind of requests of other nodes about the loads of an attempt.
func loads[In, Out any](f *fleet, do func(*restore.Meeting, context.Context, int, In) (Out, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		o, at, err := f.sender(r)
		var reply Out
		if err == nil {
			var in In
			if in, err = httpkit.Request[In](w, r, loadLimit); err == nil {
				reply, err = do(o.group.Meeting(), r.Context(), at, in)
			}
		}
		if err != nil {
			httpkit.Refuse(w, err)
			return
		}
		if err := httpkit.Reply(w, reply); err != nil {
			f.log.Error("answer about a load not sent", "error", err)
		}
	})
}

// sender returns the attempt that a request of another node concerns, and the node's
// place in its group.
func (f *fleet) sender(r *http.Request) (o *others, at int, err error) {
	attempt, err := strconv.Atoi(r.PathValue("attempt"))
	if err == nil {
		o = f.current(attempt)
	}
	if o == nil {
		return nil, 0, problem.Errorf(problem.Gone, "attempt %s is over", r.PathValue("attempt"))
	}
	at, member := o.place[nodes.From(r.Context())]
	if !member {
		return nil, 0, problem.Errorf(problem.Unauthorized, "node %d has no part in attempt %d", nodes.From(r.Context()), attempt)
	}
	return o, at, nil
}

// relayed serves the requests of ranks of other nodes that concern all ranks.
func (f *fleet) relayed(w http.ResponseWriter, r *http.Request) {
	o, at, err := f.sender(r)
	if err != nil {
		httpkit.Refuse(w, err)
		return
	}
	rank, err := strconv.Atoi(r.PathValue("rank"))
	if err != nil || !slices.Contains(o.order.Nodes[at], rank) {
		httpkit.Refuse(w, problem.Errorf(problem.Unauthorized, "rank %s of attempt %d is not on node %d", r.PathValue("rank"), o.order.Attempt, nodes.From(r.Context())))
		return
	}
	prefix := fmt.Sprintf("/v1/attempts/%s/ranks/%s", r.PathValue("attempt"), r.PathValue("rank"))
	if !strings.HasPrefix(r.URL.Path, prefix) {
		httpkit.Refuse(w, problem.Errorf(problem.NotFound, "no request %s", r.URL.Path))
		return
	}
	http.StripPrefix(prefix, o.group.Relayed(rank)).ServeHTTP(w, r)
}
