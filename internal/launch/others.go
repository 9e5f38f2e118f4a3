package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session"
)

// others are the other nodes of an attempt's group.
type others struct {
	*fleet
	work  context.Context
	group *session.Group
	order startOrder
	// partners has for each place the places that keep its slots; nil: there are no replicas.
	partners [][]int
	ahead    bool           // nodes fetch slots of the checkpoint to resume from before their ranks ask
	in       chan nodeEvent // for the attempt's loop
	over     chan struct{}  // closed when the loop has ended
	closing  chan struct{}  // closed when all parts have ended

	mu       sync.Mutex
	place    map[int]int                // in the group, by the node's index
	joinings map[int]uint64             // of these nodes, by index
	alive    map[int]bool               // indexes of nodes with processes
	open     map[int]bool               // indexes of nodes whose part has not ended
	gone     map[int]bool               // ranks
	stopped  bool                       // the nodes have the command to stop
	overdue  map[int]context.CancelFunc // by node's index: see hurry
	obeyed   map[int]bool               // indexes of nodes whose processes have ended, by their own word
	lostOnes map[int]bool               // indexes of nodes that take no command any more
	fallen   []nodes.Member             // those of them whose trainer did not end in order, with the reason

	forwarding sync.Mutex // held while commands are sent that the nodes must get in order
	started    bool       // the nodes have the command to start
	early      []session.Forwarded
}

var _ session.Forwarder = (*others)(nil)

// eventsOfNode is the most events that the attempt's loop learns of one node: hello, failed,
// stopped, lost, and that its loss is recorded. The messages of nodes must not wait for a loop that waits for the log.
const eventsOfNode = 5

// nodeEvent is what the attempt's loop learns of another node.
type nodeEvent struct {
	index int
	hello bool
	ended bool // none of its processes is left
	end   *FailedError
}

// others makes the others of an attempt; nil if the job has one node. The caller calls begin.
func (f *fleet) others(work context.Context, order startOrder) *others {
	if f == nil {
		return nil
	}
	o := &others{
		fleet: f, work: work, order: order, in: make(chan nodeEvent, eventsOfNode*len(f.members)), over: make(chan struct{}), closing: make(chan struct{}),
		place: map[int]int{}, joinings: map[int]uint64{}, alive: map[int]bool{}, open: map[int]bool{}, gone: map[int]bool{}, overdue: map[int]context.CancelFunc{}, obeyed: map[int]bool{}, lostOnes: map[int]bool{},
	}
	o.partners = f.partners()
	o.ahead = o.partners != nil && f.job.living == nil && f.job.ownParts(work, order.Resume)
	for at, m := range f.members {
		if m.Index != f.own() {
			o.place[m.Index], o.alive[m.Index], o.open[m.Index] = at, true, true
			o.joinings[m.Index] = m.Joining
		}
	}
	return o
}

// begin passes what concerns the attempt to its group.
func (o *others) begin(g *session.Group) {
	if o == nil {
		return
	}
	o.group = g
	o.fleet.mu.Lock()
	o.fleet.now = o
	o.fleet.mu.Unlock()
}

// start starts the parts of the other nodes. A node that was lost since it was gathered
// ends the attempt as if it were lost now.
func (o *others) start(ctx context.Context, port int) {
	if o == nil {
		return
	}
	o.forwarding.Lock()
	defer o.forwarding.Unlock()
	o.order.MasterAddr, o.order.MasterPort = o.members[0].Address, port
	for index, at := range o.place {
		order := o.order
		order.Node, order.Replicas = at, o.replicaOrder(at)
		if err := o.endpoint.SendTo(index, o.joinings[index], cmdStart, order); err != nil {
			go o.lost(ctx, index, o.joinings[index], true, err.Error()) // waits for the attempt's loop
		}
	}
	o.started = true
	for _, e := range o.early {
		o.all(cmdEvent, e)
	}
	o.early = nil
}

// must sends a command to a node of the started group. A node that does not take it is
// expelled, unless the endpoint reports its end anyway.
func (o *others) must(index int, kind string, body any) {
	err := o.endpoint.SendTo(index, o.joinings[index], kind, body)
	if err != nil && !slices.Contains(problem.Kinds(err), problem.Gone) {
		o.expel(index, err.Error())
	}
}

// Event implements [session.Forwarder]. A node cannot use an event before its part has
// started.
func (o *others) Event(e session.Forwarded) {
	o.forwarding.Lock()
	defer o.forwarding.Unlock()
	if !o.started {
		o.early = append(o.early, e)
		return
	}
	o.all(cmdEvent, e)
}

// all sends a command to all nodes whose part has not ended.
func (o *others) all(kind string, body any) {
	text, err := json.Marshal(body)
	if err != nil {
		o.log.Error("command not sent to the nodes", "command", kind, "error", err)
		return
	}
	o.mu.Lock()
	to := slices.Collect(maps.Keys(o.open))
	o.mu.Unlock()
	for _, index := range to {
		o.must(index, kind, json.RawMessage(text))
	}
}

// Ask implements [session.Forwarder].
func (o *others) Ask(checkpoint string, rank int) {
	for index, at := range o.place {
		if slices.Contains(o.order.Nodes[at], rank) {
			o.must(index, cmdAsk, askedPlan{o.order.Attempt, checkpoint, rank})
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
		if o.lostOnes[index] {
			continue
		}
		o.tell(index, cmdStop, stopCommand{o.order.Attempt, why})
		o.hurry(index)
	}
}

// hurry expels a node that beats and does not end its part, such as one whose disk hangs: the
// attempt's loop waits until no node has processes. While the log does not answer, nodes
// cannot end their parts, and no time passes. The caller holds the lock.
func (o *others) hurry(index int) {
	if o.overdue[index] != nil || o.obeyed[index] {
		return
	}
	limit := 2 * (o.cfg.Grace + o.cfg.DrainTimeout)
	late, cancel := o.group.Answering(o.work, limit)
	o.overdue[index] = cancel
	go func() {
		<-late.Done()
		o.mu.Lock()
		left := o.alive[index] && !o.obeyed[index] && errors.Is(late.Err(), context.DeadlineExceeded)
		o.mu.Unlock()
		if left {
			o.expel(index, fmt.Sprintf("its processes have not ended for %v", limit))
		}
	}()
}

// expel ends the membership of a node, which is lost after T.
func (o *others) expel(index int, why string) {
	if err := o.endpoint.Expel(index, o.joinings[index], why); err != nil {
		o.log.Debug("node not expelled", "node", index, "error", err)
	}
}

// tell sends a command to a node. A node that left gets none.
func (o *others) tell(index int, kind string, body any) {
	if err := o.endpoint.SendTo(index, o.joinings[index], kind, body); err != nil {
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
	if o == nil {
		return
	}
	close(o.over)
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, cancel := range o.overdue {
		cancel()
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

// leaveAlone forgets the attempt: the other nodes continue it.
func (o *others) leaveAlone() {
	o.fleet.mu.Lock()
	defer o.fleet.mu.Unlock()
	o.fleet.now = nil
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
	case <-o.over:
		o.ended(e)
		return
	default:
	}
	select {
	case o.in <- e:
	case <-o.over:
		o.ended(e)
	}
}

// mourn has the attempt's loop end the group without a node that is lost. The node's part ends when
// that is recorded: see lost. disorderly and reason are as there.
func (o *others) mourn(index int, joining uint64, why error, disorderly bool, reason string) {
	if o == nil {
		return
	}
	o.mu.Lock()
	at, member := o.place[index]
	ends := member && o.joinings[index] <= joining && o.trains(index) && !o.lostOnes[index]
	if ends {
		o.lostOnes[index] = true
	}
	if ends && disorderly {
		m := o.members[at]
		m.Why = reason
		o.fallen = append(o.fallen, m)
	}
	o.mu.Unlock()
	if ends {
		o.give(nodeEvent{index: index, end: &FailedError{Rank: -1, Kind: blame.Infrastructure, Cause: why.Error()}})
		o.stop(why.Error()) // the loop may wait for the log too
	}
}

// trains reports whether a node has processes, by its own word. The loop may learn later that it has
// none: its loss is no failure of the group then, which depends on the node's word and not on how fast the loop is. The
// caller holds the lock.
func (o *others) trains(index int) bool { return o.alive[index] && !o.obeyed[index] }

// losses returns the nodes that were lost in the attempt.
func (o *others) losses() []nodes.Member {
	if o == nil {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.fallen)
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
