// Package projections folds the log into rows: runs, jobs, trials, attempts,
// workers, checkpoints, their line of descent, restores, metrics and devices
// that failed. A fold is a pure function of a [Table] and one event, so the same
// code runs in memory (a replay, the state as of a sequence) and in a batch of a
// database. The content of a row depends on the log alone, never on a clock or on when
// it was folded.
//
//	row         JSON of its exported type; fields in the order of the type
//	line        the checkpoints that lead to the present: the head of a trial
//	            and its ancestors; a resume from X closes the old line
//	segment     the part of an attempt from one resume to the next
//	superseded  committed, but not in the line: hidden, kept by its ID
//
// Repeated facts change nothing: they are folded by natural key, (checkpoint, kind,
// rank) or (attempt, iteration), and the first one wins. A decision was conditional on
// its predecessors, so a fold never rejects it; a decision's kind outside the lane of
// decisions decides nothing.
//
// Keys start with the byte of their kind. A name is its length (a varint) and
// its bytes, a number 8 bytes big-endian, ~number its complement, so that the
// newest comes first. The id in an 'i' key is the rest of the key: a prefix of
// an ID is a range of keys. No key starts with the byte 0, which is reserved for the
// package that stores the rows.
//
//	's'                               [Store]
//	'r' run                           [Run]
//	'j' run job                       [Job]
//	't' run trial                     [Trial], without what a query derives
//	'a' run trial attempt             [Attempt]
//	'w' run trial attempt rank        [Worker]
//	'l' run trial attempt load        [Restore]
//	'm' run trial attempt ~iteration  {sequence, time, report}: the body as it came
//	'u' run trial attempt level bucket  the reports of 16^level iterations, in
//	                                  binary; level is one byte
//	'c' run trial ~begun              [Checkpoint]
//	'i' run trial id                  sequence of the checkpoint's begun event
//	'o' run trial ~begun              true, while the checkpoint is open or staged
//	'g' run trial tag                 sequence of the checkpoint's begun event
//	'p' run trial checkpoint rank     [Write], until the checkpoint is deleted
//	'd' run trial node device         [Device], once it was unhealthy
//	'k' run trial node                [Replica]: the newest of the node
//	'b' run trial metric ~begun       a committed checkpoint's value of a metric
//	'x' run trial                     the time of its attempts: see [Usage]
//	'y' run                           [Tally]
//	'f' run trial attempt             the newest group.coordinator of a group that has one
//	'z' run job                       the newest group.coordinator of a job that has one
//	'v' sequence                      [Void]: a message that is not a valid event
//	'n' run                           [Newer]: the first unknown event
//	'h' run trial ~begun              the iteration of the report that 'b' rows are from
//	'q' run trial attempt iteration   the sets of checkpoints whose values the report
//	                                  of that iteration may change; it may also
//	                                  complete a rollup
//	'e' run trial set step begun      a checkpoint in a set; step is 2^63 more
package projections

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/events"
	"github.com/zeebo/blake3"
)

// Version is the version of the folds and rows. Rows of another version are discarded,
// and the log is folded again from its start.
const Version = 17

// DefaultTrial is the trial of a run that has only one.
const DefaultTrial = "main"

// Reader is an ordered table of rows. Several goroutines may read at once as long as
// none writes.
type Reader interface {
	// Get returns the value of key, or nil if there is none. The caller owns it.
	Get(key []byte) ([]byte, error)
	// Scan visits the rows with lo <= key < hi in key order, up to the first error,
	// which it returns. A nil bound is open. The slices are valid only during the
	// visit, which must not write to the table.
	Scan(lo, hi []byte, visit func(key, value []byte) error) error
}

// Table is a table that a fold writes to. A read sees the writes before it.
type Table interface {
	Reader
	// Set copies key and value.
	Set(key, value []byte) error
	// Delete removes the row of key, if there is one.
	Delete(key []byte) error
}

// Apply folds one event into t. Events must be applied in the order of their sequence,
// each once. After an error t may hold a part of the event's rows and must be dropped.
// An invalid message gets a row of its own. After an event of an unknown kind or a
// newer version, [Understood] returns an error for its run.
func Apply(t Table, r events.Recorded) error {
	f := fold{t: t, r: r, run: r.Scope.Run, name: r.Scope.Trial}
	body, err := r.Body()
	var newer *events.NewerError
	switch {
	case errors.As(err, &newer):
		err = f.newer(newer)
	case err == nil:
		err = f.apply(body)
	}
	if err != nil {
		return fmt.Errorf("apply event %d (%s): %w", r.Sequence, r.Kind, err)
	}
	return nil
}

// fold is the application of one event.
type fold struct {
	t         Table
	r         events.Recorded
	run, name string // of the event's scope; name is the trial's
	trial     *Trial // of an event in the lane of decisions
}

func (f *fold) apply(body events.Body) error {
	if void, ok := body.(*events.Void); ok {
		return f.voided(void)
	}
	decides := f.r.Kind.Decides()
	if f.r.Scope.Actor != events.Server {
		if decides {
			return nil // no other decision was fenced against it, so it decides nothing
		}
		return f.fact(body)
	}
	if created, ok := body.(*events.StoreCreated); ok {
		return f.storeCreated(created)
	}
	if void, ok := body.(*events.LogVoided); ok && f.run == events.None && f.name == events.None {
		return f.recordedVoid(void)
	}
	switch body.(type) {
	case *events.AuditSealed, *events.AccessGranted, *events.AccessRevoked:
		if f.run == events.None && (f.name == events.None || f.name == events.Keys) {
			return nil // for those who verify or audit the log; they change no row
		}
	case *events.SearchBegun, *events.SearchAssigned:
		return f.seeRun() // the search folds them itself; the trials that it makes have rows
	}
	trial, found, err := load[Trial](f.t, trialKey(f.run, f.name))
	if err != nil {
		return err
	}
	if !found {
		if err := f.seeRun(); err != nil {
			return err
		}
		trial = Trial{Run: f.run, Name: f.name, Status: Pending, CreatedSeq: f.r.Sequence, CreatedAt: f.at()}
	}
	trial.LaneSeq = f.r.Sequence
	f.trial = &trial
	if decides {
		err = f.decision(body)
	} else {
		err = f.fact(body)
	}
	if err != nil {
		return err
	}
	return store(f.t, trialKey(f.run, f.name), trial)
}

// fact folds an observation. The trial's own state never follows from a fact, so a fact
// of an old attempt can only complete rows of that attempt.
func (f *fold) fact(body events.Body) error {
	switch b := body.(type) {
	case *events.JobStarted:
		return f.jobStarted(b)
	case *events.NodeJoined:
		return f.nodeJoined(b)
	case *events.NodeLeft:
		return f.nodeLeft(b)
	case *events.NodeMeasured:
		return f.nodeMeasured(b)
	case *events.NodeSlow:
		return f.nodeSlow(b)
	case *events.JobEnded:
		return f.jobEnded(b)
	case *events.NodeDevices:
		return f.nodeDevices(b)
	case *events.TrainingStarted:
		return f.trainingStarted(b)
	case *events.WorkerExited:
		return f.workerExited(b)
	case *events.GroupStopped:
		return f.groupStopped(b)
	case *events.Metrics:
		return f.reported(b)
	case *events.WriteSealed, *events.WriteCompleted, *events.WriteFailed, *events.NodeSeal, *events.NodeWrite:
		return f.writing(b)
	case *events.RestoreCompleted:
		return f.restoreCompleted(b)
	case *events.RestoreFailed:
		return f.restoreFailed(b)
	case *events.GPUUnhealthy:
		return f.deviceUnhealthy(b)
	case *events.GPURecovered:
		return f.deviceRecovered(b)
	case *events.LocalPlan, *events.NodePlan, *events.GlobalPlan, *events.LoadPlan:
		return nil // these have no row: plans are in the log
	case *events.ReplicaNode:
		return f.replicated(b)
	case *events.WriteStarted:
		return nil // only who ends the save asks for it, and reads the save in the log
	}
	return fmt.Errorf("facts of this kind have no fold")
}

func (f *fold) decision(body events.Body) error {
	switch b := body.(type) {
	case *events.GroupStarted:
		return f.groupStarted(b)
	case *events.GroupCoordinator:
		return f.coordinated(b)
	case *events.TrialCreated:
		return f.trialCreated(b)
	case *events.TrialStopRequested:
		f.stopRequested(b)
		return nil
	case *events.TrialPaused:
		f.trial.end(Paused, b.Reason)
		return nil
	case *events.TrialCompleted:
		f.trial.end(Completed, "")
		return nil
	case *events.TrialErrored:
		f.trial.end(Errored, b.Message)
		return nil
	case *events.RestoreBegun:
		return f.restoreBegun(b)
	case *events.CheckpointBegun:
		return f.begun(b)
	case *events.CheckpointStaged:
		return f.staged(b)
	case *events.CheckpointCommitted:
		return f.committed(b)
	case *events.CheckpointAborted:
		return f.aborted(b)
	case *events.CheckpointSuperseded:
		return f.superseded(b)
	case *events.CheckpointPinned:
		return f.change(b.Checkpoint, func(c *Checkpoint) { c.Pinned, c.PinReason = true, b.Reason })
	case *events.CheckpointUnpinned:
		return f.change(b.Checkpoint, func(c *Checkpoint) { c.Pinned, c.PinReason = false, "" })
	case *events.CheckpointTagged:
		return f.tagged(b)
	case *events.CheckpointUntagged:
		return f.untagged(b)
	case *events.CheckpointAttached:
		return f.change(b.Checkpoint, func(c *Checkpoint) { c.attach(b) })
	case *events.CheckpointDeleted:
		return f.deleted(b)
	case *events.LogVoided, *events.AuditSealed, *events.AccessGranted, *events.AccessRevoked:
		return nil // only events of the store itself carry information
	}
	return fmt.Errorf("decisions of this kind have no fold")
}

// Digest returns the BLAKE3-256 over all rows in key order, each as the length of the
// key (4 bytes big-endian), the key, the length of the value and the value. Equal
// digests mean equal rows.
func Digest(r Reader) ([32]byte, error) {
	h := blake3.New()
	var buf []byte
	err := r.Scan(nil, nil, func(key, value []byte) error {
		buf = binary.BigEndian.AppendUint32(buf[:0], uint32(len(key)))
		buf = append(buf, key...)
		buf = binary.BigEndian.AppendUint32(buf, uint32(len(value)))
		buf = append(buf, value...)
		_, err := h.Write(buf)
		return err
	})
	var sum [32]byte
	if err != nil {
		return sum, fmt.Errorf("digest rows: %w", err)
	}
	h.Sum(sum[:0])
	return sum, nil
}
