package launch

import (
	"fmt"
	"time"
)

// FailureKind is what caused the end of an attempt, which decides the budget for
// the next attempt.
type FailureKind string

// Kinds of failures. The zero value is a [WorkerFailure].
const (
	WorkerFailure         FailureKind = "worker"         // an exit code, a signal, a hang, a death at the start
	InfrastructureFailure FailureKind = "infrastructure" // a device or the log: not the program's fault
	PreemptionFailure     FailureKind = "preemption"     // requested from outside; free of charge
)

// or returns the kind, with WorkerFailure for the zero value.
func (k FailureKind) or() FailureKind {
	if k == "" {
		return WorkerFailure
	}
	return k
}

// budgets count the restarts of a job, by the kind of failure that caused them.
type budgets struct {
	workers, infrastructure int // allowed restarts; -1: any number

	usedByWorkers, usedByInfrastructure int
}

// charge takes one restart for a failure, and returns false if none is left.
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

// excuse takes back the charges of so many failures of workers: a node was to blame.
func (b *budgets) excuse(failures int) { b.usedByWorkers = max(0, b.usedByWorkers-failures) }

// used returns how many restarts a kind of failure has cost.
func (b *budgets) used(kind FailureKind) int {
	switch kind.or() {
	case PreemptionFailure:
		return 0
	case InfrastructureFailure:
		return b.usedByInfrastructure
	}
	return b.usedByWorkers
}

// FailedError is returned when one of the trial's failure budgets is exhausted.
type FailedError struct {
	Attempt  int
	Restarts int         // used from the budget
	Kind     FailureKind // of the failure; the zero value is a worker's
	Cause    string      // root cause: rank, and exit code or signal
	Advice   string      // further findings and the next step; may be empty
	Rank     int         // of the root cause; -1 if not a single rank
	Tail     []string    // last lines of that rank's output

	failed map[int]bool   // indexes of the nodes whose ranks failed by themselves
	sick   map[int]string // how a device of another node failed, by the node's index
}

// complete takes the output of the rank from a later report of its node about the same failure.
func (e *FailedError) complete(later *FailedError) {
	if later.Rank == e.Rank && len(later.Tail) > 0 {
		e.Tail = later.Tail
	}
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

// Waits between attempts that end at once: otherwise a program that cannot run
// would fill the log with attempts.
const (
	firstBackoff = 100 * time.Millisecond
	maxBackoff   = 10 * time.Second
)

// backoff computes how long to wait before the next attempt.
type backoff struct {
	enough time.Duration // an attempt that lived so long is no such failure
	next   time.Duration // zero: the first
}

// after returns the wait after an attempt that lived for a while, and committed a
// checkpoint or not.
func (b *backoff) after(lived time.Duration, committed bool) time.Duration {
	if committed || lived >= b.enough {
		b.next = 0
		return 0
	}
	b.next = max(firstBackoff, b.next)
	wait := b.next
	b.next = min(2*wait, maxBackoff)
	return wait
}

// crashLoop detects consecutive attempts that fail alike after resuming from the
// same checkpoint, without a commit in between. The next attempt will most likely
// fail alike too.
type crashLoop struct {
	resume string
	cause  string
	rank   int
	first  int // attempt; 0: none has failed
}

// failed records the end of an attempt that resumed from a checkpoint; stands
// means that no checkpoint was committed since. It returns a message for the
// user, or "".
func (c *crashLoop) failed(attempt int, resume string, stands bool, cause *FailedError, run string) string {
	alike := c.first > 0 && c.resume == resume && c.cause == cause.Cause && c.rank == cause.Rank
	if !stands {
		*c = crashLoop{} // it made progress
		return ""
	}
	if !alike {
		*c = crashLoop{resume, cause.Cause, cause.Rank, attempt}
		return ""
	}
	which := fmt.Sprintf("attempts %d and %d", c.first, attempt)
	if attempt > c.first+1 {
		which = fmt.Sprintf("attempts %d to %d", c.first, attempt)
	}
	if resume == "" {
		return which + " failed alike, each from the beginning: the program or its configuration may be bad"
	}
	return fmt.Sprintf("%s failed alike after resuming from %s: the checkpoint or the code may be bad; `ckptstore ls %s` lists earlier ones, resume from one with --resume %s@NAME", which, resume, run, run)
}
