package launch

import "fmt"

// FailureKind says whose fault the end of an attempt is, and so which budget
// pays for the next one.
type FailureKind string

// Kinds of failures. The zero value is a [WorkerFailure].
const (
	WorkerFailure         FailureKind = "worker"         // an exit code, a signal, a hang, a death at the start
	InfrastructureFailure FailureKind = "infrastructure" // a device or the log: the program did nothing wrong
	PreemptionFailure     FailureKind = "preemption"     // asked for from outside; free of charge
)

// or is the kind, where the zero value stands for the worker's.
func (k FailureKind) or() FailureKind {
	if k == "" {
		return WorkerFailure
	}
	return k
}

// budgets count the restarts of a job, by what made them necessary.
type budgets struct {
	workers, infrastructure int // restarts that are allowed; -1: any number

	usedByWorkers, usedByInfrastructure int
}

// charge takes one restart for a failure, and reports false when none is left.
func (b *budgets) charge(kind FailureKind) bool {
	allowed, used := b.workers, &b.usedByWorkers
	switch kind.or() {
	case PreemptionFailure:
		return true
	case InfrastructureFailure:
		allowed, used = b.infrastructure, &b.usedByInfrastructure
	}
	if allowed >= 0 && *used >= allowed {
		return false
	}
	*used++
	return true
}

// used is how many restarts a kind of failure has cost.
func (b *budgets) used(kind FailureKind) int {
	switch kind.or() {
	case PreemptionFailure:
		return 0
	case InfrastructureFailure:
		return b.usedByInfrastructure
	}
	return b.usedByWorkers
}

// FailedError says that one of the trial's failure budgets is used up.
type FailedError struct {
	Attempt  int
	Restarts int         // used of the budget
	Kind     FailureKind // of the failure; the zero value is a worker's
	Cause    string      // root cause: rank, and exit code or signal
	Advice   string      // what else is known of it, and the next step; or empty
	Rank     int         // of the root cause; -1 when it was not one rank
	Tail     []string    // last lines of that rank's output
}

func (e *FailedError) Error() string {
	of := ""
	if e.Kind.or() == InfrastructureFailure {
		of = " for failures of the infrastructure"
	}
	text := fmt.Sprintf("attempt %d failed and no restart%s is left (%d used): %s", e.Attempt, of, e.Restarts, e.Cause)
	if e.Advice != "" {
		text += "; " + e.Advice
	}
	return text
}
