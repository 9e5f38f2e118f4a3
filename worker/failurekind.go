package worker

// FailureKind says whose fault the end of an attempt is, and so which budget
// pays for the next one.
type FailureKind string

// Kinds of failures. The zero value is a [WorkerFailure].
const (
	WorkerFailure         FailureKind = "worker"         // an exit code, a signal, a hang, a death at the start
	InfrastructureFailure FailureKind = "infrastructure" // a device or the log: the program did nothing wrong
	PreemptionFailure     FailureKind = "preemption"     // asked for from outside; free of charge
)
