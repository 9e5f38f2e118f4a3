package projections

import (
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

func (f *fold) trialCreated(b *events.TrialCreated) error {
	f.trial.Config, f.trial.Parent = b.Config, b.Parent
	return nil
}

func (f *fold) groupStarted(b *events.GroupStarted) error {
	k := attemptKey(f.run, f.name, b.Attempt)
	if _, found, err := load[Attempt](f.t, k); err != nil || found {
		return err
	}
	segment := Segment{Seq: f.r.Sequence, Resume: b.Resume}
	if b.Attempt > f.trial.Attempt {
		t := f.trial
		t.Attempt, t.WorldSize, t.Job, t.Resume = b.Attempt, b.WorldSize, b.Job, b.Resume
		t.end(Running, "")
		if err := f.rewind(b.Resume); err != nil {
			return err
		}
		segment.ResumeSeq = t.HeadSeq
		if err := errors.Join(f.tallyAttempt(b), f.attemptBegins(b)); err != nil {
			return err
		}
	}
	for p := range b.Placed() {
		w := Worker{
			Attempt: b.Attempt, Rank: p.Rank, Node: p.Node, LocalRank: p.LocalRank,
			Devices: p.Devices, State: Starting,
		}
		if err := store(f.t, workerKey(f.run, f.name, b.Attempt, p.Rank), w); err != nil {
			return err
		}
	}
	return store(f.t, k, Attempt{
		Run: f.run, Trial: f.name, Attempt: b.Attempt, Job: b.Job, WorldSize: b.WorldSize,
		Backend: b.Backend, Resume: b.Resume, StartedSeq: f.r.Sequence, StartedAt: f.at(),
		Segments: []Segment{segment},
	})
}

// nodeDevices sets the devices of workers that have a place.
func (f *fold) nodeDevices(b *events.NodeDevices) error {
	for i, rank := range events.RanksIn(b.Ranks) {
		k := workerKey(f.run, f.name, b.Attempt, rank)
		w, found, err := load[Worker](f.t, k)
		if err != nil {
			return err
		}
		if !found {
			continue
		}
		w.Devices = b.Devices[i]
		if err := store(f.t, k, w); err != nil {
			return err
		}
	}
	return nil
}

// changeAttempt changes the row of an attempt, and does nothing if there is none: only
// a decision starts an attempt.
func (f *fold) changeAttempt(attempt int, change func(*Attempt)) error {
	k := attemptKey(f.run, f.name, attempt)
	a, found, err := load[Attempt](f.t, k)
	if err != nil || !found {
		return err
	}
	change(&a)
	return store(f.t, k, a)
}

// changeWorkers changes the workers of an attempt that have not exited.
func (f *fold) changeWorkers(attempt int, change func(*Worker)) error {
	workers, err := Workers(f.t, f.run, f.name, attempt)
	if err != nil {
		return err
	}
	for _, w := range workers {
		if w.State == Exited {
			continue
		}
		change(&w)
		if err := store(f.t, workerKey(f.run, f.name, attempt, w.Rank), w); err != nil {
			return err
		}
	}
	return nil
}

func first(at *time.Time, now time.Time) bool {
	if !at.IsZero() {
		return false
	}
	*at = now
	return true
}

func (f *fold) trainingStarted(b *events.TrainingStarted) error {
	err := f.changeAttempt(b.Attempt, func(a *Attempt) { first(&a.TrainingAt, f.at()) })
	if err != nil {
		return err
	}
	if err := f.trainingBegins(b.Attempt); err != nil {
		return err
	}
	return f.changeWorkers(b.Attempt, func(w *Worker) { w.State = Working })
}

func (f *fold) workerExited(b *events.WorkerExited) error {
	if err := f.workerFailed(b); err != nil {
		return err
	}
	k := workerKey(f.run, f.name, b.Attempt, b.Rank)
	w, found, err := load[Worker](f.t, k)
	if err != nil {
		return err
	}
	if !found {
		w = Worker{Attempt: b.Attempt, Rank: b.Rank}
	}
	// An observed exit is better than the one implied by the stop of the group.
	if w.State == Exited && !w.Unseen {
		return nil
	}
	w.State, w.Code, w.Signal, w.Unseen = Exited, b.Code, b.Signal, b.Unseen
	w.Message, w.Traceback = b.Message, b.Traceback
	w.ExitedSeq, w.ExitedAt = f.r.Sequence, f.at()
	return store(f.t, k, w)
}

// term is the newest group.coordinator of a group.
type term struct {
	ID   string `json:"id"`
	Node int    `json:"node"`
}

// coordinated notes who coordinates the newest group: it may have started just before the decision. The job is the
// same, and has no other group at a time.
func (f *fold) coordinated(b *events.GroupCoordinator) error {
	now := term{f.r.ID, b.Node}
	return errors.Join(store(f.t, termKey(f.run, f.name, f.trial.Attempt), now), store(f.t, key(keyJobTerm, f.run, b.Job), now))
}

// overtaken reports whether another process coordinated the group or the job at a key when a coordinator recorded its
// end, with the term of. Decisions of the old coordinator conflict, but nothing refuses a fact: a coordinator that was
// paused between its last look at the lane and the append would end a group that lives. In the log, every fold finds
// the same of the two first.
func (f *fold) overtaken(k []byte, of string) (bool, error) {
	now, found, err := load[term](f.t, k)
	switch {
	case err != nil || !found:
		return false, err
	case of != "":
		return of != now.ID, nil
	}
	return f.r.Scope.Actor != events.Node(now.Node), nil // by a version that wrote no term
}

func (f *fold) groupStopped(b *events.GroupStopped) error {
	if over, err := f.overtaken(termKey(f.run, f.name, b.Attempt), b.Term); over || err != nil {
		return err
	}
	again := false
	err := f.changeAttempt(b.Attempt, func(a *Attempt) {
		if again = !first(&a.StoppedAt, f.at()); !again {
			a.Reason = b.Reason
		}
	})
	if err != nil || again {
		return err
	}
	if err := errors.Join(f.attemptStops(b.Attempt), f.tallyStop(b)); err != nil {
		return err
	}
	return f.changeWorkers(b.Attempt, func(w *Worker) {
		w.State, w.Code, w.Unseen, w.Message = Exited, -1, true, "stopped with its group"
		w.ExitedSeq, w.ExitedAt = f.r.Sequence, f.at()
	})
}

// reportRow is the stored form of a [Report], with the body unchanged.
type reportRow struct {
	Sequence uint64          `json:"sequence"`
	Time     time.Time       `json:"time"`
	Report   json.RawMessage `json:"report"`
}

// reported stores a report. Reports are most of a log, so each costs one row: reported
// changes only rows that await it, and queries derive the rest.
func (f *fold) reported(b *events.Metrics) error {
	k := reportKey(f.run, f.name, b.Attempt, b.Iteration)
	if old, err := f.t.Get(k); err != nil || old != nil {
		return err
	}
	// Encoded by hand: the body is known to be JSON and must not change.
	row := append(make([]byte, 0, len(f.r.Data)+80), `{"sequence":`...)
	row = strconv.AppendUint(row, f.r.Sequence, 10)
	row = append(row, `,"time":"`...)
	row = f.at().AppendFormat(row, time.RFC3339Nano)
	row = append(row, `","report":`...)
	row = append(row, f.r.Data...)
	if err := f.t.Set(k, append(row, '}')); err != nil {
		return err
	}
	marked, err := f.awaited(b.Attempt, Report{Iteration: b.Iteration, Step: b.Step, Metrics: b.Metrics})
	if err != nil || b.Iteration < 1 || !marked && b.Iteration%fan != 0 {
		return err
	}
	return f.roll(b.Attempt, b.Iteration)
}

// restoreBegun folds the answer to a load. If the current attempt loads another
// checkpoint of the trial than the head, training continues from there, and so does the
// line. A checkpoint of another trial does not move the line.
func (f *fold) restoreBegun(b *events.RestoreBegun) error {
	k := restoreKey(f.run, f.name, b.Attempt, b.Load)
	row, found, err := load[Restore](f.t, k)
	if err != nil || found && row.BegunSeq != 0 {
		return err
	}
	row.Attempt, row.Load, row.Checkpoint, row.From, row.WorldSize = b.Attempt, b.Load, b.Checkpoint, b.From, b.WorldSize
	row.BegunSeq, row.BegunAt = f.r.Sequence, f.at()
	if err := store(f.t, k, row); err != nil {
		return err
	}
	if err := f.loadBegins(b, row.EndedSeq != 0); err != nil {
		return err
	}
	if b.Attempt != f.trial.Attempt || b.From == "" && b.Checkpoint == f.trial.Head {
		return nil
	}
	own, err := f.ownCommitted(b.Checkpoint)
	if err != nil {
		return err
	}
	p := f.trial.Parent
	parents := p != nil && p.Checkpoint == b.Checkpoint && (b.From == "" || b.From == p.Run+"/"+p.Trial)
	start := b.Checkpoint
	switch {
	case own != 0 && b.From == "":
	case !parents:
		return nil
	default:
		// Its ID is meaningless in this run, and the next attempt must find it.
		if start = ParentRef(*f.trial.Parent); start == f.trial.Head {
			return nil
		}
	}
	newest, _, err := newestReport(f.t, f.run, f.name, b.Attempt)
	if err != nil {
		return err
	}
	if err := f.rewind(start); err != nil {
		return err
	}
	if err := f.loadRewinds(b.Attempt, start); err != nil {
		return err
	}
	segment := Segment{
		Seq: f.r.Sequence, Resume: start, ResumeSeq: f.trial.HeadSeq, From: newest.Iteration,
	}
	return f.changeAttempt(b.Attempt, func(a *Attempt) { a.Segments = append(a.Segments, segment) })
}

// changeRestore changes the row of a load that has not ended.
func (f *fold) changeRestore(attempt, n int, change func(*Restore)) error {
	k := restoreKey(f.run, f.name, attempt, n)
	row, found, err := load[Restore](f.t, k)
	if err != nil || found && row.EndedSeq != 0 {
		return err
	}
	row.Attempt, row.Load = attempt, n
	row.EndedSeq, row.EndedAt = f.r.Sequence, f.at()
	change(&row)
	if row.BegunSeq != 0 {
		if err := errors.Join(f.loadEnds(attempt), f.tallyRestore(row)); err != nil {
			return err
		}
	}
	return store(f.t, k, row)
}

func (f *fold) restoreCompleted(b *events.RestoreCompleted) error {
	return f.changeRestore(b.Attempt, b.Load, func(row *Restore) {
		row.Checkpoint, row.Tier, row.Bytes, row.Unread = b.Checkpoint, b.Tier, b.Bytes, b.Unread
		row.ResolveTook, row.ReadTook, row.CheckTook = b.Resolve, b.Read, b.Check
	})
}

func (f *fold) restoreFailed(b *events.RestoreFailed) error {
	return f.changeRestore(b.Attempt, b.Load, func(row *Restore) {
		row.Checkpoint, row.Error = b.Checkpoint, b.Error
	})
}

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
// A trial of any status runs again with its next attempt. That includes a completed
// trial, for which more steps may be requested. A group.started for an attempt that the
// trial has had changes nothing. Nor does a stop for a job other than the newest
// attempt's. The job's decisions about its end are accepted as they are: the log lets
// only the process that runs the trial decide.
//
// A killed trainer decides nothing: its trial is still running here, until the next job
// begins an attempt. The lease of its run, which is not in the log, shows whether a
// process runs it.
type Status string

// Statuses.
const (
	Pending   Status = "pending"   // no attempt yet
	Running   Status = "running"   // an attempt has begun
	Stopping  Status = "stopping"  // an attempt has begun and is asked to end
	Paused    Status = "paused"    // it ended and can be resumed
	Completed Status = "completed" // all ranks ended successfully
	Errored   Status = "errored"   // the failure budget is used up
)

// onStop is the status after a stop request; other statuses stay.
var onStop = map[Status]Status{Pending: Stopping, Running: Stopping, Stopping: Stopping}

// stopRequested asks the trial's workers to end, if the request is for their job.
func (f *fold) stopRequested(b *events.TrialStopRequested) {
	t := f.trial
	next, runs := onStop[t.Status]
	if !runs || b.Job != "" && t.Job != "" && b.Job != t.Job {
		return
	}
	if t.Status == Stopping {
		return // the first reason stays
	}
	t.end(next, b.Reason)
}

func (t *Trial) end(status Status, message string) { t.Status, t.Message = status, message }
