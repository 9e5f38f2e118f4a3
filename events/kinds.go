package events

import "strings"

// Kind is the last two tokens of a subject: "checkpoint.committed".
type Kind string

// Family returns the first token of the kind.
func (k Kind) Family() string {
	family, _, _ := strings.Cut(string(k), ".")
	return family
}

// Known reports whether this version of the program has a body type for k.
func (k Kind) Known() bool { _, ok := kinds[k]; return ok }

// Decides reports whether events of this kind are decisions.
func (k Kind) Decides() bool { return kinds[k].decides }

// Body is the typed content of an event. Each implementation belongs to one [Kind].
type Body interface{ Kind() Kind }

type spec struct {
	decides bool
	newest  int         // version; 0 is 1
	zero    func() Body // a pointer to a new, empty body
}

func fact[T any, P interface {
	*T
	Body
}]() spec {
	return spec{zero: func() Body { return P(new(T)) }}
}

func decision[T any, P interface {
	*T
	Body
}]() spec {
	s := fact[T, P]()
	s.decides = true
	return s
}

func (s spec) until(version int) spec {
	s.newest = version
	return s
}

// kinds is the one table of all kinds. Changes are additive; each kind and
// version has a golden file in testdata/golden that is never edited.
var kinds = map[Kind]spec{
	"store.created": decision[StoreCreated](),

	"log.voided": decision[LogVoided](),

	"audit.sealed": decision[AuditSealed](),

	"access.granted": decision[AccessGranted](),
	"access.revoked": decision[AccessRevoked](),

	"job.started":       fact[JobStarted](),
	"job.node_joined":   fact[NodeJoined](),
	"job.node_left":     fact[NodeLeft](),
	"job.node_measured": fact[NodeMeasured](),
	"job.ended":         fact[JobEnded](),

	"group.started":          decision[GroupStarted]().until(2),
	"group.coordinator":      decision[GroupCoordinator](),
	"group.node_devices":     fact[NodeDevices](),
	"group.training_started": fact[TrainingStarted](),
	"group.worker_exited":    fact[WorkerExited](),
	"group.stopped":          fact[GroupStopped](),

	"trial.created":        decision[TrialCreated](),
	"trial.stop_requested": decision[TrialStopRequested](),
	"trial.paused":         decision[TrialPaused](),
	"trial.completed":      decision[TrialCompleted](),
	"trial.errored":        decision[TrialErrored](),

	"search.begun":    decision[SearchBegun](),
	"search.assigned": decision[SearchAssigned](),

	"report.metrics": fact[Metrics](),

	"plan.local":  fact[LocalPlan](),
	"plan.global": fact[GlobalPlan](),
	"plan.load":   fact[LoadPlan](),
	"plan.node":   fact[NodePlan](),

	"seal.node": fact[NodeSeal](),

	"write.sealed":    fact[WriteSealed](),
	"write.started":   fact[WriteStarted](),
	"write.completed": fact[WriteCompleted](),
	"write.failed":    fact[WriteFailed](),
	"write.node":      fact[NodeWrite](),

	"replica.node": fact[ReplicaNode](),

	"node.slow": fact[NodeSlow](),

	"checkpoint.begun":      decision[CheckpointBegun](),
	"checkpoint.staged":     decision[CheckpointStaged](),
	"checkpoint.committed":  decision[CheckpointCommitted](),
	"checkpoint.aborted":    decision[CheckpointAborted](),
	"checkpoint.superseded": decision[CheckpointSuperseded](),
	"checkpoint.pinned":     decision[CheckpointPinned](),
	"checkpoint.unpinned":   decision[CheckpointUnpinned](),
	"checkpoint.tagged":     decision[CheckpointTagged](),
	"checkpoint.untagged":   decision[CheckpointUntagged](),
	"checkpoint.attached":   decision[CheckpointAttached](),
	"checkpoint.deleted":    decision[CheckpointDeleted](),

	"restore.begun":     decision[RestoreBegun](),
	"restore.completed": fact[RestoreCompleted](),
	"restore.failed":    fact[RestoreFailed](),

	"gpu.unhealthy": fact[GPUUnhealthy](),
	"gpu.recovered": fact[GPURecovered](),
}
