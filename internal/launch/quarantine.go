package launch

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/nodes"
)

// blame counts the failures of the ranks of one node in a row: no rank of another node fails, and
// no checkpoint is committed.
type blame struct {
	limit int // failures after which a node is excluded; 0: never

	node  blamed
	count int  // consecutive failures of its ranks
	spent bool // a node was excluded, and no checkpoint was committed since
}

// blamed is a node of a group. A node that joins again with its index and host is the same.
type blamed struct {
	index int
	host  string
}

// culprit is what is to blame for failures.
type culprit int

const (
	nobody     culprit = iota // yet
	theNode                   // it must be excluded
	theProgram                // ranks fail so on a second node
	theNetwork                // a second node is lost so
)

// failed counts the end of an attempt, for which a node may be to blame. progress means that a
// checkpoint was committed since the end before.
func (b *blame) failed(node blamed, isBlamed, progress bool) culprit {
	if progress {
		b.count, b.spent = 0, false
	}
	if node != b.node || !isBlamed {
		b.node, b.count = node, 0
	}
	if isBlamed {
		b.count++
	}
	switch {
	case b.limit == 0 || b.count < b.limit:
		return nobody
	case b.spent:
		return theProgram
	}
	return theNode
}

// excluded notes that the node is gone.
func (b *blame) excluded() { *b = blame{limit: b.limit, spent: true} }

// blames reports whether a failure is that of the rank that it names, on the node of an index, and
// no rank of another node failed by itself in the same attempt.
func (e *FailedError) blames(node int) bool {
	for other, did := range e.failed {
		if did && other != node {
			return false
		}
	}
	return e.Rank >= 0 && e.Kind.or() == WorkerFailure && !blameless(e.Cause, e.Tail)
}

// blamelessTexts are parts of messages of ranks that fail because others do not answer: a collective
// times out everywhere, and the connections of a dead rank break at all others.
var blamelessTexts = []string{
	"collective operation timeout", "watchdog caught collective", "watchdog got stuck", "nccl remote process exited", "ncclremoteerror", "ncclsystemerror",
	"timed out waiting", "wait timeout", "connection timed out", "client socket has timed out", "connection refused", "no route to host",
	"connection closed by peer", "connection reset by peer", "connection was likely closed", "broken pipe",
	"which did not join", "is a collective, and", "out of step since an earlier collective", "no longer receives messages", "does not receive its messages",
}

// blameless reports whether a rank failed because others do not answer, by its failure and the end
// of its output.
func blameless(cause string, tail []string) bool {
	text := strings.ToLower(cause + "\n" + strings.Join(tail, "\n"))
	return slices.ContainsFunc(blamelessTexts, func(part string) bool { return strings.Contains(text, part) })
}

// quarantine excludes nodes with a device that failed in an attempt, or else the node whose ranks
// have caused its end, if they fail again and again. progress means that a checkpoint was committed since the failure before. It returns for
// how many failures the workers' budget is not to be charged; 0 if no node was
// excluded.
func (f *fleet) quarantine(b *blame, cause *FailedError, progress bool) (free int) {
	if f == nil || f.job.members != nil {
		return 0
	}
	for _, m := range f.members {
		if why := cause.sick[m.Index]; why != "" && f.dismiss(m, why) {
			free = 1 // whatever the ranks did
		}
	}
	if free > 0 {
		return free
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

// dismiss excludes a node that has no part in a running group, if the job may go without it.
func (f *fleet) dismiss(m nodes.Member, why string) bool {
	return f.dismissWith(m, why, func() error { return f.endpoint.Exclude(m.Index, m.Joining, why) })
}

// dismissWith is dismiss with another way to exclude the node.
func (f *fleet) dismissWith(m nodes.Member, why string, exclude func() error) bool {
	kept := f.cfg.keeps(m.Index, m.Index == f.index(), func() bool { return f.endpoint.Dispensable(m) })
	if kept == "" {
		err := exclude()
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

// lossesApart is how long after a loss another one of the same node is not one in a row: a machine
// that stays for longer is as good as others.
const lossesApart = time.Hour

// losses counts the losses of one node in a row: no other node of the group is lost in between. It
// exists next to blame because a commit ends no row here: a machine that crashes every few minutes
// trains and saves well until then, and each crash costs the group a restart.
type losses struct {
	limit int // losses after which a node is excluded; 0: never

	last     nodes.Member // the node
	at       time.Time    // of its last loss
	count    int          // losses in a row
	rebooted bool         // its machine was started again between two of them
	spent    bool         // a node was excluded, and no hour without a loss has passed
}

// lost counts the nodes that were lost in an attempt.
func (l *losses) lost(now time.Time, of []nodes.Member) culprit {
	if len(of) == 0 {
		return nobody
	}
	if now.Sub(l.at) > lossesApart {
		*l = losses{limit: l.limit}
	}
	l.at = now
	if len(of) > 1 { // what they have in common is to blame, such as a switch or this node's own network
		l.last, l.count = nodes.Member{}, 0
		return nobody
	}
	if l.count > 0 && sameNode(l.last, of[0]) {
		l.rebooted = l.rebooted || l.last.Boot != of[0].Boot
	} else {
		l.count, l.rebooted = 0, false
	}
	l.last = of[0]
	l.count++
	switch {
	case l.limit == 0 || l.count < l.limit:
		return nobody
	case l.spent:
		return theNetwork
	}
	return theNode
}

// sameNode reports whether two members are one node: on one host, with the same index or in the same
// run of its kernel. A trainer without an index of its own may get another one when it joins again.
func sameNode(a, b nodes.Member) bool {
	return a.Host == b.Host && (a.Index == b.Index || a.Boot == b.Boot && a.Boot != "")
}

// excluded notes that the node is gone.
func (l *losses) excluded() { *l = losses{limit: l.limit, at: l.at, spent: true} }

// boot returns the boot ID that the exclusion holds for; empty: for any. A reboot counts as a repair
// unless one between two losses has repaired nothing.
func (l *losses) boot() string {
	if l.rebooted {
		return ""
	}
	return l.last.Boot
}

// fell notes the nodes that were lost in the attempt. Ranks of other nodes may fail first, because they
// have lost their connections: that is a loss of the node too, and no failure of the workers.
func (e *FailedError) fell(lost []nodes.Member) {
	if e == nil || len(lost) == 0 {
		return
	}
	e.lost = lost
	if e.Kind.or() == WorkerFailure && blameless(e.Cause, e.Tail) {
		e.Kind = InfrastructureFailure
		e.Cause += fmt.Sprintf("; node %d is lost: %s", lost[0].Index, lost[0].Why)
	}
}

// quarantineLost excludes the node that was lost in an attempt, if it is lost again and again. It returns for how
// many losses the budget of the infrastructure is not to be charged; 0 if no node was
// excluded.
func (f *fleet) quarantineLost(l *losses, cause *FailedError) (free int) {
	if f == nil || f.job.members != nil {
		return 0
	}
	who := l.lost(time.Now(), cause.lost)
	m, count := l.last, l.count
	switch who {
	case theNetwork:
		f.log.Warn("node is not excluded: a second node is lost again and again; the network of the coordinating node may be bad", "node", m.Index, "host", m.Host, "losses", count)
	case theNode:
		why := fmt.Sprintf("it was lost %d times and no other node was; at last %s", count, m.Why)
		m.Boot = l.boot()
		if f.dismissWith(m, why, func() error { return f.endpoint.Bar(m, why) }) {
			l.excluded()
			return count
		}
	}
	return 0
}
