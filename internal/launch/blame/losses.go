package blame

import "time"

// lossesApart is how long after a loss another one of the same node is not one in a row: a machine
// that stays for longer is as good as others.
const lossesApart = time.Hour

// Losses counts the losses of one node in a row: no other node of the group is lost in between. It
// exists next to [Failures] because a commit ends no row here: a machine that crashes every few minutes
// trains and saves well until then, and each crash costs the group a restart.
type Losses struct {
	Limit int // losses after which a node is excluded; 0: never

	last     Node
	at       time.Time // of its last loss
	count    int       // losses in a row
	rebooted bool      // its machine was started again between two of them
	spent    bool      // a node was excluded, and no hour without a loss has passed
}

// Count returns how many losses in a row the last node has.
func (l *Losses) Count() int { return l.count }

// Lost counts the nodes that were lost in an attempt, which ended now. If it answers [TheNode] or
// [TheNetwork], there is one.
func (l *Losses) Lost(now time.Time, of []Node) Culprit {
	if len(of) == 0 {
		return Undecided
	}
	if now.Sub(l.at) > lossesApart {
		*l = Losses{Limit: l.Limit}
	}
	l.at = now
	if len(of) > 1 { // what they have in common is to blame, such as a switch or the coordinating node's own network
		l.last, l.count = Node{}, 0
		return Undecided
	}
	if l.count > 0 && again(l.last, of[0]) {
		l.rebooted = l.rebooted || l.last.Boot != of[0].Boot
	} else {
		l.count, l.rebooted = 0, false
	}
	l.last = of[0]
	l.count++
	switch {
	case l.Limit == 0 || l.count < l.Limit:
		return Undecided
	case l.spent:
		return TheNetwork
	}
	return TheNode
}

// again reports whether two lost nodes are one: on one host, with the same index or in the same
// run of its kernel. A trainer without an index of its own may get another one when it joins again.
func again(a, b Node) bool {
	return a.Host == b.Host && (a.Index == b.Index || a.Boot == b.Boot && a.Boot != "")
}

// Excluded notes that the node is gone.
func (l *Losses) Excluded() { *l = Losses{Limit: l.Limit, at: l.at, spent: true} }

// Boot returns the boot ID that the exclusion holds for; empty: for any. A reboot counts as a repair
// unless one between two losses has repaired nothing.
func (l *Losses) Boot() string {
	if l.rebooted {
		return ""
	}
	return l.last.Boot
}
