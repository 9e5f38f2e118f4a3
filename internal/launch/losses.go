package launch

import (
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/internal/nodes"
)

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
// many losses the budget of the infrastructure is not to be charged, this one included; 0 if no node was
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
