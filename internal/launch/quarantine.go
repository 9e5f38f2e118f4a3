package launch

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/nodes"
)

// quarantine excludes nodes with a device that failed in an attempt, or else the node whose ranks
// have caused its end, if they fail again and again. progress means that a checkpoint was committed since
// the failure before. It returns for how many failures the workers' budget is not to be charged; 0 if no
// node was excluded.
func (f *fleet) quarantine(failures *blame.Failures, cause *FailedError, progress bool) (free int) {
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
	switch failures.Failed(blamedOf(m), found && cause.blames(m.Index), progress) {
	case blame.TheProgram:
		f.log.Warn("node is not excluded: ranks fail on a second node alike; the program may be bad", "node", m.Index, "host", m.Host, "failures", failures.Count())
	case blame.TheNode:
		free = failures.Count()
		why := fmt.Sprintf("its ranks failed %d times and those of other nodes did not; at last %s", free, strings.TrimPrefix(cause.Cause, fmt.Sprintf("node %d: ", m.Index)))
		if f.dismiss(m, why) {
			failures.Excluded()
			return free
		}
	}
	return 0
}

// blamedOf returns a node as package blame knows it.
func blamedOf(m nodes.Member) blame.Node {
	return blame.Node{Index: m.Index, Host: m.Host, Boot: m.Boot}
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

// quarantineLost excludes the node that was lost in an attempt, if it is lost again and again. It returns
// for how many losses the budget of the infrastructure is not to be charged; 0 if no node was excluded.
func (f *fleet) quarantineLost(losses *blame.Losses, cause *FailedError) (free int) {
	if f == nil || f.job.members != nil {
		return 0
	}
	of := make([]blame.Node, len(cause.lost))
	for i, m := range cause.lost {
		of[i] = blamedOf(m)
	}
	who := losses.Lost(time.Now(), of)
	if who == blame.Undecided {
		return 0
	}
	m, count := cause.lost[0], losses.Count()
	if who == blame.TheNetwork {
		f.log.Warn("node is not excluded: a second node is lost again and again; the network of the coordinating node may be bad", "node", m.Index, "host", m.Host, "losses", count)
		return 0
	}
	why := fmt.Sprintf("it was lost %d times and no other node was; at last %s", count, m.Why)
	m.Boot = losses.Boot()
	if !f.dismissWith(m, why, func() error { return f.endpoint.Bar(m, why) }) {
		return 0
	}
	losses.Excluded()
	return count
}
