package session

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/collective"
	"github.com/ckptstore/ckptstore/internal/session/handoff"
	"github.com/ckptstore/ckptstore/internal/session/retry"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// recoverSaves ends the saves that the trial's earlier attempts left open. A save
// of the newest attempt is committed if all its bytes are in files or in slots
// that the dead trainer left; all others are aborted.
func (j *Job) recoverSaves(ctx context.Context, trial projections.Trial) error {
	open, err := j.store.Views.OpenCheckpoints(ctx, j.cfg.Run, j.cfg.Trial)
	if err != nil || len(open) == 0 {
		return err
	}
	newest := false
	for _, c := range open {
		if c.Attempt == trial.Attempt {
			newest = true
			continue
		}
		_, err := j.decisions.decide(ctx, &events.CheckpointAborted{
			Attempt: c.Attempt, Checkpoint: c.ID, Reason: fmt.Sprintf("attempt %d took over", trial.Attempt),
		})
		if err != nil && !errors.Is(err, errEnded) {
			return err
		}
	}
	if !newest {
		return nil
	}
	attempts, err := j.store.Views.Attempts(ctx, j.cfg.Run, j.cfg.Trial)
	if err != nil {
		return err
	}
	at := slices.IndexFunc(attempts, func(a projections.Attempt) bool { return a.Attempt == trial.Attempt })
	if at < 0 {
		return fmt.Errorf("trial %s of run %s: the views have no attempt %d; run `ckptstore verify`", trial.Name, trial.Run, trial.Attempt)
	}
	world, from := attempts[at].WorldSize, attempts[at].StartedSeq
	kept, err := j.adopt(ctx, trial.Attempt, world, from)
	if err != nil {
		return err
	}
	defer kept.close()
	err = j.takeOver(ctx, trial.Attempt, world, from, kept)
	if len(kept.saves) > 0 && errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		j.log.Warn("staged saves of a dead trainer aborted: not finished in time", "drain_timeout", j.cfg.DrainTimeout, "error", err)
		err = j.takeOver(ctx, trial.Attempt, world, from, nil)
	}
	return err
}

// TakeOver ends the saves of an attempt of this job, whose group could not end
// them itself. from is the sequence at which the attempt began.
func (j *Job) TakeOver(ctx context.Context, attempt int, from uint64) error {
	return j.takeOver(ctx, attempt, j.world, from, nil)
}

// takeOver replays an attempt into a new coordinator, which ends its saves. The
// saves in kept have their bytes in shared memory and are finished.
func (j *Job) takeOver(ctx context.Context, attempt, world int, from uint64, kept *adopted) error {
	known, err := j.store.Log.Last(ctx)
	if err != nil {
		return err
	}
	const why = "the trainer ended before the save was complete"
	coord := planner.NewCoordinator(j.coordinator(attempt, world))
	s := newSaver(j.decisions, j.store, coord, j.log, staging.New(j.arenas, j.cfg.staging(j.log)))
	s.alone = kept != nil // its slots are not locked: the trainer that wrote is dead
	s.onCommit(j.cfg.Committed, nil)
	if kept == nil {
		coord.Abandon(why)
	} else {
		coord.Abandon(why, kept.saves...)
		kept.serve(s)
	}
	defer s.slots.Close()
	s.drain <- drain{why, known}
	ctx, cancel := j.store.calls.Timeout(ctx, j.cfg.DrainTimeout)
	defer cancel()
	if err := s.run(ctx, from, known); err != nil {
		return fmt.Errorf("end the saves that attempt %d left open: %w", attempt, err)
	}
	return nil
}

// ReportedHeader is on the answer to a relayed report: a [handoff.Reported]. The process of the rank's
// node remembers it, for a coordinating process that takes over.
const ReportedHeader = "Ckptstore-Reported"

// RequestHeader is on the answer to a relayed question of a rank whether to end: the request, as
// [Orders] has it. The process of the rank's node remembers it too.
const RequestHeader = "Ckptstore-Request"

// Resumed is what the coordinating process of a living group knows of the time before it: from
// the log, and from the processes of the group's nodes.
type Resumed struct {
	Known uint64 // last event in the log when this process took over
	Heard uint64 // all nodes have got the forwarded events up to here
	Loads int    // number of the newest load in the log
	handoff.Earlier
	// Sequence is the number of the newest collective that a rank has the answer to, and Parts
	// the answer; 0: no rank has made one.
	Sequence uint64
	Parts    [][]byte
}

// hub returns the hub of a group's collectives.
func (r *Resumed) hub(world int) Hub {
	h := collective.NewHub(world)
	if r != nil && r.Sequence > 0 {
		h.Resume(r.Sequence, r.Parts)
	}
	return h
}

// Resume takes over the coordination of the trial's last attempt, whose group lives on other
// nodes: from now on, the coordinator before it can decide nothing. It returns the trial, the attempt,
// and what the log has of it.
func (j *Job) Resume(ctx context.Context, noted func(seq uint64), by *events.GroupCoordinator) (trial projections.Trial, attempt projections.Attempt, of *Resumed, err error) {
	if trial, err = j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial); err != nil {
		return trial, attempt, nil, err
	}
	j.decisions = &decisionLog{
		eventWriter: j.writer, agg: events.Aggregate{Run: j.cfg.Run, Trial: j.cfg.Trial},
		conflict: j.store.Conflict, attempt: trial.Attempt, last: trial.LaneSeq, noted: noted,
	}
	by.Attempt = trial.Attempt
	if _, err = j.decisions.decide(ctx, by); err != nil {
		return trial, attempt, nil, err
	}
	// The coordinator before may have started another attempt just before that.
	if trial, err = j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial); err != nil {
		return trial, attempt, nil, err
	}
	j.decisions.attempt = trial.Attempt
	attempts, err := j.store.Views.Attempts(ctx, j.cfg.Run, j.cfg.Trial)
	if err != nil {
		return trial, attempt, nil, err
	}
	at := slices.IndexFunc(attempts, func(a projections.Attempt) bool { return a.Attempt == trial.Attempt })
	if at < 0 {
		return trial, attempt, nil, fmt.Errorf("trial %s of run %s: the views have no attempt %d; run `ckptstore verify`", trial.Name, trial.Run, trial.Attempt)
	}
	attempt = attempts[at]
	of, err = j.soFar(ctx, attempt)
	return trial, attempt, of, err
}

// soFar reads the reports and loads of an attempt.
func (j *Job) soFar(ctx context.Context, a projections.Attempt) (*Resumed, error) {
	known, err := j.store.Log.Last(ctx)
	if err != nil {
		return nil, err
	}
	of := &Resumed{Known: known, Earlier: handoff.Earlier{Reports: map[int]handoff.Reported{}}}
	for r, err := range j.store.Log.ReadTrial(ctx, events.Aggregate{Run: j.cfg.Run, Trial: j.cfg.Trial}, a.StartedSeq, known) {
		if err != nil {
			return nil, err
		}
		if r.Kind != (events.Metrics{}).Kind() && r.Kind != (events.RestoreBegun{}).Kind() {
			continue
		}
		body, err := r.Body()
		if err != nil {
			return nil, err
		}
		switch b := body.(type) {
		case *events.Metrics:
			if b.Attempt == a.Attempt && b.Iteration > of.Last.Iteration {
				of.Last = handoff.Reported{Iteration: b.Iteration, Step: b.Step}
			}
		case *events.RestoreBegun:
			if b.Attempt == a.Attempt {
				of.Loads = max(of.Loads, b.Load)
			}
		}
	}
	return of, nil
}

// Overtaken returns an [ErrFenced] if another process coordinates by now: this one must record
// nothing more about the attempt. It returns nil before the trial is open.
func (j *Job) Overtaken(ctx context.Context) error {
	if j.decisions == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, retry.EndTimeout)
	defer cancel()
	if err := j.decisions.overtaken(ctx); errors.Is(err, ErrFenced) {
		return err
	}
	return nil // the log does not answer: it takes no facts either
}
