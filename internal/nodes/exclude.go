package nodes

import (
	"fmt"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrExcluded reports that the coordinator has excluded this machine from the job. It cannot
// join again.
var ErrExcluded = problem.New(problem.Failed, "this node has no part in the job any more")

// Excluded is a node that has no part in the job any more, and the event that reports it. Its
// machine is known by host and boot ID: another machine may have the host's name, as a pod of
// Kubernetes that was started again, and a machine that was booted again counts as repaired. Without a boot
// ID it is known by host and index: machines may have one name, such as localhost.
type Excluded struct {
	Node int // its index
	Host string
	Boot string // empty: unknown
	Why  string
}

func (Excluded) event() {}

// is reports whether a node is on the excluded machine. A node without an index of its own may be.
func (x Excluded) is(n Node) bool {
	if x.Boot == "" || n.Boot == "" {
		return x.Host == n.Host && (x.Node == n.Index || n.Index < 0)
	}
	return x.Host == n.Host && x.Boot == n.Boot
}

func (x Excluded) String() string { return fmt.Sprintf("node %d on %s: %s", x.Node, x.Host, x.Why) }

// barred returns the error for a node of an excluded machine.
func (r *roster) barred(n Node) error {
	if kept, ok := r.kept[n.Key]; ok && n.Index < 0 {
		n.Index = kept
	}
	for _, x := range r.excluded {
		if x.is(n) {
			return expulsion(x.Why)
		}
	}
	return nil
}

func expulsion(why string) error {
	return problem.Errorf(problem.Failed, "this machine is excluded from the job: %s; start the trainer on another machine, or on this one after its repair and a reboot", why)
}

// exclude ends the membership of a node for good. The node has no processes of a group.
func (r *roster) exclude(index int, joining uint64, why string) error {
	e := r.entries[index]
	switch {
	case e == nil || e.lost != "" || e.joining != joining:
		return problem.Errorf(problem.NotFound, "exclude node %d: no other live node has this index", index)
	case e.self:
		return problem.Errorf(problem.Invalid, "exclude node %d: it coordinates the job", index)
	case e.active:
		return problem.Errorf(problem.Conflict, "exclude node %d: its group has not ended", index)
	}
	r.drop(e, why)
	r.outcasts[e.session] = why
	x := Excluded{Node: index, Host: e.node.Host, Boot: e.node.Boot, Why: why}
	r.excluded = append(r.excluded, x)
	r.emit(x)
	return nil
}

// bar excludes the machine of a node that was lost: whatever has joined from there since is no member
// any more, and nothing can join from there. With an empty boot ID, a reboot of the machine changes
// nothing.
func (r *roster) bar(m Member, why string) error {
	x := Excluded{Node: m.Index, Host: m.Host, Boot: m.Boot, Why: why}
	var here []*entry
	for _, e := range r.ordered() {
		switch {
		case !x.is(e.node) || e.joining < m.Joining:
		case e.self:
			return problem.Errorf(problem.Invalid, "exclude node %d: its machine coordinates the job", m.Index)
		case e.active:
			return problem.Errorf(problem.Conflict, "exclude node %d: the group of node %d on its machine has not ended", m.Index, e.node.Index)
		default:
			here = append(here, e)
		}
	}
	for _, e := range here {
		r.drop(e, why)
		r.outcasts[e.session] = why
	}
	r.excluded = append(r.excluded, x)
	r.emit(x)
	return nil
}

// inherit bars the machines that an earlier coordinator has excluded.
func (r *roster) inherit(all []Excluded) {
	for _, x := range all {
		r.excluded = append(r.excluded, x)
		r.emit(x)
	}
}

// spares reports whether a group of at least so many nodes could start without a node and the
// others on its machine.
func (r *roster) spares(bad Node, least int) bool {
	x := Excluded{Node: bad.Index, Host: bad.Host, Boot: bad.Boot}
	n := 0
	for _, e := range r.entries {
		if e.node.Index != bad.Index && !x.is(e.node) && e.lost == "" && e.suspect == "" && !e.active && !e.node.Standby && !r.opening(e) {
			n++
		}
	}
	return n >= least
}

// Exclude ends the membership of a node for good, by its joining, and that of its machine: the
// event [Excluded] follows. Its trainer gets the reason with its next request. Exclude refuses the
// coordinator's own node, and a node of a group that was not released.
func (e *Endpoint) Exclude(node int, joining uint64, why string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.roster.exclude(node, joining, why)
	e.settle()
	return err
}

// Bar is [Endpoint.Exclude] for a node that was lost, and may have joined again since: it excludes its
// machine, and what has joined from there since that joining. With an empty boot ID, the machine stays
// excluded when it is booted again.
func (e *Endpoint) Bar(m Member, why string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.roster.bar(m, why)
	e.settle()
	return err
}

// Dispensable reports whether a group could start without the machine of a node: a spare is there,
// or the group may be smaller.
func (e *Endpoint) Dispensable(m Member) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.roster.spares(m.Node, e.c.Min)
}
