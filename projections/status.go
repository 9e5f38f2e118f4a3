package projections

import "github.com/ckptstore/ckptstore/events"

// Status is the state of a trial. It follows from the decisions of its lane:
//
//	            created  stop_requested  group.started  paused  completed  errored
//	pending     pending  stopping        running        paused  completed  errored
//	running     running  stopping        running        paused  completed  errored
//	stopping    stopping stopping        running        paused  completed  errored
//	paused      paused   paused          running        paused  completed  errored
//	completed   completed completed      running        paused  completed  errored
//	errored     errored  errored         running        paused  completed  errored
//
// A trial of any status runs again with its next attempt, also a completed
// one: more steps may be asked for. group.started of an attempt that the trial
// has had changes nothing. Nor does a stop that is meant for another job than
// that of the newest attempt. What the job decides about its end is taken as
// it is: the log lets nobody decide who does not run the trial.
//
// A trainer that is killed decides nothing: its trial is still running here,
// until the next job begins an attempt. Whether anybody runs it is known by the
// lease of its run, which is not in the log.
type Status string

// Statuses.
const (
	Pending   Status = "pending"   // it has had no attempt
	Running   Status = "running"   // an attempt has begun
	Stopping  Status = "stopping"  // and is asked to end
	Paused    Status = "paused"    // it ended, to be continued
	Completed Status = "completed" // all ranks ended well
	Errored   Status = "errored"   // the failure budget is used up
)

// onStop is the status after a stop was asked for; others stay as they are.
var onStop = map[Status]Status{Pending: Stopping, Running: Stopping, Stopping: Stopping}

// stopRequested asks the trial's workers to end, if they are those of the job
// that it is meant for.
func (f *fold) stopRequested(b *events.TrialStopRequested) {
	t := f.trial
	next, runs := onStop[t.Status]
	if !runs || b.Job != "" && t.Job != "" && b.Job != t.Job {
		return
	}
	if t.Status == Stopping {
		return // for the reason that was given first
	}
	t.end(next, b.Reason)
}

func (t *Trial) end(status Status, message string) { t.Status, t.Message = status, message }
