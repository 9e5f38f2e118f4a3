package launch

import (
	"fmt"

	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/nodes"
)

// FailedError is returned when one of the trial's failure budgets is exhausted.
type FailedError struct {
	Attempt  int
	Restarts int        // used from the budget
	Kind     blame.Kind // of the failure; the zero value is a worker's
	Cause    string     // root cause: rank, and exit code or signal
	Advice   string     // further findings and the next step; may be empty
	Rank     int        // of the root cause; -1 if not a single rank
	Tail     []string   // last lines of that rank's output

	failed map[int]bool   // indexes of the nodes whose ranks failed by themselves
	sick   map[int]string // how a device of another node failed, by the node's index
	lost   []nodes.Member // nodes that were lost in the attempt, each with the reason
}

// complete takes the output of the rank from a later report of its node about the same failure.
func (e *FailedError) complete(later *FailedError) {
	if later.Rank == e.Rank && len(later.Tail) > 0 {
		e.Tail = later.Tail
	}
}

func (e *FailedError) Error() string {
	of := ""
	if e.Kind.Or() == blame.Infrastructure {
		of = " for failures of the infrastructure"
	}
	text := fmt.Sprintf("attempt %d failed and no restart%s is left (%d used): %s", e.Attempt, of, e.Restarts, e.Cause)
	if e.Advice != "" {
		text += "; " + e.Advice
	}
	return text
}

// blames reports whether a failure is that of the rank that it names, on the node of an index, and
// no rank of another node failed by itself in the same attempt.
func (e *FailedError) blames(node int) bool {
	for other, did := range e.failed {
		if did && other != node {
			return false
		}
	}
	return e.Rank >= 0 && e.Kind.Or() == blame.Worker && !blame.Blameless(e.Cause, e.Tail)
}

// fell notes the nodes that were lost in the attempt. Ranks of other nodes may fail first, because they
// have lost their connections: that is a loss of the node too, and no failure of the workers.
func (e *FailedError) fell(lost []nodes.Member) {
	if e == nil || len(lost) == 0 {
		return
	}
	e.lost = lost
	if e.Kind.Or() == blame.Worker && blame.Blameless(e.Cause, e.Tail) {
		e.Kind = blame.Infrastructure
		e.Cause += fmt.Sprintf("; node %d is lost: %s", lost[0].Index, lost[0].Why)
	}
}
