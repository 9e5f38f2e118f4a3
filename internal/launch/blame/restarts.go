package blame

import (
	"fmt"
	"time"
)

// Kind is what caused the end of an attempt, which decides the budget for the next attempt.
type Kind string

// Kinds of failures. The zero value is a [Worker] failure.
const (
	Worker         Kind = "worker"         // an exit code, a signal, a hang, a death at the start
	Infrastructure Kind = "infrastructure" // a device, a node or the log: not the program's fault
	Preemption     Kind = "preemption"     // requested from outside; free of charge
)

// Or returns the kind, with [Worker] for the zero value.
func (k Kind) Or() Kind {
	if k == "" {
		return Worker
	}
	return k
}

// Budgets count the restarts of a job, by the kind of failure that caused them.
type Budgets struct {
	Workers, Infrastructure int // allowed restarts; -1: any number

	usedByWorkers, usedByInfrastructure int
}

// Charge takes one restart for a failure, and returns false if none is left.
func (b *Budgets) Charge(kind Kind) bool {
	allowed, used := b.Workers, &b.usedByWorkers
	switch kind.Or() {
	case Preemption:
		return true
	case Infrastructure:
		allowed, used = b.Infrastructure, &b.usedByInfrastructure
	}
	if allowed >= 0 && *used >= allowed {
		return false
	}
	*used++
	return true
}

// Excuse takes back the charges of so many failures of a kind: a node was to blame.
func (b *Budgets) Excuse(kind Kind, failures int) {
	used := &b.usedByWorkers
	if kind.Or() == Infrastructure {
		used = &b.usedByInfrastructure
	}
	*used = max(0, *used-max(0, failures))
}

// Used returns how many restarts a kind of failure has cost.
func (b *Budgets) Used(kind Kind) int {
	switch kind.Or() {
	case Preemption:
		return 0
	case Infrastructure:
		return b.usedByInfrastructure
	}
	return b.usedByWorkers
}

// Waits between attempts that end at once: otherwise a program that cannot run
// would fill the log with attempts.
const (
	firstBackoff = 100 * time.Millisecond
	maxBackoff   = 10 * time.Second
)

// Backoff computes how long to wait before the next attempt.
type Backoff struct {
	Enough time.Duration // an attempt that lived so long is no such failure

	next time.Duration // zero: the first
}

// After returns the wait after an attempt that lived for a while, and committed a
// checkpoint or not.
func (b *Backoff) After(lived time.Duration, committed bool) time.Duration {
	if committed || lived >= b.Enough {
		b.next = 0
		return 0
	}
	b.next = max(firstBackoff, b.next)
	wait := b.next
	b.next = min(2*wait, maxBackoff)
	return wait
}

// CrashLoop detects consecutive attempts that fail alike after resuming from the
// same checkpoint, without a commit in between. The next attempt will most likely
// fail alike too.
type CrashLoop struct {
	Run string // as the user names it

	resume string
	cause  string
	rank   int
	first  int // attempt; 0: none has failed
}

// Failed records the end of an attempt that resumed from a checkpoint ("": none), by the failure of a rank;
// stands means that no checkpoint was committed since. It returns a message for the user, or "".
func (c *CrashLoop) Failed(attempt int, resume string, stands bool, rank int, cause string) string {
	alike := c.first > 0 && c.resume == resume && c.cause == cause && c.rank == rank
	if !stands {
		*c = CrashLoop{Run: c.Run} // it made progress
		return ""
	}
	if !alike {
		*c = CrashLoop{c.Run, resume, cause, rank, attempt}
		return ""
	}
	which := fmt.Sprintf("attempts %d and %d", c.first, attempt)
	if attempt > c.first+1 {
		which = fmt.Sprintf("attempts %d to %d", c.first, attempt)
	}
	if resume == "" {
		return which + " failed alike, each from the beginning: the program or its configuration may be bad"
	}
	return fmt.Sprintf("%[1]s failed alike after resuming from %[2]s: the checkpoint or the code may be bad; `ckptstore ls %[3]s` lists earlier ones, resume from one with --resume %[3]s@NAME", which, resume, c.Run)
}
