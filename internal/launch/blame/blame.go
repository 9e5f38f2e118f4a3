// Package blame judges the failed attempts of a job: what each costs, and which node is bad. It reads no
// clock and no file, and starts nothing: its caller tells it how attempts have ended, and acts on what it answers.
//
//	Kind       what caused the end of an attempt
//	Budgets    how many restarts the failures of each kind may cost
//	Backoff    how long to wait before the next attempt
//	CrashLoop  attempts that fail alike after resuming from the same checkpoint
//	Blameless  failures of ranks that follow from the end of others
//	Failures   failures in a row of the ranks of one node
//	Losses     losses in a row of one node
package blame

import (
	"slices"
	"strings"
)

// Node is a node of a group. Nothing of it is unique: a trainer may join again with another index, and
// machines may have one host name.
type Node struct {
	Index int
	Host  string
	Boot  string // boot ID of its kernel; empty: unknown
}

// Culprit is what is to blame for failures.
type Culprit int

// Culprits.
const (
	Undecided  Culprit = iota // too few failures in a row
	TheNode                   // it must be excluded
	TheProgram                // ranks fail so on a second node
	TheNetwork                // a second node is lost so
)

// Failures counts the failures of the ranks of one node in a row: no rank of another node fails, and
// no checkpoint is committed.
type Failures struct {
	Limit int // failures after which a node is excluded; 0: never

	node  Node
	count int  // consecutive failures of its ranks
	spent bool // a node was excluded, and no checkpoint was committed since
}

// Count returns how many failures in a row the last node has.
func (f *Failures) Count() int { return f.count }

// Failed counts the end of an attempt, for which a node may be to blame. progress means that a
// checkpoint was committed since the end before. A node that joins again with its index and host is the
// same: two trainers of one machine are two nodes.
func (f *Failures) Failed(node Node, blamed, progress bool) Culprit {
	if progress {
		f.count, f.spent = 0, false
	}
	if node.Index != f.node.Index || node.Host != f.node.Host || !blamed {
		f.node, f.count = node, 0
	}
	if blamed {
		f.count++
	}
	switch {
	case f.Limit == 0 || f.count < f.Limit:
		return Undecided
	case f.spent:
		return TheProgram
	}
	return TheNode
}

// Excluded notes that the node is gone.
func (f *Failures) Excluded() { *f = Failures{Limit: f.Limit, spent: true} }

// blamelessTexts are parts of messages of ranks that fail because others do not answer: a collective
// times out everywhere, and the connections of a dead rank break at all others.
var blamelessTexts = []string{
	"collective operation timeout", "watchdog caught collective", "watchdog got stuck", "nccl remote process exited", "ncclremoteerror", "ncclsystemerror",
	"timed out waiting", "wait timeout", "connection timed out", "client socket has timed out", "connection refused", "no route to host",
	"connection closed by peer", "connection reset by peer", "connection was likely closed", "broken pipe",
	"which did not join", "is a collective, and", "out of step since an earlier collective", "no longer receives messages", "does not receive its messages",
}

// Blameless reports whether a rank failed because others do not answer, by its failure and the end
// of its output.
func Blameless(cause string, tail []string) bool {
	text := strings.ToLower(cause + "\n" + strings.Join(tail, "\n"))
	return slices.ContainsFunc(blamelessTexts, func(part string) bool { return strings.Contains(text, part) })
}
